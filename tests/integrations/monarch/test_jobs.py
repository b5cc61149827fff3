"""Jobs of Monarch bring up hosts with our launchers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import shutdown_context, this_host
from monarch_kernel.errors import LaunchError
from monarch_kernel.integrations.monarch import jobs
from monarch_kernel.integrations.monarch.job import (
    JobState,
    JobTrait,
    KubernetesJob,
    LocalJob,
    ProcessJob,
    SlurmJob,
    TelemetryConfig,
    hosts_from_config,
)
from monarch_kernel.integrations.monarch.kubernetes_job import ImageSpec, KubeConfig
from monarch_kernel.launch.kubernetes import KubernetesLauncher
from monarch_kernel.launch.local import LocalLauncher
from monarch_kernel.launch.slurm import SlurmLauncher
from tests.launch.cluster import Cluster, Image
from tests.launch.slurms import SlurmCluster, why_no_slurm
from tests.support.waiting import LONG_S, wait_until


def launchers(job: Any) -> dict[str, Any]:
    """Make the launcher of each mesh."""
    return {name: make() for name, (make, _) in job._launchers().items()}


def options_of(launcher: SlurmLauncher) -> list[str]:
    """Return the options of ``sbatch``."""
    return [line.removeprefix("#SBATCH ") for line in launcher.script(2).splitlines() if line.startswith("#SBATCH ")]


def test_options_of_slurm_reach_the_launcher(tmp_path: Path) -> None:
    job = SlurmJob(
        {"trainers": 2},
        "/opt/python",
        ["--reservation=mine"],
        time_limit="4:00:00",
        partition="gpu",
        log_dir=str(tmp_path),
        gpus_per_node=8,
        account="a",
        qos="q",
        job_name="mine",
        job_start_timeout=30,
    )
    (launcher,) = launchers(job).values()
    assert isinstance(launcher, SlurmLauncher)
    options = options_of(launcher)
    wanted = "--time=4:00:00 --partition=gpu --gpus-per-node=8 --account=a --qos=q --exclusive --job-name=mine"
    assert set(wanted.split()) <= set(options)
    assert options[-1] == "--reservation=mine"
    assert "/opt/python" in launcher.script(2)
    assert launcher.directory.parent == tmp_path
    job.add_mesh("evaluators", 3)
    assert {name: count for name, (_, count) in job._launchers().items()} == {"trainers": 2, "evaluators": 3}
    with pytest.raises(ValueError, match="at least one host"):
        job.add_mesh("none", 0)
    (shared,) = launchers(SlurmJob({"a": 1}, exclusive=False, cpus_per_task=2)).values()
    assert "--exclusive" not in options_of(shared)
    (whole,) = launchers(SlurmJob({"a": 1})).values()
    assert "--exclusive" in options_of(whole)
    assert not job.active


def test_options_of_kubernetes_reach_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("apiVersion: v1\nkind: Config\n")
    job = KubernetesJob("lab", timeout=5, kubeconfig=KubeConfig.from_path(tmp_path / "config"))
    job.add_mesh("a", 2, image_spec=ImageSpec("monarch:1", {"nvidia.com/gpu": 4, "cpu": "1500m", "memory": "64Gi"}))
    job.add_mesh("b", 1, image_spec="monarch:2")
    made = launchers(job)
    assert isinstance(made["a"], KubernetesLauncher)
    text = made["a"].plan(2)
    for words in ("monarch:1", "nvidia.com/gpu", "1500m", "64Gi", "lab"):
        assert words in text
    assert "monarch:2" in made["b"].plan(1)
    for options, says in [
        ({}, "needs an image"),
        ({"label_selector": "app=x"}, "pass image_spec"),
        ({"pod_template": object()}, "pod="),
    ]:
        with pytest.raises((ValueError, NotImplementedError), match=says):
            job.add_mesh("c", 1, **options)
    with pytest.raises(NotImplementedError, match="tunnel=True"):
        KubernetesJob("lab", attach_to="tcp://127.0.0.1:26600")


def test_arguments_of_jobs_are_checked() -> None:
    for make, says in [
        (lambda: ProcessJob({"a": 0}), "at least one host"),
        (lambda: SlurmJob({"a": "2"}), "at least one host"),  # type: ignore[dict-item]
        (lambda: SlurmJob({"a": 1}, ntasks_per_node=8), "must be 1"),
    ]:
        with pytest.raises(ValueError, match=says):
            make()
    with pytest.raises(TypeError, match="slurm_args"):
        SlurmJob({"a": 1}, reservation="mine")
    with pytest.raises(NotImplementedError, match="sbatch"):
        LocalJob().apply("train.py")


def test_what_jobs_do_not_do_is_refused_with_another_way() -> None:
    job: Any = SlurmJob({"a": 1})
    for call, says in [
        (lambda: job.dump("job.pkl"), "--detach"),
        (job.dumps, "--detach"),
        (lambda: job.gather_mount("/there", "/here"), "sync_workspace"),
        (lambda: job.remote_mount("/here"), "sync_workspace"),
        (job.profile, "%mesh profile"),
        (job.telemetry_query_client, "%mesh show"),
        (lambda: job.share_node(2, 1, "gpu"), "exclusive=False"),
        (lambda: LocalJob().process, "state"),
        (lambda: ImageSpec("monarch:1", enable_fuse=True), "pod="),
        (lambda: KubeConfig.from_config(object()), "from_path"),
    ]:
        with pytest.raises(NotImplementedError, match=says):
            call()
    assert not KubeConfig().out_of_cluster
    assert KubeConfig.from_path("config").out_of_cluster


def test_a_job_whose_second_mesh_is_refused_keeps_no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hosts:
        def shutdown(self) -> Any:
            given_back.append(self)
            return self

        def get(self) -> None: ...

    def allocate(launcher: object, count: int, **_: object) -> Hosts:
        if count == 2:
            raise LaunchError("there are no two")
        return Hosts()

    given_back: list[Hosts] = []
    monkeypatch.setattr(jobs, "allocate", allocate)
    job = ProcessJob({"one": 1, "two": 2})
    with pytest.raises(LaunchError):
        job.state(cached_path=None)
    assert len(given_back) == 1
    assert not job.active


def test_a_job_of_the_user_gives_its_own_state(session: None) -> None:
    class Mine(JobTrait):
        def _create(self, client_script: str | None) -> None:
            self.created = True

        def _state(self) -> JobState:
            return JobState({"all": this_host()})

        def _kill(self) -> None:
            self.created = False

    job = Mine().enable_telemetry(TelemetryConfig(dashboard_port=0)).enable_admin()
    assert job.apply_id is None
    assert job.state().all.extent == this_host().extent
    assert repr(job.state()) == "JobState(all: 1)"
    assert (job.state().admin_url, job.state().dashboard_url, job.state().query_engine) == (None, None, None)
    assert JobState({"telemetry_url": this_host()}).telemetry_url.extent == this_host().extent
    assert (job.created, job.active, job.can_run(job)) == (True, True, True)
    first = job.apply_id
    assert first
    assert first == job.apply_id
    job.kill()
    assert (job.created, job.active, job.apply_id) == (False, False, None)
    job.apply()
    assert job.apply_id not in (None, first)
    job.kill()
    with pytest.raises(NotImplementedError, match="_state"):
        JobTrait().state()


def test_a_job_fits_one_with_the_same_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hosts:
        def shutdown(self) -> Any:
            return self

        def get(self) -> None:
            """As a future does."""

    monkeypatch.setattr(jobs, "allocate", lambda *_, **options: Hosts())
    for make, other in [
        (lambda: ProcessJob({"a": 1, "b": 2}), ProcessJob({"a": 1})),
        (lambda: SlurmJob({"a": 1}, partition="gpu"), SlurmJob({"a": 1}, partition="cpu")),
    ]:
        job = make()
        assert not job.can_run(make())
        job.apply()
        assert job.can_run(make())
        assert not job.can_run(other)
        assert not job.can_run(LocalJob())
        job.kill()
        assert not job.can_run(make())


def test_the_hosts_of_a_configuration_are_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "allocate", lambda launcher, count, **_: (type(launcher), count))
    monkeypatch.setattr(jobs, "view_of", lambda hosts: hosts)
    assert hosts_from_config("MONARCH_HOSTS") == (LocalLauncher, 2)


@pytest.fixture
def ended() -> Iterator[None]:
    yield
    shutdown_context().get()


def ranks_of(hosts: Any) -> tuple[int, ...]:
    values: tuple[int, ...] = hosts.spawn_procs({"gpus": 2}, device="cpu").run("rank").get(LONG_S).values()
    return values


@pytest.mark.slow
def test_a_job_of_kubernetes_brings_up_pods(tmp_path: Path, ended: None) -> None:
    cluster = Cluster(tmp_path)
    cluster.images["monarch:1"] = Image({"python3": (sys.executable, "...")})
    try:
        job = KubernetesJob(kubeconfig=KubeConfig.from_path(cluster.kubeconfig()))
        job.add_mesh("trainers", 2, image_spec="monarch:1")
        assert ranks_of(job.state(cached_path=None).trainers) == (0, 1, 2, 3)
        assert len(cluster.names("pods")) == 2
        job.kill()
        wait_until(lambda: cluster.names("pods") == [], "the end of the pods")
    finally:
        shutdown_context().get()
        cluster.close()


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm())
def test_a_job_of_slurm_brings_up_nodes(
    tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch, ended: None
) -> None:
    cluster = SlurmCluster(short_path, ("n1", "n2"))
    try:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        wait_until(cluster.is_idle, "the nodes to be idle")
        job = SlurmJob({"trainers": 2}, python_exe=sys.executable, log_dir=str(tmp_path))
        assert ranks_of(job.state(cached_path=None).trainers) == (0, 1, 2, 3)
        job.kill()
        wait_until(lambda: not cluster.run("squeue", "-h"), "the end of the job")
    finally:
        shutdown_context().get()
        cluster.close()
