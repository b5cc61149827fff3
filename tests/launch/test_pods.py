"""The status of pods as text."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_kernel.launch.kubernetes.pods import PodSpec, ended, is_up, merged, refusal, waits_for


def pod(phase: str = "Pending", conditions: Any = (), state: Any = None, **status: Any) -> dict[str, Any]:
    containers = [{"name": "sidecar", "state": {"running": {}}}]
    containers += [{"name": "agent", "state": state}] if state is not None else []
    pod_status = {"phase": phase, "conditions": [*conditions], "containerStatuses": containers, **status}
    return {"metadata": {"name": "p"}, "status": pod_status}


def condition(kind: str, value: str, reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": value, "reason": reason, "message": message}


SCHEDULED = condition("PodScheduled", "True")

WAITS = {
    "nothing said": (pod(), [], "not scheduled yet"),
    "gates": (
        pod(conditions=[condition("PodScheduled", "False", "SchedulingGated", "Scheduling is blocked")]),
        [],
        "SchedulingGated: Scheduling is blocked",
    ),
    "scheduled": (pod(conditions=[SCHEDULED]), [], "creating the container"),
    "pulls": (pod(conditions=[SCHEDULED]), [{"type": "Normal", "reason": "Pulling"}], "pulling the image"),
    "a volume": (
        pod(conditions=[SCHEDULED], state={"waiting": {"reason": "ContainerCreating"}}),
        [{"type": "Warning", "reason": "FailedMount", "message": "claim  data\n not found"}],
        "FailedMount: claim data not found",
    ),
    "an image": (
        pod(state={"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}}),
        [],
        "ImagePullBackOff: Back-off",
    ),
    "up": (pod("Running", state={"running": {}}), [], ""),
}


@pytest.mark.parametrize(("what", "events", "words"), WAITS.values(), ids=WAITS)
def test_text_for_a_waiting_pod(what: dict[str, Any], events: list[dict[str, Any]], words: str) -> None:
    assert waits_for(what, events) == words
    assert ended(what) is None
    assert is_up(what) is (words == "")


def stopped(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


PREEMPTED = condition("DisruptionTarget", "True", "PreemptionByScheduler", "a pod of higher priority")
ENDS = {
    "exit code": (pod("Failed", state=stopped(3)), "the host agent ended with exit code 3"),
    "no error": (pod("Succeeded", state=stopped(0, "Completed")), "the host agent ended with exit code 0"),
    "signal": (pod("Failed", state=stopped(137)), "the host agent was killed by SIGKILL"),
    "memory": (pod("Failed", state=stopped(137, "OOMKilled")), "OOMKilled: it used more memory than its limit of 4Gi"),
    "preempted": (pod("Failed", [PREEMPTED], stopped(143)), "PreemptionByScheduler: a pod of higher priority"),
    "evicted": (pod("Failed", state=stopped(137), reason="Evicted", message="disk"), "Evicted: disk"),
    "never admitted": (
        pod("Failed", reason="UnexpectedAdmissionError", message="no healthy devices"),
        "UnexpectedAdmissionError: no healthy devices",
    ),
    "node shut down": (pod("Failed", state=stopped(143), reason="Terminated"), "Terminated"),
    "nothing said": (pod("Failed"), "ended (Failed)"),
    "bad name": (
        pod(state={"waiting": {"reason": "InvalidImageName", "message": "couldn't parse"}}),
        "InvalidImageName: couldn't parse",
    ),
}


@pytest.mark.parametrize(("what", "words"), ENDS.values(), ids=ENDS)
def test_text_for_an_ended_pod(what: dict[str, Any], words: str) -> None:
    assert ended(what, "4Gi") == words


def test_a_pod_deleted_before_it_runs_has_ended() -> None:
    what = pod(conditions=[SCHEDULED])
    what["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert ended(what) == "was deleted before it had started"
    running = pod("Running", state={"running": {}})
    running["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert ended(running) is None  # it is terminating


def test_text_for_a_refused_request() -> None:
    assert refusal(500, "upstream error", "create pods", "lab") == (
        "the API server answered 500 to the request to create pods: upstream error"
    )
    security = '{"message": "pods \\"p\\" is forbidden: violates PodSecurity \\"restricted:latest\\""}'
    assert refusal(403, security, "create pods", "lab") == (
        "the cluster does not allow you to create pods in namespace 'lab': "
        'pods "p" is forbidden: violates PodSecurity "restricted:latest"'
    )


def test_partial_pods_are_merged() -> None:
    base = {"spec": {"volumes": [1], "containers": [{"env": [1], "image": "a"}], "x": {"y": 1}}}
    more = {"spec": {"volumes": [2], "containers": [{"env": [2], "image": "b"}, {"name": "c"}], "x": {"z": 2}, "y": 3}}
    assert merged(base, more) == {
        "spec": {
            "volumes": [1, 2],
            "containers": [{"env": [1, 2], "image": "b"}, {"name": "c"}],
            "x": {"y": 1, "z": 2},
            "y": 3,
        }
    }


def test_omitted_options_are_left_to_the_cluster() -> None:
    (container,) = PodSpec("i", "s").pod(1, None)["spec"]["containers"]
    assert container["resources"] == {"limits": {}, "requests": {}}
    assert "nodeSelector" not in PodSpec("i", "s").pod(1, None)["spec"]
    assert PodSpec("i", "s", service_account="me").pod(1, None)["spec"]["serviceAccountName"] == "me"
