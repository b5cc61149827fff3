"""The Slurm launcher, against a real cluster of three nodes; a puppet, which starts at once, replaces the agent."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import agent_command
from monarch_kernel.launch.slurm import SlurmLauncher
from monarch_kernel.launch.slurm.commands import call, words_of
from monarch_kernel.launch.slurm.host import SlurmJob
from tests.launch import puppet
from tests.launch.puppet import Desk, make_python
from tests.launch.slurms import SlurmCluster, why_no_slurm
from tests.support.processes import has_ended
from tests.support.waiting import wait_until

GOLDEN = Path(__file__).parent / "golden"
NODES = ("n1", "n2", "n3")
LAUNCHER = "monarch_kernel.launch.slurm.launcher"


def needs_slurm(test: Any) -> Any:
    """Mark a test as slow, and skip it if Slurm is not installed."""
    return pytest.mark.slow(pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm())(test))


@pytest.fixture(scope="module")
def one_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), NODES)
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(one_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    for name, value in one_cluster.environment.items():
        monkeypatch.setenv(name, value)
    wait_until(one_cluster.is_idle, "the nodes to be idle")
    return one_cluster


@pytest.fixture
def desk() -> Iterator[Desk]:
    with puppet.desk() as desk:
        yield desk


@pytest.fixture
def launch(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Callable[..., SlurmLauncher]]:
    """A function that creates launchers; they are closed after the test."""
    launchers = []
    python = make_python(tmp_path)

    def make(**options: Any) -> SlurmLauncher:
        launchers.append(SlurmLauncher(**{"python": python, "directory": tmp_path / "logs", "ask_s": 0.5, **options}))
        return launchers[-1]

    yield make
    for launcher in launchers:
        launcher.close(0.0)
        assert not launcher.directory.exists()
    wait_until(lambda: not cluster.run("squeue", "-h"), "the end of all jobs")


def end_of(handle: Any) -> str:
    return str(wait_until(handle.poll, "the end of the host"))


# -- coming up


@needs_slurm
def test_hosts_come_up(launch: Any, desk: Desk, cluster: SlurmCluster) -> None:
    launcher = launch()
    handles = launcher.launch(desk.configs(2, first=3))
    assert launcher.progress().startswith("Slurm: ")
    agents = sorted([desk.greet(), desk.greet()], key=lambda agent: agent.host)
    assert [agent.host for agent in agents] == [3, 4]
    wait_until(lambda: all(handle.node for handle in handles), "the names of the nodes")
    assert [agent.hello["env"]["SLURMD_NODENAME"] for agent in agents] == [handle.node for handle in handles]
    assert launcher.progress() == ""
    assert [handle.poll() for handle in handles] == [None, None]
    assert agents[0].hello["argv"] == list(agent_command()[1:])
    agents[1].tell("say hello there")
    wait_until(lambda: handles[1].log_tail() == ("the puppet for host 4 is up", "hello there"), "its log")
    assert launcher.directory.stat().st_mode & 0o777 == 0o700
    launcher.close(0.0)
    assert all(has_ended(agent.pid) for agent in agents)


@needs_slurm
def test_other_users_cannot_read_the_token(launch: Any, desk: Desk, cluster: SlurmCluster, tmp_path: Path) -> None:
    launcher = launch()
    launcher.launch([desk.config()])
    desk.greet()
    job = cluster.run("squeue", "-h", "-o", "%i").strip()
    cluster.run("scontrol", "write", "batch_script", job, f"{tmp_path}/script")
    assert (tmp_path / "script").read_text() == launcher.script(1)
    assert desk.token not in cluster.run("scontrol", "show", "job", job) + launcher.script(1)
    for process in psutil.process_iter():
        try:
            assert desk.token not in " ".join(process.cmdline())
        except psutil.Error:
            pass
    assert not [path for path in launcher.directory.iterdir() if desk.token in path.read_text()]


@needs_slurm
def test_variables_of_the_notebooks_own_job_are_not_passed_on(
    launch: Any, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "7")
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("MINE", "too")
    launch().launch([desk.config(2)])
    agent = desk.greet()
    assert agent.host == 2
    assert agent.hello["env"]["SLURM_NTASKS"] == "1"
    assert agent.hello["env"]["MINE"] == "too"
    assert "SLURM_GET_USER_ENV" not in agent.hello["env"]  # Slurm has not run a login shell on the node


@needs_slurm
def test_an_allow_list_keeps_the_other_variables_here(launch: Any, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MINE", "OTHER", "MY_TOKEN"):
        monkeypatch.setenv(name, "too")
    launch(export=["MINE", "OTH*"]).launch([desk.config(2)])
    found = desk.greet().hello["env"]
    assert (found["MINE"], found["OTHER"], found["PATH"]) == ("too", "too", os.environ["PATH"])
    assert "MY_TOKEN" not in found


@needs_slurm
def test_progress_while_nodes_are_in_use(launch: Any, desk: Desk) -> None:
    busy = launch()
    (first,) = busy.launch([desk.config(1)])
    desk.greet()
    launcher = launch()
    launcher.launch(desk.configs(3, first=2))
    wait_until(lambda: "Resources" in launcher.progress(), "Slurm's reason")
    assert launcher.progress().startswith("Slurm: Resources (the nodes are in use)")
    first.close(0.0)
    assert {desk.greet().host for _ in range(3)} == {2, 3, 4}
    wait_until(lambda: not launcher.progress(), "the launcher to notice it")


@needs_slurm
def test_options_reach_slurm(launch: Any, desk: Desk, cluster: SlurmCluster) -> None:
    launcher = launch(
        partition="short",
        account="lab",
        time="5",
        nodelist="n2",
        exclude="n1",
        cpus=1,
        gpus=1,
        sbatch=["--comment=two words", "nice=5"],
    )
    launcher.launch([desk.config()])
    agent = desk.greet()
    assert agent.hello["env"]["SLURMD_NODENAME"] == "n2"
    assert agent.hello["env"]["CUDA_VISIBLE_DEVICES"] == "0"
    job = cluster.run("scontrol", "show", "job", cluster.run("squeue", "-h", "-o", "%i").strip())
    for text in ("Partition=short", "Account=lab", "TimeLimit=00:05:00", "Nice=5", "Comment=two words", "NumCPUs=1"):
        assert text in job


# -- failures


@needs_slurm
def test_poll_says_how_agents_ended(launch: Any, desk: Desk) -> None:
    """One agent ends, another is killed; the third continues."""
    handles = launch().launch(desk.configs(3))
    agents = {agent.host: agent for agent in (desk.greet(), desk.greet(), desk.greet())}
    agents[1].tell("end 7")
    text = end_of(handles[0])
    assert text.startswith(f"the host agent on {handles[0].node} (Slurm job ")
    assert text.endswith("ended with exit code 7: ends with 7")
    os.kill(agents[3].pid, signal.SIGKILL)
    assert end_of(handles[2]).endswith("was killed by SIGKILL")
    assert agents[2].tell("run echo here") == "here"
    assert handles[1].poll() is None


@needs_slurm
@pytest.mark.parametrize("place", [0, 1])  # the first node runs the script
def test_a_failed_node_is_replaced(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, place: int
) -> None:
    """Its host is lost, the job continues, and another host replaces it."""
    cluster = SlurmCluster(tmp_path, NODES)
    request.addfinalizer(cluster.close)
    monkeypatch.setenv("SLURM_CONF", str(cluster.config))
    launcher = SlurmLauncher(python=make_python(tmp_path), directory=tmp_path / "logs", ask_s=0.5)
    request.addfinalizer(lambda: launcher.close(0.0))
    handles = launcher.launch(desk.configs(2))
    agents = {agent.host: agent for agent in (desk.greet(), desk.greet())}
    wait_until(lambda: handles[place].node and not launcher.progress(), "both to be up")
    lost, other = handles[place].node, 1 - place
    cluster.kill_node(lost)
    wait_until(lambda: has_ended(agents[place + 1].pid), "its end")
    text = end_of(handles[place])
    assert f"Slurm removed node {lost} from job" in text
    assert "power failure" in text
    answer = agents[other + 1].tell("run echo here")
    assert answer == "here", (handles[other].poll(), handles[other].log_tail())
    assert handles[other].poll() is None
    handles[place].close(0.0)
    (again,) = launcher.launch([desk.config(7)])
    assert desk.greet().host == 7
    assert again.node != lost
    assert agents[other + 1].tell("run echo here") == "here"
    launcher.close(0.0)
    assert has_ended(agents[other + 1].pid)


@needs_slurm
def test_a_cancelled_job_ends_its_hosts(launch: Any, desk: Desk, cluster: SlurmCluster) -> None:
    handles = launch().launch(desk.configs(2))
    desk.greet(), desk.greet()
    job = cluster.run("squeue", "-h", "-o", "%i").strip()
    cluster.run("scancel", job)
    assert [end_of(handle) for handle in handles] == [f"Slurm job {job} was cancelled"] * 2


# -- closing


@needs_slurm
def test_close_lets_agents_end(launch: Any, desk: Desk) -> None:
    launcher = launch()
    handles = launcher.launch([desk.config(1, grace_s=0.5), desk.config(2, grace_s=0.5)])
    desk.greet(), desk.greet()
    desk.close()
    launcher.close(20.0)
    for handle in handles:
        assert "ended with exit code 3" in str(handle.poll())


@needs_slurm
@pytest.mark.parametrize("place", [0, 1], ids=["first node", "other node"])
def test_close_one_of_several(launch: Any, desk: Desk, cluster: SlurmCluster, place: int) -> None:
    handles = launch().launch(desk.configs(3))
    agents = {agent.host: agent for agent in (desk.greet(), desk.greet(), desk.greet())}
    wait_until(lambda: all(handle.node for handle in handles), "the nodes")
    agents[place + 1].tell("stay")
    handles[place].close(0.0)
    wait_until(lambda: has_ended(agents[place + 1].pid), "the end of one")
    assert end_of(handles[place])
    others = [host for host in (1, 2, 3) if host != place + 1]
    assert [agents[host].tell("run echo here") for host in others] == ["here", "here"]
    if place:  # the first node stays until the script has ended
        wait_until(lambda: cluster.run("squeue", "-h", "-o", "%D").strip() == "2", "Slurm to have the node back")
    for handle in handles:
        handle.close(0.0)
    assert cluster.run("squeue", "-h") == ""


@needs_slurm
def test_the_first_node_is_given_back_before_its_task_reports(
    launch: Any, desk: Desk, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_slow = True  # the file system that the nodes share
    monkeypatch.setattr(f"{LAUNCHER}.words_of", lambda path: [] if is_slow else words_of(path))
    handles = launch().launch(desk.configs(2))
    agents = {agent.host: agent for agent in (desk.greet(), desk.greet())}
    wait_until(lambda: all(handle.node for handle in handles), "the nodes")
    agents[1].tell("stay")
    handles[0].close(0.0)
    assert not has_ended(agents[1].pid)
    is_slow = False
    wait_until(lambda: has_ended(agents[1].pid), "the end of the first")
    assert "was killed by SIGKILL" in end_of(handles[0])
    assert agents[2].tell("run echo here") == "here"


@needs_slurm
def test_failed_commands_of_slurm_are_retried(launch: Any, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def busy(*command: str, **options: Any) -> Any:
        if command[0] in ("srun", "scontrol") and command[1] != "show" and is_busy:
            refused.append(command[0])
            return subprocess.CompletedProcess(command, 1, "", "Slurm is busy")
        return call(*command, **options)

    is_busy = True
    monkeypatch.setattr(f"{LAUNCHER}.call", busy)
    handles = launch().launch(desk.configs(3))
    agents = {agent.host: agent for agent in (desk.greet(), desk.greet(), desk.greet())}
    wait_until(lambda: all(handle.pid for handle in handles), "the nodes")
    for host in (1, 2):
        agents[host].tell("stay")
        handles[host - 1].close(0.0)
    assert {"srun", "scontrol"} == set(refused)
    assert not any(has_ended(agents[host].pid) for host in (1, 2))
    is_busy = False
    wait_until(lambda: has_ended(agents[1].pid) and has_ended(agents[2].pid), "the end of both")
    assert agents[3].tell("run echo here") == "here"


@needs_slurm
def test_hosts_can_be_closed_one_by_one(launch: Any, desk: Desk) -> None:
    """Slurm without accounting shrinks a job only once."""
    handles = launch().launch(desk.configs(3))
    agents = {agent.host: agent for agent in (desk.greet(), desk.greet(), desk.greet())}
    wait_until(lambda: all(handle.pid for handle in handles), "the nodes")
    for host in (2, 3):
        agents[host].tell("stay")
        handles[host - 1].close(0.0)
        wait_until(lambda host=host: has_ended(agents[host].pid), "its end")
        assert end_of(handles[host - 1])
    assert agents[1].tell("run echo here") == "here"


@needs_slurm
def test_a_failed_cancel_is_retried(
    launch: Any, desk: Desk, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    def busy(*command: str, **options: Any) -> Any:
        if command[0] in ("scancel", "squeue") and is_busy and len(refused) < 6:
            refused.append(command[0])
            return subprocess.CompletedProcess(command, 1, "", "Unable to contact slurm controller")
        return call(*command, **options)

    is_busy = False
    monkeypatch.setattr(f"{LAUNCHER}.call", busy)
    handles = launch().launch(desk.configs(2))
    desk.greet(), desk.greet()
    is_busy = True
    for handle in handles:
        handle.close(0.0)
    assert "scancel" in refused
    assert cluster.run("squeue", "-h") == ""


@needs_slurm
def test_a_job_submitted_after_close_is_cancelled(
    launch: Any, desk: Desk, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{LAUNCHER}.COMMAND_S", 0.1)

    submits, is_closed = threading.Event(), threading.Event()

    def slow(*command: str, **options: Any) -> Any:
        if command[0] == "sbatch":
            submits.set()
            assert is_closed.wait(puppet.LONG_S)
        return call(*command, **options)

    monkeypatch.setattr(f"{LAUNCHER}.call", slow)
    slurm = launch()
    (handle,) = slurm.launch([desk.config()])
    assert submits.wait(puppet.LONG_S)
    handle.close(0.0)
    is_closed.set()
    assert "was given back" in end_of(handle)
    wait_until(lambda: cluster.run("squeue", "-h") == "", "the job to be cancelled")


@needs_slurm
def test_close_kills_agents_that_do_not_end(launch: Any, desk: Desk) -> None:
    launcher = launch()
    launcher.launch(desk.configs(2))
    agents = [desk.greet(), desk.greet()]
    for agent in agents:
        agent.tell("stay")
    launcher.close(0.0)
    wait_until(lambda: all(has_ended(agent.pid) for agent in agents), "Slurm to kill them")


@needs_slurm
def test_close_while_hosts_come_up(launch: Any, desk: Desk, cluster: SlurmCluster) -> None:
    moments = {
        "at once": lambda: True,
        "the job is known": lambda: cluster.run("squeue", "-h"),
        "a host is up": lambda: desk.greet(),
    }
    for what, moment in moments.items():
        launcher = launch()
        handles = launcher.launch(desk.configs(3))
        wait_until(moment, what)
        launcher.close(0.0)
        assert all(handle.poll() for handle in handles)
        assert cluster.run("squeue", "-h") == ""


@needs_slurm
def test_close_while_the_job_is_pending(launch: Any, desk: Desk, cluster: SlurmCluster) -> None:
    launcher = launch(sbatch=["--begin=now+1hour"])
    handles = launcher.launch(desk.configs(2))
    wait_until(lambda: "BeginTime" in launcher.progress(), "Slurm's reason")
    assert "its begin time is in the future" in launcher.progress()
    handles[0].close(0.0)
    assert "BeginTime" in launcher.progress()
    handles[1].close(0.0)
    assert cluster.run("squeue", "-h") == ""
    assert launcher.progress() == ""


# -- impossible requests


@needs_slurm
@pytest.mark.parametrize(
    ("options", "n", "text"),
    [
        ({"partition": "nope"}, 1, "invalid partition specified: nope; .*; the partitions are main, short"),
        ({"gpus": 9}, 1, "node configuration is not available; the nodes are: 3 with 2 cores, .* GPUs: gpu:1"),
        (
            {"mem": "900T"},
            1,
            "Slurm refused the job: Memory specification can not be satisfied; .*the nodes are: 3 with",
        ),
        ({"constraint": "a100"}, 1, "Invalid feature specification; the features of the nodes are"),
        ({"sbatch": ["--bogus"]}, 1, "Slurm refused the job: unrecognized option '--bogus'"),
        ({"time": "soon"}, 1, "Invalid --time specification"),
        ({}, 5, "asked for 5 hosts; partition main of the Slurm cluster has 3 nodes"),
        ({"partition": "short", "time": "60"}, 1, r"longer than the partition allows \(10:00\): request less"),
        ({"python": "/no/such/python"}, 1, "could not be started: .*/no/such/python.*; does /no/such/python exist"),
    ],
    ids=lambda value: "" if isinstance(value, str | int) else " ".join(map(str, value)),
)
def test_impossible_requests_end_the_hosts(launch: Any, desk: Desk, options: dict[str, Any], n: int, text: str) -> None:
    handles = launch(**options).launch(desk.configs(n))
    for handle in handles:
        said = end_of(handle)
        assert re.search(text, said), said


@needs_slurm
def test_a_directory_that_nodes_do_not_share_is_reported(launch: Any, desk: Desk, cluster: SlurmCluster) -> None:
    """The directory is removed before the job starts, as if it were on another machine."""
    launcher = launch(sbatch=["--hold"])
    (handle,) = launcher.launch([desk.config()])
    wait_until(lambda: "JobHeldUser" in launcher.progress(), "the job")
    shutil.rmtree(launcher.directory.parent)
    cluster.run("scontrol", "release", handle.job.id)
    assert "do the nodes share" in end_of(handle)


def test_without_slurm_launch_raises(monkeypatch: pytest.MonkeyPatch, desk: Desk) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    launcher = SlurmLauncher()
    with pytest.raises(
        LaunchError, match=f"there is no sbatch on {os.uname().nodename}: run the notebook on a machine"
    ):
        launcher.launch([desk.config()])
    launcher.close(0.0)


@needs_slurm
def test_an_unreachable_controller_ends_the_host(
    launch: Any, desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher submits a job to a cluster whose controller is down."""
    conf = tmp_path / "slurm.conf"
    text = Path(os.environ["SLURM_CONF"]).read_text()
    conf.write_text(
        text.replace("SlurmctldPort=", "SlurmctldPort=1 #").replace("ReturnToService", "MessageTimeout=2\n#")
    )
    launcher = launch()
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", str(conf))
        (handle,) = launcher.launch([desk.config()])
        assert "is slurmctld up? (scontrol ping)" in end_of(handle)


