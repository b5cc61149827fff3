"""The Kubernetes launcher: the real client over HTTP, against a fake cluster that runs containers as processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.kubernetes import KubernetesLauncher
from monarch_kernel.net.wire.config import AGENT_VARIABLE
from tests.launch.cluster import USER, Cluster, Image, Node, RefusedRequest
from tests.launch.standin import COMMAND, Home
from tests.support.timing import Bar
from tests.support.waiting import wait_until

Launch = Callable[..., KubernetesLauncher]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    cluster.images["monarch:1"] = Image({"python3": COMMAND})
    yield cluster
    cluster.close()


@pytest.fixture
def home() -> Iterator[Home]:
    home = Home()
    yield home
    home.close()


@pytest.fixture
def make(cluster: Cluster) -> Iterator[Launch]:
    """A function that creates launchers; they are closed after the test."""
    made: list[KubernetesLauncher] = []

    def launcher(**options: Any) -> KubernetesLauncher:
        options.setdefault("kubeconfig", cluster.kubeconfig())
        made.append(KubernetesLauncher(**{"image": "monarch:1", **options}))
        return made[-1]

    yield launcher
    for one in made:
        one.close(0.0)


def test_hosts_come_up_and_are_removed(cluster: Cluster, home: Home, make: Launch) -> None:
    launcher = make(gpus=2, cpus=1.5, mem="4Gi", node_selector=[("pool", "a")])
    cluster.nodes = {"node-0": Node(), "node-1": Node(labels={"pool": "a"})}
    hosts = launcher.launch(home.configs([1, 2]))
    home.wait_for([1, 2])
    assert [host.poll() for host in hosts] == [None, None]
    assert [host.address for host in hosts] == ["", ""]
    wait_until(lambda: launcher.progress() == "", "nothing to wait for")
    assert cluster.names("pods") == cluster.names("secrets") == [hosts[0].name, hosts[1].name]

    pod = cluster.find("pods", hosts[0].name)
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["nodeName"] == "node-1"
    assert pod["spec"]["automountServiceAccountToken"] is False
    container = pod["spec"]["containers"][0]
    assert container["resources"] == {
        "limits": {"nvidia.com/gpu": "2", "memory": "4Gi"},
        "requests": {"cpu": "1500m", "memory": "4Gi"},
    }
    assert "ownerReferences" not in pod["metadata"]

    wait_until(lambda: "host 1 is connected" in hosts[0].log_tail(), "a log")
    launcher.close(0.0)
    assert cluster.names("pods") == cluster.names("secrets") == []
    with pytest.raises(LaunchError, match="is closed"):
        launcher.launch(home.configs([3]))


def test_only_the_secret_has_the_keys(cluster: Cluster, home: Home, make: Launch) -> None:
    (host,) = make().launch(home.configs([1]))
    home.wait_for([1])
    pod = cluster.find("pods", host.name)
    assert home.token not in str(pod)
    assert home.token in str(cluster.find("secrets", host.name))
    (variable,) = (v for v in pod["spec"]["containers"][0]["env"] if v["name"] == AGENT_VARIABLE)
    assert variable["valueFrom"]["secretKeyRef"]["name"] == host.name
    assert home.token.encode() not in Path(f"/proc/{cluster.pid(host.name)}/cmdline").read_bytes()


def test_a_host_is_given_back_and_replaced(cluster: Cluster, home: Home, make: Launch) -> None:
    launcher = make()
    hosts = launcher.launch(home.configs([1, 2]))
    home.wait_for([1, 2])
    hosts[0].close(0.0)
    hosts[0].close(0.0)
    wait_until(lambda: cluster.names("pods") == [hosts[1].name], "the pod to go")
    assert cluster.names("secrets") == [hosts[1].name]
    (third,) = launcher.launch(home.configs([3]))
    home.wait_for([3])
    assert cluster.names("pods") == [hosts[1].name, third.name]
    assert [hosts[1].poll(), third.poll()] == [None, None]


def test_close_waits_for_an_agent_that_ends_by_itself(cluster: Cluster, home: Home, make: Launch) -> None:
    launcher = make()
    (host,) = launcher.launch(home.configs([1]))
    home.wait_for([1])
    wait_until(lambda: launcher.progress() == "", "the pod to be known as running")
    home.end(1, 0)
    launcher.close(10.0)
    log = (cluster.directory / f"{host.name}.log").read_text().splitlines()
    assert log[-1] == "host 1 ends: 0"


def test_the_pod_of_the_notebook_owns_the_pods(cluster: Cluster, home: Home, make: Launch) -> None:
    (host,) = make(owner="notebook-0").launch(home.configs([1]))
    home.wait_for([1])
    for kind in ("pods", "secrets"):
        (owner,) = cluster.find(kind, host.name)["metadata"]["ownerReferences"]
        assert owner == {"apiVersion": "v1", "kind": "Pod", "name": "notebook-0", "uid": "uid-notebook-0"}
    (unowned,) = make(owner="notebook-7").launch(home.configs([2]))
    wait_until(unowned.poll, "the end")
    assert "can't get the pod 'notebook-7', which must own the hosts" in str(unowned.poll())


def test_fields_from_a_file_are_merged_into_the_pod(cluster: Cluster, home: Home, make: Launch, tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    file.write_text(
        "metadata: {annotations: {team: a}}\n"
        "spec:\n"
        "  tolerations: [{key: nvidia.com/gpu, operator: Exists}]\n"
        "  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]\n"
        "  containers: [{volumeMounts: [{name: data, mountPath: /data}], imagePullPolicy: Always}]\n"
    )
    (host,) = make(pod=str(file)).launch(home.configs([1]))
    home.wait_for([1])
    pod = cluster.find("pods", host.name)
    assert pod["metadata"]["annotations"] == {"team": "a"}
    assert pod["metadata"]["labels"]["monarch-kernel/host"] == "1"
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["shm", "data"]
    (container,) = pod["spec"]["containers"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/dev/shm", "/data"]
    assert container["imagePullPolicy"] == "Always"


def test_invalid_fields_of_a_pod_are_refused(home: Home, make: Launch) -> None:
    hosts = make(pod={"spec": {"tolerations": [{"key": "x", "operater": "Exists"}]}}).launch(home.configs([1, 2]))
    for host in hosts:
        wait_until(host.poll, "the end")
        assert str(host.poll()).startswith(
            "Kubernetes: the request is not valid (create pods): spec.tolerations.0.operater: "
        )


# -- pods that are not up yet


def test_progress_says_why_a_pod_is_unschedulable(cluster: Cluster, home: Home, make: Launch) -> None:
    launcher = make(gpus=8)
    hosts = launcher.launch(home.configs([1, 2]))
    home.wait_for([1])
    said = "Kubernetes: Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu"
    wait_until(lambda: launcher.progress() == said, "the reason")
    assert any("FailedScheduling" in line for line in hosts[1].log_tail())
    assert hosts[1].poll() is None
    cluster.tell_event(hosts[1].name, "TriggeredScaleUp", "pod triggered scale-up: [{gpus 1->2 (max: 3)}]")
    wait_until(lambda: launcher.progress() == f"{said}; the cluster is adding a node", "the autoscaler")
    cluster.nodes["node-1"] = Node()
    home.wait_for([2])
    wait_until(lambda: launcher.progress() == "", "nothing to wait for")


def test_progress_while_an_image_is_pulled(cluster: Cluster, home: Home, make: Launch) -> None:
    cluster.images["monarch:1"].is_there.clear()
    launcher = make()
    launcher.launch(home.configs([1, 2]))
    wait_until(lambda: launcher.progress() == "Kubernetes: pulling the image", "the text")
    cluster.images["monarch:1"].is_there.set()
    home.wait_for([1, 2])


def test_a_missing_image_ends_the_host(cluster: Cluster, home: Home, make: Launch) -> None:
    launcher = make(image="monarch:2", image_patience_s=0.5)
    (host,) = launcher.launch(home.configs([1]))
    wait_until(lambda: "ErrImagePull" in launcher.progress(), "the text")
    assert host.poll() is None
    wait_until(host.poll, "the end")
    assert str(host.poll()).startswith(f"the pod {host.name} did not come up: ErrImagePull: ")
    assert 'failed to resolve reference "monarch:2": not found' in str(host.poll())


def test_an_image_is_pulled_after_a_temporary_failure(cluster: Cluster, home: Home, make: Launch) -> None:
    image = cluster.images["monarch:2"] = Image({"python3": COMMAND}, problem="too many requests")
    image.is_there.clear()
    launcher = make(image="monarch:2")
    launcher.launch(home.configs([1]))
    wait_until(lambda: "ErrImagePull: rpc error: code = NotFound desc = too many" in launcher.progress(), "the text")
    image.problem = ""
    wait_until(lambda: launcher.progress() == "Kubernetes: pulling the image", "the text")
    image.is_there.set()
    home.wait_for([1])


def test_a_command_missing_in_the_image_ends_the_host(home: Home, make: Launch) -> None:
    (host,) = make(python="python9").launch(home.configs([1]))
    wait_until(host.poll, "the end")
    assert 'StartError: exec: "python9": executable file not found in $PATH' in str(host.poll())


def test_close_cancels_a_partial_allocation(cluster: Cluster, home: Home, make: Launch) -> None:
    launcher = make(gpus=8)
    launcher.launch(home.configs([1, 2, 3, 4]))
    home.wait_for([1])
    launcher.close(0.0)
    assert cluster.names("pods") == cluster.names("secrets") == []


# -- how pods end


@pytest.fixture
def running(home: Home, make: Launch) -> tuple[KubernetesLauncher, Any]:
    launcher = make(mem="4Gi")
    (host,) = launcher.launch(home.configs([1]))
    home.wait_for([1])
    wait_until(lambda: launcher.progress() == "" and host.runs, "the pod to be known as running")
    return launcher, host


def test_the_agent_ends_with_an_error(home: Home, running: Any) -> None:
    _, host = running
    home.end(1, 3)
    wait_until(host.poll, "the end")
    assert host.poll() == f"the pod {host.name}: the host agent ended with exit code 3"
    assert host.log_tail()[-1] == "host 1 ends: 3"  # the last line is there when poll() reports the end


def test_the_agent_is_killed(cluster: Cluster, running: Any) -> None:
    _, host = running
    os.kill(cluster.pid(host.name), signal.SIGKILL)
    wait_until(host.poll, "the end")
    assert host.poll() == f"the pod {host.name}: the host agent was killed by SIGKILL"


def test_a_pod_is_killed_for_memory(cluster: Cluster, running: Any) -> None:
    _, host = running
    cluster.kill_for_memory(host.name)
    wait_until(host.poll, "the end")
    assert host.poll() == f"the pod {host.name}: OOMKilled: it used more memory than its limit of 4Gi"


def test_a_pod_is_evicted(cluster: Cluster, running: Any) -> None:
    _, host = running
    cluster.evict(host.name)
    wait_until(host.poll, "the end")
    assert host.poll() == f"the pod {host.name}: Evicted: The node was low on resource: memory."


def test_a_pod_is_preempted(cluster: Cluster, running: Any) -> None:
    _, host = running
    cluster.preempt(host.name)
    wait_until(host.poll, "the end")
    assert "PreemptionByScheduler: default-scheduler: preempting to accommodate a higher priority pod" in host.poll()


def test_a_pod_is_deleted_by_another_client(cluster: Cluster, running: Any) -> None:
    _, host = running
    cluster.remove(host.name)
    wait_until(host.poll, "the end")
    assert host.poll().startswith(f"the pod {host.name}: ")


def test_a_lost_node_does_not_block_close(cluster: Cluster, running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, host = running
    cluster.lose_node(host.name)
    monkeypatch.setattr("monarch_kernel.launch.kubernetes.launcher._GONE_S", 0.3)
    launcher.close(0.0)  # nothing confirms that the pod ended: the launcher deletes it by force
    assert cluster.names("pods") == cluster.names("secrets") == []


# -- failures of the API server


def test_a_watch_that_breaks_misses_nothing(cluster: Cluster, home: Home, running: Any) -> None:
    launcher, host = running
    for forget in (False, True):
        watches = cluster.watches
        cluster.break_watches(forget=forget)
        wait_until(lambda watches=watches: cluster.watches > watches, "another watch")  # type: ignore[misc]
        assert host.poll() is None
    cluster.break_watches(forget=True)
    cluster.remove(host.name)  # perhaps while no watch is open: then the next list must show it
    wait_until(host.poll, "the end")
    launcher.launch(home.configs([2]))
    home.wait_for([2])


def test_requests_to_a_busy_api_server_are_retried(cluster: Cluster, home: Home, make: Launch) -> None:
    busy = RefusedRequest(429, "TooManyRequests", "please try again later")
    conflict = RefusedRequest(409, "Conflict", "the object has been modified; please apply your changes")
    down = RefusedRequest(503, "ServiceUnavailable", "etcdserver: leader changed")
    cluster.answers = {("create", "pods"): [busy, conflict], ("create", "secrets"): [down]}
    (host,) = make().launch(home.configs([1]))
    home.wait_for([1])
    assert host.poll() is None
    assert cluster.requests.count("create pods") == 3


def test_a_pod_created_by_a_failed_request_is_removed(cluster: Cluster, home: Home, make: Launch) -> None:
    launcher = make()
    name = launcher._spec.name(1)
    cluster.images["monarch:1"].is_there.clear()
    cluster.answers["create", "pods"] = [RefusedRequest(400, "BadRequest", "but it was created anyway")]
    cluster.create("pods", "lab", dict(launcher._spec.pod(1, None)))
    (host,) = launcher.launch(home.configs([1]))
    wait_until(host.poll, "the end")
    assert cluster.names("pods") == [name]
    launcher.close(0.0)
    assert cluster.names("pods") == cluster.names("secrets") == []


def test_objects_created_by_a_failed_request_are_used(cluster: Cluster, home: Home, make: Launch) -> None:
    launcher = make()
    name = launcher._spec.name(1)
    cluster.answers["create", "pods"] = [RefusedRequest(504, "Timeout", "request did not complete in time")]
    secret = launcher._spec.secret(1, home.configs([1])[0].encode(), None)
    cluster.create("secrets", "lab", dict(secret))  # the launcher gets AlreadyExists
    (host,) = launcher.launch(home.configs([1]))
    home.wait_for([1])
    assert host.name == name
    assert host.poll() is None


@pytest.mark.parametrize(
    ("tells_rights", "words"),
    [
        (True, "Kubernetes: you may not create pods, delete secrets in namespace 'lab'; docs/guides/kubernetes.md has"),
        (False, f"Kubernetes: {USER} may not create pods in namespace 'lab'; docs/guides/kubernetes.md has"),
    ],
)
def test_missing_permissions_are_named(
    cluster: Cluster, home: Home, make: Launch, tells_rights: bool, words: str
) -> None:
    cluster.denied = {("create", "pods"), ("delete", "secrets")}
    cluster.tells_rights = tells_rights
    (host,) = make().launch(home.configs([1]))
    wait_until(host.poll, "the end")
    assert str(host.poll()).startswith(words)


def test_permission_for_events_is_optional(cluster: Cluster, home: Home, make: Launch) -> None:
    cluster.denied = {("list", "events"), ("watch", "events")}
    launcher = make(gpus=16)
    launcher.launch(home.configs([1]))
    wait_until(lambda: "1 Insufficient nvidia.com/gpu" in launcher.progress(), "the text")


def test_an_exceeded_quota_is_reported_in_numbers(cluster: Cluster, home: Home, make: Launch) -> None:
    cluster.gpu_quota = 4
    hosts = make(gpus=4).launch(home.configs([1, 2]))
    home.wait_for([1])
    wait_until(hosts[1].poll, "the end")
    assert hosts[1].poll() == (
        "Kubernetes: the quota of namespace 'lab' is used up: gpus, requested: requests.nvidia.com/gpu=4, "
        "used: requests.nvidia.com/gpu=4, limited: requests.nvidia.com/gpu=4"
    )
    assert hosts[0].poll() is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"namespace": "elsewhere"}, "Kubernetes: there is no namespace 'elsewhere' in this cluster"),
        ({"token": "an old one"}, "Kubernetes: the API server rejected the credentials (401)"),
        ({"url": "http://127.0.0.1:9"}, "Kubernetes: the API server at http://127.0.0.1:9 can't be reached: "),
        ({"context": "prod"}, "Kubernetes: can't load the configuration of the cluster: "),
    ],
)
def test_failures_to_connect_end_all_hosts(
    cluster: Cluster, home: Home, make: Launch, bar: Bar, options: dict[str, str], words: str
) -> None:
    file = cluster.kubeconfig(**{key: value for key, value in options.items() if key in ("token", "url")})
    given = {key: value for key, value in options.items() if key in ("namespace", "context")}
    hosts = make(kubeconfig=file, **given).launch(home.configs([1, 2, 3, 4]))
    with bar.below(10.0, "one attempt for all hosts"):
        for host in hosts:
            wait_until(host.poll, "the end")
            assert str(host.poll()).startswith(words)


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no cluster is configured: there is no kubeconfig .*nowhere"):
        KubernetesLauncher(image="monarch:1", kubeconfig=str(tmp_path / "nowhere"))
    with pytest.raises(LaunchError, match="no image was given"):
        KubernetesLauncher()
    with pytest.raises(LaunchError, match="'64 gigs' is not an amount of memory; write it as 64Gi"):
        KubernetesLauncher(image="monarch:1", mem="64 gigs")


def test_the_plan_is_readable_yaml(make: Launch) -> None:
    plan = make(gpus=8, mem="64Gi").plan(4)
    assert plan.startswith("# 4 × this, in namespace (of the context)\n")
    assert "kind: Secret" in plan
    assert "nvidia.com/gpu: '8'" in plan
    assert "monarch_kernel.bootstrap" in plan
