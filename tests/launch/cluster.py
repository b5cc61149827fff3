"""A fake Kubernetes cluster: an API server over HTTP, a scheduler, and kubelets that run containers as processes.

It handles pods, secrets and events like a real cluster, as far as the launcher uses them. A container is a process of this
machine, and an image is a set of commands.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

USER = "system:serviceaccount:lab:notebook"
TOKEN = "the token"


@dataclass
class Image:
    """An image of a container.

    Attributes:
        commands: name -> command to run instead; the arguments are dropped.
        problem: why pulling it fails.
        is_there: set when it has been pulled.
    """

    commands: dict[str, Sequence[str]] = field(default_factory=dict)
    problem: str = ""
    is_there: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.is_there.set()


@dataclass
class Node:
    """A machine of the cluster."""

    gpus: int = 8
    labels: dict[str, str] = field(default_factory=dict)
    is_lost: bool = False


class RefusedRequest(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Cluster:
    """The cluster, with methods to inspect and to break its parts.

    Attributes:
        images: images by name.
        nodes: nodes by name.
        denied: verbs and resources that the user may not use, such as ``("create", "pods")``.
        tells_rights: whether the user may review access rights.
        answers: verb and resource -> responses to send instead, each once.
        gpu_quota: GPU quota of the namespace ``lab``.
        requests: all requests, such as ``create pods``.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.images: dict[str, Image] = {}
        self.nodes = {"node-0": Node()}
        self.denied: set[tuple[str, str]] = set()
        self.tells_rights = True
        self.answers: dict[tuple[str, str], list[RefusedRequest]] = {}
        self.gpu_quota: int | None = None
        self.requests: list[str] = []
        self.watches = 0
        self._objects: dict[tuple[str, str, str], dict[str, Any]] = {("pods", "lab", "notebook-0"): _notebook_pod()}
        self._version = 100
        self._oldest = 100
        self._history: list[tuple[int, str, str, dict[str, Any]]] = []
        self._changed = threading.Condition()
        self._epoch = 0  # of watches
        self._is_over = False
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._doing: dict[str, str] = {}  # pod -> the current order for its kubelet
        self._kubelets: list[threading.Thread] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="api-server")
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def kubeconfig(self, namespace: str = "lab", token: str = TOKEN, url: str = "") -> str:
        """Write a kubeconfig and return its path."""
        file = self.directory / f"kubeconfig-{namespace}-{len(os.listdir(self.directory))}"
        context = {"cluster": "small", "user": "me", "namespace": namespace}
        file.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "here",
                    "contexts": [{"name": "here", "context": context}],
                    "clusters": [{"name": "small", "cluster": {"server": url or self.url}}],
                    "users": [{"name": "me", "user": {"token": token}}],
                }
            )
        )
        return str(file)

    def close(self) -> None:
        """Stop all threads and processes."""
        with self._changed:
            self._is_over = True
            for name in self._processes:
                self._doing.setdefault(name, "kill")
            self._changed.notify_all()
        for process in self._processes.values():
            _kill(process, signal.SIGKILL)
        for image in self.images.values():
            image.is_there.set()
        for thread in self._kubelets:
            thread.join()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # -- for tests

    def names(self, kind: str) -> list[str]:
        """Return the names of all objects of a kind, except the notebook's own pod."""
        with self._changed:
            return sorted(name for what, _, name in self._objects if what == kind and name != "notebook-0")

    def find(self, kind: str, name: str) -> dict[str, Any]:
        with self._changed:
            return next(copy.deepcopy(o) for (k, _, n), o in self._objects.items() if (k, n) == (kind, name))

    def pid(self, pod: str) -> int:
        """Return the process id of a pod's container."""
        return self._processes[pod].pid

    def kill_for_memory(self, pod: str) -> None:
        """Kill a container as the Linux kernel does when it exceeds its memory limit."""
        self._tell(pod, "oom")

    def evict(self, pod: str) -> None:
        """Evict a pod as a kubelet does when its node runs out of memory."""
        self._tell(pod, "evict")

    def preempt(self, pod: str) -> None:
        """Preempt a pod as the scheduler does when a pod of higher priority needs the node."""
        self._tell(pod, "preempt")

    def lose_node(self, pod: str) -> None:
        """Lose the machine: its kubelet no longer reports or confirms anything."""
        with self._changed:
            self.nodes[self.find("pods", pod)["spec"]["nodeName"]].is_lost = True
        _kill(self._processes[pod], signal.SIGKILL)

    def remove(self, pod: str) -> None:
        """Delete a pod, like ``kubectl delete pod``."""
        self.delete("pods", "lab", pod, None)

    def break_watches(self, *, forget: bool) -> None:
        """End all watches; with ``forget``, also drop the history, so that a watch from an older version gets a 410."""
        with self._changed:
            self._epoch += 1
            if forget:
                self._version += 1
                self._oldest = self._version
                self._history.clear()
            self._changed.notify_all()

    def tell_event(self, pod: str, reason: str, message: str, kind: str = "Normal") -> None:
        """Publish an event about a pod."""
        with self._changed:
            name = f"{pod}.{self._version}"
            event = {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": name, "namespace": "lab"},
                "involvedObject": {"kind": "Pod", "name": pod, "namespace": "lab"},
                "reason": reason,
                "message": message,
                "type": kind,
            }
            self._put("events", "lab", name, event, "ADDED")

    # -- the API server

    def rights(self, verb: str, resource: str) -> None:
        """Check that the user has a permission.

        Raises:
            RefusedRequest: the user does not have it, or a test set another response.
        """
        with self._changed:
            self.requests.append(f"{verb} {resource}")
            answers = self.answers.get((verb, resource))
            if answers:
                raise answers.pop(0)
        if (verb, resource) in self.denied:
            raise RefusedRequest(
                403,
                "Forbidden",
                f'{resource} is forbidden: User "{USER}" cannot {verb} resource "{resource}" '
                'in API group "" in the namespace "lab"',
            )

    def may(self, verb: str, resource: str) -> bool:
        if not self.tells_rights:
            raise RefusedRequest(403, "Forbidden", "selfsubjectaccessreviews is forbidden")
        return (verb, resource) not in self.denied

    def create(self, kind: str, namespace: str, thing: dict[str, Any]) -> dict[str, Any]:
        name = thing["metadata"]["name"]
        if namespace not in ("lab", "default"):
            raise RefusedRequest(404, "NotFound", f'namespaces "{namespace}" not found')
        with self._changed:
            if (kind, namespace, name) in self._objects:
                raise RefusedRequest(409, "AlreadyExists", f'{kind} "{name}" already exists')
            if kind == "pods":
                self._check_quota(thing)
                thing["status"] = {"phase": "Pending", "conditions": []}
            thing["metadata"] |= {"namespace": namespace, "uid": f"uid-{name}"}
            made = self._put(kind, namespace, name, thing, "ADDED")
        if kind == "pods":
            thread = threading.Thread(target=self._run_pod, args=(name,), name=f"kubelet-{name}")
            self._kubelets.append(thread)
            thread.start()
        return made

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        with self._changed:
            if (kind, namespace, name) not in self._objects:
                raise RefusedRequest(404, "NotFound", f'{kind} "{name}" not found')
            return copy.deepcopy(self._objects[kind, namespace, name])

    def list(self, kind: str, namespace: str, query: dict[str, str]) -> dict[str, Any]:
        with self._changed:
            items = [copy.deepcopy(o) for (k, n, _), o in self._objects.items() if (k, n) == (kind, namespace)]
            version = str(self._version)
        return {"metadata": {"resourceVersion": version}, "items": [o for o in items if _matches(o, query)]}

    def watch(self, kind: str, namespace: str, query: dict[str, str]) -> Iterator[bytes]:
        """Yield changes of objects of a kind, and sometimes an empty piece, to check that the client is still connected."""
        since = int(query["resourceVersion"])
        with self._changed:
            epoch = self._epoch
            self.watches += 1
        while True:
            with self._changed:
                if since < self._oldest:
                    yield _line("ERROR", _status(410, "Expired", f"too old resource version: {since} ({self._oldest})"))
                    return
                news = [e for e in self._history if e[0] > since and e[2] == kind]
                if not news:
                    self._changed.wait(0.5)
                if self._is_over or self._epoch != epoch:
                    return
            if not news:
                yield b""
            for version, what, _, thing in news:
                since = version
                if thing["metadata"]["namespace"] == namespace and _matches(thing, query):
                    yield _line(what, thing)

    def log(self, name: str, tail: int) -> str:
        if name not in self._processes:
            raise RefusedRequest(400, "BadRequest", f'container "agent" in pod "{name}" is waiting to start')
        with self._changed:
            if self.nodes[self.find("pods", name)["spec"]["nodeName"]].is_lost:
                raise RefusedRequest(500, "InternalError", "dial tcp 10.0.0.7:10250: i/o timeout")
        return "".join(f"{line}\n" for line in (self.directory / f"{name}.log").read_text().splitlines()[-tail:])

    def delete(self, kind: str, namespace: str, name: str, grace_s: int | None) -> dict[str, Any]:
        thing = self.get(kind, namespace, name)
        lost = kind == "pods" and self._is_on_lost_node(thing)
        if kind != "pods" or grace_s == 0 or (name not in self._doing and not lost):
            with self._changed:
                self._put(kind, namespace, name, thing, "DELETED")
            return thing
        with self._changed:
            thing["metadata"]["deletionTimestamp"] = _now()
            made = self._put(kind, namespace, name, thing, "MODIFIED")
        if not lost:
            self._tell(name, "delete")
        return made

    # -- scheduler and kubelets

    def _put(self, kind: str, namespace: str, name: str, thing: dict[str, Any], what: str) -> dict[str, Any]:
        with self._changed:
            self._version += 1
            thing["metadata"]["resourceVersion"] = str(self._version)
            if what == "DELETED":
                self._objects.pop((kind, namespace, name), None)
            else:
                self._objects[kind, namespace, name] = copy.deepcopy(thing)
            self._history.append((self._version, what, kind, copy.deepcopy(thing)))
            self._changed.notify_all()
        return thing

    def _check_quota(self, thing: dict[str, Any]) -> None:
        if self.gpu_quota is None:
            return
        used = sum(_gpus(o) for (kind, _, _), o in self._objects.items() if kind == "pods")
        if used + _gpus(thing) > self.gpu_quota:
            raise RefusedRequest(
                403,
                "Forbidden",
                f'pods "{thing["metadata"]["name"]}" is forbidden: exceeded quota: gpus, requested: '
                f"requests.nvidia.com/gpu={_gpus(thing)}, used: requests.nvidia.com/gpu={used}, "
                f"limited: requests.nvidia.com/gpu={self.gpu_quota}",
            )

    def _tell(self, pod: str, what: str) -> None:
        with self._changed:
            self._doing[pod] = what
            process = self._processes.get(pod)
            self._changed.notify_all()
        if process is not None:
            _kill(process, signal.SIGTERM if what in ("delete", "preempt") else signal.SIGKILL)

    def _update(self, pod: str, **status: Any) -> None:
        with self._changed:
            thing = self._objects.get(("pods", "lab", pod))
            if thing is None:
                return
            changed = copy.deepcopy(thing)
            conditions = status.pop("conditions", [])
            changed["status"] |= status
            kinds = {condition["type"] for condition in conditions}
            old = [c for c in changed["status"].get("conditions", []) if c["type"] not in kinds]
            changed["status"]["conditions"] = old + conditions
            if "node" in changed["status"]:
                changed["spec"]["nodeName"] = changed["status"].pop("node")
            self._put("pods", "lab", pod, changed, "MODIFIED")

    def _run_pod(self, name: str) -> None:
        """Do the work of the scheduler and the kubelet for a pod."""
        with self._changed:
            self._doing.setdefault(name, "run")
        if self._schedule(name) and self._pull(name):
            self._run_container(name)
        with self._changed:
            deleted = self._doing.get(name) in ("delete", "preempt")
            pod = self._objects.get(("pods", "lab", name))
            if deleted and pod is not None and not self._is_over and not self._is_on_lost_node(pod):
                self._put("pods", "lab", name, copy.deepcopy(pod), "DELETED")
            elif pod is not None:
                del self._doing[name]  # the object remains, and nothing has to stop the pod

    def _goes_on(self, name: str) -> bool:
        return not self._is_over and self._doing[name] == "run"

    def _is_on_lost_node(self, pod: dict[str, Any]) -> bool:
        return "nodeName" in pod["spec"] and self.nodes[pod["spec"]["nodeName"]].is_lost

    def _schedule(self, name: str) -> bool:
        said = ""
        while True:
            with self._changed:
                if not self._goes_on(name):
                    return False
                pod = self._objects["pods", "lab", name]
                wants = pod["spec"].get("nodeSelector", {})
                nodes = {n: node for n, node in self.nodes.items() if wants.items() <= node.labels.items()}
                for node, what in nodes.items():
                    others = [
                        o
                        for (kind, _, _), o in self._objects.items()
                        if kind == "pods"
                        and o["spec"].get("nodeName") == node
                        and o["status"]["phase"] in ("Pending", "Running")
                    ]
                    if sum(map(_gpus, others)) + _gpus(pod) <= what.gpus:
                        self._update(name, node=node, conditions=[{"type": "PodScheduled", "status": "True"}])
                        return True
                many = len(self.nodes)
                bad = (
                    f"{many - len(nodes)} node(s) didn't match Pod's node affinity/selector, "
                    if len(nodes) < many
                    else ""
                )
                short = f"{len(nodes)} Insufficient nvidia.com/gpu" if nodes else ""
                message = (
                    f"0/{many} nodes are available: {(bad + short).rstrip(', ')}. "
                    f"preemption: 0/{many} nodes are available: {many} No preemption victims found for incoming pod."
                )
                if message != said:
                    said = message
                    condition = {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": message,
                    }
                    self._update(name, conditions=[condition])
                    self.tell_event(name, "FailedScheduling", message, "Warning")
                self._changed.wait(1.0)

    def _pull(self, name: str) -> bool:
        wanted = self.find("pods", name)["spec"]["containers"][0]["image"]
        self._update(name, containerStatuses=_container(waiting={"reason": "ContainerCreating"}))
        self.tell_event(name, "Pulling", f'Pulling image "{wanted}"')
        image = self.images.get(wanted, Image(problem=f'failed to resolve reference "{wanted}": not found'))
        if had_problem := bool(image.problem):  # a test may solve it from here on
            waiting = {"reason": "ErrImagePull", "message": f"rpc error: code = NotFound desc = {image.problem}"}
            self._update(name, containerStatuses=_container(waiting=waiting))
            self.tell_event(name, "Failed", f'Failed to pull image "{wanted}": {image.problem}', "Warning")
            waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{wanted}"'}
            self._update(name, containerStatuses=_container(waiting=waiting))
        with self._changed:
            while self._goes_on(name) and (image.problem or not image.is_there.is_set()):
                self._changed.wait(0.02)
                if had_problem and not image.problem:
                    had_problem = False
                    self._update(name, containerStatuses=_container(waiting={"reason": "ContainerCreating"}))
                    self.tell_event(name, "Pulling", f'Pulling image "{wanted}"')
            return self._goes_on(name)

    def _run_container(self, name: str) -> None:
        container = self.find("pods", name)["spec"]["containers"][0]
        command = container["command"]
        image = self.images[container["image"]]
        if command[0] not in image.commands:
            message = f'exec: "{command[0]}": executable file not found in $PATH: unknown'
            stopped = {"reason": "StartError", "exitCode": 128, "message": message}
            self._update(name, phase="Failed", containerStatuses=_container(terminated=stopped))
            return
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()}
        environment |= {key: os.environ[key] for key in ("TMPDIR", "MONARCH_KERNEL_TEST_MARK") if key in os.environ}
        for variable in container["env"]:
            environment[variable["name"]] = self._value(variable)
        run = list(image.commands[command[0]])
        if run[-1] == "...":
            run[-1:] = command[1:]
        with open(self.directory / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                run,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with self._changed:
            self._processes[name] = process
            goes_on = self._goes_on(name)
        if not goes_on:
            _kill(process, signal.SIGKILL)
        self._update(
            name,
            phase="Running",
            podIP="127.0.0.1",
            containerStatuses=_container(running={"startedAt": _now()}),
            conditions=[{"type": "Ready", "status": "True"}],
        )
        code = self._wait_for(name, process)
        with self._changed:
            doing, pod = self._doing.get(name, "run"), self._objects.get(("pods", "lab", name))
        if pod is None or self._is_on_lost_node(pod):
            return
        stopped = {"exitCode": code if code >= 0 else 128 - code, "reason": "Completed" if code == 0 else "Error"}
        more: dict[str, Any] = {}
        if doing == "oom":
            stopped["reason"] = "OOMKilled"
        elif doing == "evict":
            more = {"reason": "Evicted", "message": "The node was low on resource: memory. "}
        elif doing == "preempt":
            message = "default-scheduler: preempting to accommodate a higher priority pod"
            preempted = {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "PreemptionByScheduler",
                "message": message,
            }
            more = {"conditions": [preempted]}
        phase = "Succeeded" if code == 0 else "Failed"
        self._update(name, phase=phase, containerStatuses=_container(terminated=stopped), **more)

    def _wait_for(self, name: str, process: subprocess.Popen[bytes]) -> int:
        while True:
            try:
                return process.wait(5.0 if self._doing.get(name) == "delete" else 1.0)
            except subprocess.TimeoutExpired:
                if self._doing.get(name) == "delete":
                    _kill(process, signal.SIGKILL)

    def _value(self, variable: dict[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        reference = variable["valueFrom"]["secretKeyRef"]
        return str(self.get("secrets", "lab", reference["name"])["stringData"][reference["key"]])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    cluster: Cluster

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            if self.headers.get("authorization") != f"Bearer {TOKEN}":
                raise RefusedRequest(401, "Unauthorized", "Unauthorized")
            self._answer_to(method, json.loads(body) if body else {})
        except RefusedRequest as refused:
            self._send(refused.status, _status(refused.status, refused.reason, str(refused)))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _answer_to(self, method: str, body: dict[str, Any]) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        path = url.path.strip("/").split("/")
        if path[-1] == "selfsubjectaccessreviews":
            asked = body["spec"]["resourceAttributes"]
            allowed = self.cluster.may(asked["verb"], asked["resource"])
            self._send(201, {**body, "status": {"allowed": allowed}})
            return
        namespace, kind, rest = path[3], path[4], path[5:]
        if method == "POST":
            self.cluster.rights("create", kind)
            self._send(201, self.cluster.create(kind, namespace, body))
        elif method == "DELETE":
            self.cluster.rights("delete", kind)
            grace = query.get("gracePeriodSeconds")
            self._send(200, self.cluster.delete(kind, namespace, rest[0], None if grace is None else int(grace)))
        elif rest[1:] == ["portforward"]:
            self.cluster.rights("get", "pods/portforward")
            self._forward(int(query["ports"]))
        elif rest[1:] == ["log"]:
            self.cluster.rights("get", "pods/log")
            self._send(200, self.cluster.log(rest[0], int(query["tailLines"])))
        elif rest:
            self.cluster.rights("get", kind)
            self._send(200, self.cluster.get(kind, namespace, rest[0]))
        elif query.get("watch", "").lower() == "true":
            self.cluster.rights("watch", kind)
            self._stream(self.cluster.watch(kind, namespace, query))
        else:
            self.cluster.rights("list", kind)
            self._send(200, self.cluster.list(kind, namespace, query))

    def _send(self, status: int, thing: dict[str, Any] | str) -> None:
        data = thing.encode() if isinstance(thing, str) else json.dumps(thing).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(thing, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, pieces: Iterator[bytes]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            if piece:
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            elif self._has_hung_up():
                break
        else:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def _forward(self, port: int) -> None:
        """Relay a web socket of the client to a local port: channel 0 has data, channel 1 errors."""
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
        self.end_headers()
        for channel in (0, 1):
            self._send_frame(bytes([channel]) + port.to_bytes(2, "little"))
        with socket.create_connection(("127.0.0.1", port)) as there:
            back = threading.Thread(target=self._forward_back, args=(there,), name="forward-back")
            back.start()
            while (data := self._read_frame()) is not None:
                assert data[:1] == b"\0"
                there.sendall(data[1:])
            there.shutdown(socket.SHUT_RDWR)
            back.join()
        self.close_connection = True

    def _forward_back(self, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := there.recv(1 << 16):
                self._send_frame(b"\0" + data)
            self.wfile.write(b"\x88\x00")  # close

    def _send_frame(self, data: bytes) -> None:
        size = len(data)
        head = (
            bytes([size])
            if size < 126
            else b"\x7e" + struct.pack(">H", size)
            if size < 1 << 16
            else b"\x7f" + struct.pack(">Q", size)
        )
        self.wfile.write(b"\x82" + head + data)

    def _read_frame(self) -> bytes | None:
        head = self.rfile.read(2)
        if len(head) < 2 or head[0] & 15 == 8:
            return None
        size = head[1] & 127
        if size > 125:
            wide = ">H" if size == 126 else ">Q"
            (size,) = struct.unpack(wide, self.rfile.read(struct.calcsize(wide)))
        mask = self.rfile.read(4)
        data = self.rfile.read(size)
        return bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))

    def _has_hung_up(self) -> bool:
        self.connection.setblocking(False)
        try:
            return self.connection.recv(1) == b""
        except BlockingIOError:
            return False
        finally:
            self.connection.setblocking(True)


def _matches(thing: dict[str, Any], query: dict[str, str]) -> bool:
    wanted = [part.split("=") for part in query.get("labelSelector", "").split(",") if part]
    labels = thing["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in wanted)


def _gpus(pod: dict[str, Any]) -> int:
    return int(pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))


def _container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "agent", "state": state}]


def _line(what: str, thing: dict[str, Any]) -> bytes:
    return json.dumps({"type": what, "object": thing}).encode() + b"\n"


def _status(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


def _notebook_pod() -> dict[str, Any]:
    metadata = {"name": "notebook-0", "namespace": "lab", "uid": "uid-notebook-0", "resourceVersion": "1"}
    spec = {"containers": [{"name": "notebook"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Running"}}


def _kill(process: subprocess.Popen[bytes], signum: int) -> None:
    process.send_signal(signum)  # no effect if another thread has reaped it


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
