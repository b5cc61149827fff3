"""Builds the objects of a pod, and describes a pod's status as text. Pure functions; all objects are plain JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.launch.base import agent_command
from monarch_kernel.launch.text import how_ended
from monarch_kernel.net.wire.config import AGENT_VARIABLE

__all__ = [
    "TITLE",
    "Json",
    "PodSpec",
    "ended",
    "image_trouble",
    "is_up",
    "merged",
    "refusal",
    "waits_for",
    "without_preemption",
]

Json = Mapping[str, Any]

TITLE = "Kubernetes"

_SECRET_KEY = "config"
_TERMINATION_S = 30  # for loops that save when the pod is preempted or its node drained (`live.loop(on_preempt=)`)
_NEVER_COME = ("InvalidImageName", "ErrImageNeverPull")
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError")
_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" .*?(?:in the namespace "(?P<where>[^"]*)")?$'
)


@dataclass(frozen=True)
class PodSpec:
    """The common specification of all pods of a launcher.

    Attributes:
        image: image of the container; has monarch_kernel, torch and Python in it.
        session: unique id of the launcher; part of all names, and a label.
        gpus: GPUs of each pod; 0 for none.
        gpu_resource: the cluster's resource name of a GPU.
        cpus: CPU cores that each pod requests; 0 leaves it to the cluster.
        mem: memory of each pod, as request and limit, such as ``64Gi``; empty leaves it to the cluster.
        service_account: service account of the pods; empty for the namespace's default, without its token.
        node_selector: labels that a node must have.
        python: interpreter in the image.
        more: a partial pod to merge in, see `merged`.
    """

    image: str
    session: str
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    cpus: float = 0.0
    mem: str = ""
    service_account: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    python: str = "python3"
    more: Json = field(default_factory=dict)

    def name(self, host: int) -> str:
        """Return the name of the pod and its secret."""
        return f"monarch-{self.session}-{host}"

    @property
    def selector(self) -> str:
        """Label selector of all objects of the launcher."""
        return f"monarch-kernel/session={self.session}"

    def secret(self, host: int, config: bytes, owner: Json | None) -> Json:
        """Return the secret with the config of a host's agent."""
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self._metadata(host, owner),
            "immutable": True,
            "stringData": {_SECRET_KEY: config.decode()},
        }

    def pod(self, host: int, owner: Json | None) -> Json:
        """Return the pod of a host."""
        limits: dict[str, str] = {}
        requests: dict[str, str] = {}
        if self.gpus:
            limits[self.gpu_resource] = str(self.gpus)
        if self.cpus:
            requests["cpu"] = f"{round(1000 * self.cpus)}m"  # no limit: it would only throttle the agent
        if self.mem:
            limits["memory"] = requests["memory"] = self.mem
        # Collectives and data loaders share memory in files there, and a container has 64 MiB by default.
        shared = {"name": "shm", "emptyDir": {"medium": "Memory"}}
        container = {
            "name": "agent",
            "image": self.image,
            "command": list(agent_command(self.python)),
            "env": [
                {
                    "name": AGENT_VARIABLE,
                    "valueFrom": {"secretKeyRef": {"name": self.name(host), "key": _SECRET_KEY}},
                },
                {"name": "PYTHONUNBUFFERED", "value": "1"},
            ],
            "resources": {"limits": limits, "requests": requests},
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        }
        spec: dict[str, Any] = {
            "restartPolicy": "Never",  # the controller decides whether to replace a host
            "terminationGracePeriodSeconds": _TERMINATION_S,
            "enableServiceLinks": False,  # omits environment variables for each service of the namespace
            "containers": [container],
            "volumes": [shared],
        }
        if self.service_account:
            spec["serviceAccountName"] = self.service_account
        else:
            spec["automountServiceAccountToken"] = False  # the agent and ranks don't use the API server
        if self.node_selector:
            spec["nodeSelector"] = dict(self.node_selector)
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": self._metadata(host, owner), "spec": spec}
        return merged(pod, self.more)

    def _metadata(self, host: int, owner: Json | None) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "name": self.name(host),
            "labels": {
                "app.kubernetes.io/name": "monarch-host",
                "app.kubernetes.io/managed-by": "monarch-kernel",
                "monarch-kernel/session": self.session,
                "monarch-kernel/host": str(host),
            },
        }
        if owner is not None:
            metadata["ownerReferences"] = [
                {"apiVersion": "v1", "kind": "Pod", "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
            ]
        return metadata


def merged(base: Json, more: Json) -> dict[str, Any]:
    """Merge a partial pod into another: merge mappings by key, append lists, and replace all other values.

    The first of ``containers`` is merged into the container of the agent.
    """
    result = dict(base)
    for key, value in more.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = merged(old, value)
        elif key == "containers" and isinstance(old, list) and isinstance(value, list) and old and value:
            result[key] = [merged(old[0], value[0]), *old[1:], *value[1:]]
        elif isinstance(old, list) and isinstance(value, list):
            result[key] = [*old, *value]
        else:
            result[key] = value
    return result


def is_up(pod: Json) -> bool:
    """Return whether the agent's container has started."""
    state = _state(pod)
    return "running" in state or "terminated" in state


def ended(pod: Json, limit: str = "") -> str | None:
    """Say how a pod ended, or why it can't run; None while it runs or may still come up.

    Args:
        pod: the pod, from the API server.
        limit: its memory limit, for the text.
    """
    status = pod.get("status") or {}
    phase, reason, message = status.get("phase"), status.get("reason", ""), _flat(status.get("message", ""))
    stopped = _state(pod).get("terminated")
    disruption = _condition(pod, "DisruptionTarget", "True")
    if phase in ("Failed", "Succeeded") or stopped is not None:
        if reason:  # Evicted, UnexpectedAdmissionError, NodeLost, OutOfcpu, Shutdown ...
            return _join(reason, message)
        if stopped is not None and stopped.get("reason") == "OOMKilled":
            more = f" than its limit of {limit}" if limit else " than the node had"
            return f"OOMKilled: it used more memory{more}"
        if disruption is not None:
            return _join(disruption.get("reason", "DisruptionTarget"), _flat(disruption.get("message", "")))
        if stopped is None:
            return f"ended ({phase})"
        code = stopped.get("exitCode", 0)
        why = stopped.get("reason", "")
        said = _flat(stopped.get("message", ""))
        if why not in (
            "",
            "Error",
            "Completed",
        ):  # StartError, ContainerCannotRun: the image does not have the command
            return _join(why, said)
        if code > 128:
            return f"the host agent {how_ended(128 - code)}"
        return _join(f"the host agent ended with exit code {code}", said)
    waiting = _state(pod).get("waiting") or {}
    if waiting.get("reason") in _NEVER_COME:
        return _join(waiting["reason"], _flat(waiting.get("message", "")))
    if (pod.get("metadata") or {}).get("deletionTimestamp") and not is_up(pod):
        return "was deleted before it had started"
    return None


def image_trouble(pod: Json) -> str:
    """Say why pulling the image fails at the moment; empty if no failure is known."""
    waiting = _state(pod).get("waiting") or {}
    return _join(waiting["reason"], _flat(waiting.get("message", ""))) if waiting.get("reason") in _IMAGE else ""


def waits_for(pod: Json, events: Sequence[Json]) -> str:
    """Say what a pod that is not up yet waits for, in a few words; empty if it is up.

    Args:
        pod: the pod, from the API server.
        events: its events, the oldest first.
    """
    if is_up(pod):
        return ""
    if (trouble := image_trouble(pod)) != "":
        return trouble
    last = events[-1] if events else {}
    said = last.get("reason", "")
    unscheduled = _condition(pod, "PodScheduled", "False")
    if unscheduled is not None:
        text = _join(
            unscheduled.get("reason", "Unschedulable"), without_preemption(unscheduled.get("message")).rstrip(".")
        )
        if said == "TriggeredScaleUp":
            return f"{text}; the cluster is adding a node"
        return text
    if said == "Pulling":
        return "pulling the image"
    if last.get("type") == "Warning":
        return _join(said, _flat(last.get("message", "")))
    if _condition(pod, "PodScheduled", "True") is not None:
        return "creating the container"
    return "not scheduled yet"


def refusal(status: int, body: str, doing: str, namespace: str) -> str:
    """Say why the API server refused a request, and what to do.

    Args:
        status: HTTP status.
        body: the body of the response; JSON if it comes from the API server itself.
        doing: the request, such as ``create pods``.
        namespace: the namespace of the request.
    """
    try:
        answer = json.loads(body)
        message = _flat(str(answer.get("message", ""))) if isinstance(answer, dict) else ""
    except ValueError:
        message = ""
    message = message or _flat(body)[:300]
    if status == 401:
        return "the API server rejected the credentials (401): they are wrong or have expired"
    if status == 403 and "exceeded quota" in message:
        return f"the quota of namespace {namespace!r} is used up: {message.partition('exceeded quota: ')[2]}"
    if status == 403 and (found := _FORBIDDEN.search(message)):
        return (
            f"{found['user']} may not {found['verb']} {found['resource']} in namespace {namespace!r}; "
            "docs/guides/kubernetes.md has the role that you need"
        )
    if status == 403:
        return f"the cluster does not allow you to {doing} in namespace {namespace!r}: {message}"
    if status == 404 and "namespaces" in message:
        return f"there is no namespace {namespace!r} in this cluster"
    return f"the API server answered {status} to the request to {doing}: {message}"


def _state(pod: Json) -> Json:
    """Return the state of the agent's container: ``waiting``, ``running`` or ``terminated``."""
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        if container.get("name") == "agent":
            return container.get("state") or {}
    return {}


def _condition(pod: Json, kind: str, value: str) -> Json | None:
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == kind and condition.get("status") == value:
            found: Json = condition
            return found
    return None


def without_preemption(message: str | None) -> str:
    """Cut the note about preemption, which is irrelevant here, from a message of the scheduler."""
    return _flat(message).partition(" preemption: ")[0]


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())


def _join(head: str, tail: str) -> str:
    return f"{head}: {tail}" if tail else head