# -- the script


@pytest.mark.parametrize("name", ["whole", "options"])
def test_the_script_matches_the_golden_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of --dry-run. After a change, update the files with GOLDEN=write, and review them."""
    monkeypatch.setenv("HOME", "/home/me")
    options: dict[str, dict[str, Any]] = {
        "whole": {},
        "options": {
            "partition": "gpu",
            "account": "lab",
            "qos": "high",
            "time": "4:00:00",
            "nodelist": "gpu[01-02]",
            "exclude": "gpu03",
            "constraint": "h100&nvlink",
            "cpus": 64,
            "gpus": 8,
            "mem": "800G",
            "sbatch": ["--reservation=spring", "--comment=one two"],
            "directory": "/scratch/my own",
        },
    }
    launcher = SlurmLauncher(python="/opt/venv/bin/python", **options[name])
    text = launcher.script(4).replace(launcher.directory.name, "slurm-0123abcd")
    assert launcher.plan(4) == launcher.script(4)
    launcher.close(0.0)
    path = GOLDEN / f"slurm_{name}.sh"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("", "job 7 is submitted"),
        ("CONFIGURING", "job 7 waits for its nodes to boot"),
        ("SIGNALING", "job 7 is SIGNALING"),
        ("SUSPENDED", "job 7 is suspended"),
    ],
)
def test_progress_of_jobs_in_other_states(tmp_path: Path, state: str, text: str) -> None:
    launcher = SlurmLauncher(directory=tmp_path)
    launcher._jobs.append(SlurmJob(1, {}, tmp_path, launcher.close_host, id="7", state=state))
    assert launcher.progress() == f"Slurm: {text}"


def test_options_of_several_lines_are_refused() -> None:
    with pytest.raises(ValueError, match="one line"):
        SlurmLauncher(sbatch=["--comment=a\nrm -rf"])
