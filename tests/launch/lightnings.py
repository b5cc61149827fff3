"""A fake Lightning cloud: the REST services that the SDK uses, with processes of this machine as its machines."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

ME, TEAMSPACE, STUDIO = "user-1", "space-1", "studio-1"
STUDIO_VARIABLES = {
    "LIGHTNING_USER_ID": ME,
    "LIGHTNING_API_KEY": "the key",
    "LIGHTNING_USERNAME": "me",
    "LIGHTNING_TEAMSPACE": "lab",
    "LIGHTNING_CLOUD_PROJECT_ID": TEAMSPACE,
    "LIGHTNING_CLOUD_SPACE_ID": STUDIO,
}


@dataclass
class Machine:
    """A machine of a job, with the fields of the API."""

    id: str
    name: str
    rank: int
    spec: dict[str, Any]
    log: Path
    parent: str = ""
    state: str = "pending"
    message: str = ""
    was_interrupted: bool = False
    process: subprocess.Popen[bytes] | None = None
    watcher: threading.Thread | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "projectId": TEAMSPACE,
            "multiMachineJobId": self.parent,
            "state": self.state,
            "message": self.message,
            "interruptionNoticeReceived": self.was_interrupted,
            "privateIpAddress": "127.0.0.1" if self.state == "running" else "",
            "spec": {**self.spec, "rank": self.rank},
        }


@dataclass
class Job:
    """A job of several machines."""

    id: str
    name: str
    spec: dict[str, Any]
    machines: list[Machine]
    wanted: str = ""

    @property
    def state(self) -> str:
        states = {machine.state for machine in self.machines}
        if "failed" in states:
            return "FAILED"
        for state in ("running", "pending", "stopped", "completed"):
            if state in states:
                return state.upper()
        return "PENDING"

    def to_json(self) -> dict[str, Any]:
        prefix = "MultiMachineJob_STATE_"
        return {
            "id": self.id,
            "name": self.name,
            "projectId": TEAMSPACE,
            "machines": len(self.machines),
            "state": prefix + self.state,
            "desiredState": prefix + (self.wanted or "RUNNING"),
            "spec": self.spec,
            "status": {"message": ""},
        }


class RefusedRequest(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Cloud:
    """The cloud, with methods to inspect and to break its parts.

    Attributes:
        directory: directory for logs.
        run: converts a job's command to the command that a machine runs instead.
        capacity: the number of free machines.
        port: the port of the server; the SDK reads the address only once per process.
        rank_variable: environment variable with the number of a machine in a multi-machine job.
        refusals: method and end of a path -> responses to send instead, each once.
        history: the SDK's records of failed calls.
        requests: all requests, such as ``POST jobs``.
        unknown: requests that have no route.
    """

    directory: Path
    run: Callable[[str], list[str]]
    capacity: int = 100
    port: int = 0
    rank_variable: str = "NODE_RANK"
    refusals: dict[tuple[str, str], list[RefusedRequest]] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.jobs: dict[str, Job] = {}
        self.deleted: list[str] = []
        self._count = 0
        self._lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), type("Handler", (_Handler,), {"cloud": self}))
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="lightning-cloud")
        self._thread.start()

    def close(self) -> None:
        """Stop all threads and processes."""
        for machine in list(self.machines.values()):
            self._kill(machine)
        for machine in list(self.machines.values()):
            if machine.watcher is not None:
                machine.watcher.join()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # -- for tests

    def names(self) -> list[str]:
        """Return the names of the jobs that were not deleted."""
        with self._lock:
            return sorted(
                [j.name for j in self.jobs.values()] + [m.name for m in self.machines.values() if not m.parent]
            )

    def machine(self, job: str, rank: int = 0) -> Machine:
        with self._lock:
            for machine in self.machines.values():
                parent = self.jobs.get(machine.parent)
                if (parent.name if parent else machine.name) == job and machine.rank == rank:
                    return machine
        raise LookupError(job)

    def take_away(self, machine: Machine) -> None:
        """Preempt an interruptible machine."""
        with self._lock:
            machine.was_interrupted = True
            machine.state, machine.message = "failed", "machine was preempted"
        self._kill(machine)

    def add_machines(self, count: int) -> None:
        """Add machines, and give them to waiting jobs."""
        with self._lock:
            self.capacity += count
            self._give()

    # -- the services

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            for (of, end), refusals in self.refusals.items():
                if of == method and path.endswith(end) and refusals:
                    raise refusals.pop(0)
        for of, pattern, do in _ROUTES:
            found = re.fullmatch(pattern, path)
            if of == method and found:
                self.requests.append(f"{method} {path.rpartition('/')[2]}")
                with self._lock:
                    return do(
                        self, *found.groups(), **({"body": body} if body else {}), **({"query": query} if query else {})
                    )
        self.unknown.append(f"{method} {path}")
        raise RefusedRequest(404, f"there is no {path}")

    def me(self) -> dict[str, Any]:
        return {"id": ME, "username": "me"}

    def users(self, **_: Any) -> dict[str, Any]:
        return {"users": [self.me()]}

    def memberships(self, **_: Any) -> dict[str, Any]:
        space = {"projectId": TEAMSPACE, "name": "lab", "ownerId": ME, "ownerType": "user", "displayName": "lab"}
        return {"memberships": [space]}

    def teamspace(self, *_: str, **__: Any) -> dict[str, Any]:
        return {"id": TEAMSPACE, "name": "lab", "ownerId": ME, "ownerType": "USER", "projectSettings": {}}

    def studios(self, *, query: dict[str, str]) -> dict[str, Any]:
        return {"cloudspaces": [self.studio()] if query.get("name", "here") == "here" else []}

    def studio(self, *_: str, **__: Any) -> dict[str, Any]:
        return {"id": STUDIO, "name": "here", "clusterId": "cluster-1", "projectId": TEAMSPACE, "state": ""}

    def nothing(self, *_: str, **__: Any) -> dict[str, Any]:
        return {}

    def add_history(self, *, body: dict[str, Any]) -> dict[str, Any]:
        self.history.append(body["message"])
        return {}

    def create_job(self, *, body: dict[str, Any]) -> dict[str, Any]:
        machine = self._new_machine(body["name"], 0, body["spec"])
        self._give()
        return machine.to_json()

    def create_several(self, *, body: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        job = Job(f"mmt-{self._count}", body["name"], body["spec"], [])
        self.jobs[job.id] = job
        for rank in range(body["machines"]):
            job.machines.append(self._new_machine(f"{job.name}-{rank}", rank, body["spec"], job.id))
        self._give()
        return job.to_json()

    def get_job(self, id: str) -> dict[str, Any]:
        return self._found(self.machines, id).to_json()

    def find_job(self, *, query: dict[str, str]) -> dict[str, Any]:
        return next(machine for machine in self.machines.values() if machine.name == query["name"]).to_json()

    def get_several(self, id: str) -> dict[str, Any]:
        return self._found(self.jobs, id).to_json()

    def list_machines(self, *, query: dict[str, str]) -> dict[str, Any]:
        return {"jobs": [machine.to_json() for machine in self._found(self.jobs, query["multiMachineJobId"]).machines]}

    def update_job(self, id: str, *, body: dict[str, Any]) -> dict[str, Any]:
        machine = self._found(self.machines, id)
        assert body["state"] == "stop"
        self._stop(machine)
        return machine.to_json()

    def update_several(self, id: str, *, body: dict[str, Any]) -> dict[str, Any]:
        job = self._found(self.jobs, id)
        job.wanted = body["desiredState"].rpartition("_")[2]
        for machine in job.machines:
            self._stop(machine)
        return job.to_json()

    def delete_job(self, id: str, **_: Any) -> dict[str, Any]:
        self.deleted.append(self._found(self.machines, id).name)
        self._kill(self.machines.pop(id))
        return {}

    def delete_several(self, id: str) -> dict[str, Any]:
        job = self._found(self.jobs, id)
        self.deleted.append(job.name)
        del self.jobs[id]
        for machine in job.machines:
            self._kill(self.machines.pop(machine.id))
        return {}

    def logs(self, *, query: dict[str, str]) -> dict[str, Any]:
        machine = self._found(self.machines, query["jobIds"])
        lines = machine.log.read_text().splitlines() if machine.log.exists() else []
        return {
            "entries": [{"message": line, "line": str(i), "resourceId": machine.id} for i, line in enumerate(lines)]
        }

    def _found(self, things: dict[str, Any], id: str) -> Any:
        if id not in things:
            raise RefusedRequest(404, f"there is no job {id}")
        return things[id]

    def _new_machine(self, name: str, rank: int, spec: dict[str, Any], parent: str = "") -> Machine:
        self._count += 1
        machine = Machine(f"job-{self._count}", name, rank, spec, self.directory / f"{name}.log", parent)
        self.machines[machine.id] = machine
        return machine

    def _give(self) -> None:
        """Give machines to each waiting job for which there are enough."""
        waiting = [machine for machine in self.machines.values() if machine.state == "pending"]
        for key in dict.fromkeys(machine.parent or machine.id for machine in waiting):
            group = [machine for machine in waiting if (machine.parent or machine.id) == key]
            if len(group) <= self.capacity:
                self.capacity -= len(group)
                for machine in group:
                    self._start(machine)
            else:
                for machine in group:
                    machine.message = "no capacity in this region"

    def _start(self, machine: Machine) -> None:
        environment = {
            key: os.environ[key] for key in ("PATH", "TMPDIR", "MONARCH_KERNEL_TEST_MARK") if key in os.environ
        }
        environment |= {"PYTHONPATH": os.getcwd(), "MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "64"}
        environment |= {variable["name"]: variable["value"] for variable in machine.spec["env"]}
        if machine.parent and self.rank_variable:
            environment[self.rank_variable] = str(machine.rank)
        with open(machine.log, "wb") as log:
            machine.process = subprocess.Popen(
                self.run(machine.spec["command"]),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        machine.state, machine.message = "running", ""
        machine.watcher = threading.Thread(
            target=self._watch, args=(machine, machine.process), name=f"machine-{machine.name}"
        )
        machine.watcher.start()

    def _watch(self, machine: Machine, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._lock:
            self.capacity += 1
            if machine.state == "running":
                machine.state = "completed" if code == 0 else "failed"
                machine.message = "" if code == 0 else f"exit code {code}"
            self._give()

    def _stop(self, machine: Machine) -> None:
        if machine.state in ("running", "pending"):
            machine.state = "stopped"
            self._kill(machine)

    def _kill(self, machine: Machine) -> None:
        if machine.process is not None:
            machine.process.kill()  # no effect if another thread has reaped it


@contextlib.contextmanager
def lightning_cloud(directory: Path) -> Iterator[Cloud]:
    """Run a cloud that the SDK of this process uses, as if from one of its Studios; bash runs the commands."""
    with pytest.MonkeyPatch.context() as patch:
        cloud = Cloud(directory, lambda command: ["bash", "-ec", command], port=_Port.number)
        _Port.number = cloud.port
        patch.setenv("LIGHTNING_CLOUD_URL", f"http://127.0.0.1:{cloud.port}")
        patch.setenv("LIGHTNING_SETTINGS_PATH", str(directory / "settings.json"))
        for name, value in STUDIO_VARIABLES.items():
            patch.setenv(name, value)
        try:
            yield cloud
        finally:
            cloud.close()
            hang_up()


class _Port:
    """The port that all clouds of a process share, because the SDK reads the address of the cloud only on import."""

    number = 0


def hang_up() -> None:
    """Close the connections that the SDK keeps open, in clients that it never closes."""
    from urllib3 import HTTPConnectionPool, PoolManager

    for thing in gc.get_objects():  # type() and not isinstance(): __class__ of some objects emits warnings
        if issubclass(type(thing), PoolManager):
            thing.clear()  # it makes new connections when it is used again
        elif issubclass(type(thing), HTTPConnectionPool):
            thing.close()


_PROJECT = f"/v1/projects/{TEAMSPACE}"
_ROUTES: list[tuple[str, str, Callable[..., dict[str, Any]]]] = [
    ("GET", "/v1/auth/user", Cloud.me),
    ("GET", "/v1/search-users", Cloud.users),
    ("GET", "/v1/users", Cloud.users),
    ("GET", "/v1/memberships", Cloud.memberships),
    ("GET", _PROJECT, Cloud.teamspace),
    ("GET", f"{_PROJECT}/cloudspaces", Cloud.studios),
    ("GET", f"{_PROJECT}/cloudspaces/([^/]+)", Cloud.studio),
    ("POST", "/v1/sdk-command-history", Cloud.add_history),
    ("POST", f"{_PROJECT}/jobs", Cloud.create_job),
    ("GET", f"{_PROJECT}/jobs", Cloud.list_machines),
    ("GET", f"{_PROJECT}/jobs/find", Cloud.find_job),
    ("GET", f"{_PROJECT}/jobs/([^/]+)", Cloud.get_job),
    ("PUT", f"{_PROJECT}/jobs/([^/]+)", Cloud.update_job),
    ("DELETE", f"{_PROJECT}/jobs/([^/]+)", Cloud.delete_job),
    ("POST", f"{_PROJECT}/multi-machine-jobs", Cloud.create_several),
    ("GET", f"{_PROJECT}/multi-machine-jobs/([^/]+)", Cloud.get_several),
    ("PUT", f"{_PROJECT}/multi-machine-jobs/([^/]+)", Cloud.update_several),
    ("DELETE", f"{_PROJECT}/multi-machine-jobs/([^/]+)", Cloud.delete_several),
    ("GET", f"{_PROJECT}/page-logs", Cloud.logs),
]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    cloud: Cloud

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else {}
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        try:
            status, answer = 200, self.cloud.answer(method, url.path, query, body)
        except RefusedRequest as refused:
            status, answer = refused.status, {"code": 5, "message": str(refused)}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
