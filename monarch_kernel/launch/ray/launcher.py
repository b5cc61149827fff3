"""Ray: each host is an actor of a Ray cluster, wherever that runs.

Theory of operation
===================

This process never connects to Ray. A child does (`driver`), which starts with the first launch: so neither Ray's threads and
signal handlers nor its forty lines about each node that dies come into the notebook, a lost cluster ends that child and not the
kernel, and what the user does with Ray himself, here, is left alone. What he has made there, such as a placement group, is
known to the child by its id: it is a driver of the same cluster.

Both talk over a socket, a thread (``monarch-ray``) listens to what the child says and writes it down for the handles. Nothing
that is asked of the launcher waits for Ray, but for `close`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import agent_command
from monarch_kernel.launch.ray.options import Options
from monarch_kernel.launch.text import how_ended
from monarch_kernel.net.wire.config import AgentConfig

__all__ = ["RayHost", "RayLauncher"]

_TITLE = "Ray"
_GIVEN_BACK = "it was given back"
_ANSWER_S = 0.5
_FORCE_S = 6.0
_END_S = 8.0
_STOP_S = 2.0
_TAIL = 20


class RayLauncher:
    """Has a Ray cluster give hosts, each on a node of its own.

    Args:
        address: of the cluster: ``HOST:PORT``, or ``ray://HOST:PORT`` from a machine that is no part of it. ``auto`` is the
            cluster that this process has connected to with ``ray.init``, else that of ``$RAY_ADDRESS``, else the one that this
            machine is part of. ``local`` makes one of this machine alone.
        gpus: of each host.
        cpus: processor cores that each host takes from Ray's books; its ranks may use all that the machine has.
        resources: what else each host takes, by the names that the nodes were started with.
        python: interpreter of the hosts; left out, that with which Ray runs there.
        runtime_env: Ray's, in which the agents start: packages, variables, a working directory.
        grows: whether nodes that the cluster has not got may still come, such as with an autoscaler. Else a host that
            none of its nodes can be is given up at once.
        dials: connect to the agents from here, at a port that each chooses; for nodes that can't connect to this machine.
        command: what is run on a host instead of our agent.
        occupied: nodes where an earlier launcher has hosts of the same mesh; no other comes there.
        doubted: nodes where it had hosts that are gone; they are taken if there are no others.

    Raises:
        LaunchError: Ray is not installed, or the options make no sense.
    """

    name = "ray"

    def __init__(
        self,
        *,
        address: str = "auto",
        gpus: float = 0,
        cpus: float = 1,
        resources: Mapping[str, float] | Sequence[tuple[str, str | float]] = (),
        python: str = "",
        runtime_env: Mapping[str, Any] | None = None,
        grows: bool = False,
        dials: bool = False,
        command: Sequence[str] = (),
        occupied: Sequence[str] = (),
        doubted: Sequence[str] = (),
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise LaunchError(f"{_TITLE} is not installed here: pip install 'monarch_kernel[ray]'")
        bundle = {"GPU": gpus, "CPU": cpus, **_numbers(dict(resources))}
        bundle = {name: float(count) for name, count in bundle.items() if count}
        if not bundle or min(bundle.values()) < 0:
            raise LaunchError(
                f"{_TITLE}: each host has to take something that nodes have, such as --cpus 1 or --gpus 8"
            )
        self._options = Options(
            address=address,
            bundle=bundle,
            command=tuple(command) or (python, *agent_command()[1:]),
            runtime_env=dict(runtime_env) if runtime_env else None,
            grows=grows,
            occupied=tuple(occupied),
            doubted=tuple(doubted),
        )
        self._dials = dials
        self._driver: _Driver | None = None
        self._lock = threading.Lock()

    @classmethod
    def from_placement_group(
        cls,
        group: Any,
        *,
        gpus: float | None = None,
        python: str = "",
        runtime_env: Mapping[str, Any] | None = None,
        command: Sequence[str] = (),
    ) -> RayLauncher:
        """Hosts in the bundles of a placement group that the program has made with Ray; it is used, and never removed.

        A host that is lost can be replaced when Ray has found another node for its bundle.

        Args:
            group: of Ray; one host for each of its bundles, in their order.
            gpus: that a host takes from its bundle; left out, all that are there. 0 to share none of them.
            python: as of the class.
            runtime_env: as of the class.
            command: as of the class.

        Raises:
            LaunchError: this program is not connected to Ray; the bundles have different numbers of GPUs.
        """
        bundles = [bundle.get("GPU", 0.0) for bundle in group.bundle_specs]
        if gpus is None:
            if len(set(bundles)) > 1:
                raise LaunchError(
                    f"{_TITLE}: the bundles have {bundles} GPUs; say how many each host takes: gpus=0, ..."
                )
            gpus = bundles[0]
        launcher = cls(
            address=_own_address(), gpus=gpus, cpus=1, python=python, runtime_env=runtime_env, command=command
        )
        launcher._in_places([("", None)] * len(bundles), {"GPU": float(gpus)} if gpus else {}, group.id.hex())
        return launcher

    @classmethod
    def from_actors(
        cls,
        actors: Sequence[Any],
        *,
        python: str = "",
        runtime_env: Mapping[str, Any] | None = None,
        command: Sequence[str] = (),
        timeout_s: float = 10.0,
    ) -> RayLauncher:
        """Hosts on the nodes where the program has actors of Ray, with the GPUs that these have; nothing more is asked of Ray.

        Let the actors live, and leave their GPUs alone, for as long as the hosts are there: Ray may give the GPUs of an
        actor that has ended to somebody else. There is no other host in place of one that is lost.

        Args:
            actors: of Ray, of any class; one host for each node that has any, in their order. `places` tells how many.
            python: as of the class.
            runtime_env: as of the class.
            command: as of the class.
            timeout_s: how long the actors may take to say where they are, in seconds.

        Raises:
            LaunchError: this program is not connected to Ray, or an actor does not answer.
        """
        launcher = cls(address=_own_address(), python=python, runtime_env=runtime_env, command=command)
        nodes: dict[str, list[str]] = {}
        for node, gpus in _whereabouts(actors, timeout_s):
            nodes[node] = nodes.get(node, []) + gpus
        launcher._in_places([(node, ",".join(gpus)) for node, gpus in nodes.items()], {}, "")
        return launcher

    @property
    def places(self) -> int:
        """For how many hosts the program has room, if it has said where; else 0."""
        return len(self._options.places)

    def launch(self, configs: Sequence[AgentConfig]) -> list[RayHost]:
        """Ask for one host for each of these, which come together.

        Raises:
            LaunchError: the driver process can't be started.
        """
        with self._lock:
            if self._driver is None or self._driver.has_ended:
                if self._driver is not None:
                    self._driver.close(0.0)
                self._driver = _Driver(self._resolved())
            return self._driver.launch([self._encode(config) for config in configs])

    def progress(self) -> str:
        """What Ray has not got yet."""
        driver = self._driver
        return f"{_TITLE}: {driver.progress}" if driver is not None and driver.progress else ""

    def close(self, timeout_s: float) -> None:
        """Give back all hosts, and end the driver."""
        with self._lock:
            if self._driver is not None:
                self._driver.close(timeout_s)
                self._driver = None

    def _encode(self, config: AgentConfig) -> str:
        text = config.encode().decode()
        return json.dumps({**json.loads(text), "addresses": ()}) if self._dials else text

    def _in_places(self, places: Sequence[tuple[str, str | None]], bundle: dict[str, float], group: str) -> None:
        values = {**vars(self._options), "places": tuple(places), "bundle": bundle, "group": group}
        self._options = Options(**values)

    def _resolved(self) -> Options:
        """The options, with the address of the cluster that the user has connected this process to, if he means that."""
        if self._options.address == "auto" and (address := _user_address()):
            return Options(**{**vars(self._options), "address": address})
        return self._options


class RayHost:
    """One host, as the driver process tells of it."""

    def __init__(self, driver: _Driver, number: int) -> None:
        self._driver = driver
        self._number = number
        self._closed = threading.Event()
        self.address = ""
        self.node = ""
        self._ended: str | None = None
        self._log: tuple[str, ...] = ()

    def poll(self) -> str | None:
        """None while it runs, or may come; else why not."""
        return self._ended

    def log_tail(self) -> tuple[str, ...]:
        """The last lines that the agent wrote."""
        return self._log

    def close(self, timeout_s: float) -> None:
        """Give it back. With no time for its agent, as for a host that is lost, the end of that is hardly waited for."""
        if not self._closed.is_set() and self._driver.send(close=self._number, timeout_s=timeout_s):
            self._closed.wait(timeout_s + _FORCE_S if timeout_s else _ANSWER_S)
        self._ended = self._ended or _GIVEN_BACK

    def heard(self, message: Mapping[str, Any]) -> None:
        """Take what the driver process says of it."""
        if "log" in message:
            self._log = tuple(message["log"])[-_TAIL:]
            self.address = message["address"] or self.address
        if "node" in message:
            self.node = message["node"]
        if "ended" in message:
            self._ended = message["ended"]
        if "closed" in message:
            self._closed.set()

    def lost(self, why: str) -> None:
        """Nothing more will be heard of it."""
        self._ended = self._ended or why
        self._closed.set()


class _Driver:
    """The child process, and what it has said."""

    def __init__(self, options: Options) -> None:
        self._hosts: dict[int, RayHost] = {}
        self._lock = threading.Lock()
        self._why = ""
        self.progress = "starting"
        self.has_ended = False
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as noise, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "monarch_kernel.launch.ray.driver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=noise,
                stderr=noise,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=_environment(),
            )
            self._noise = os.dup(noise.fileno())
        self._socket = ours
        self._send(options.encode())
        self._thread = threading.Thread(target=self._listen, name="monarch-ray", daemon=True)
        self._thread.start()

    def launch(self, configs: Sequence[str]) -> list[RayHost]:
        """Have hosts obtained."""
        with self._lock:
            first = len(self._hosts)
            hosts = [RayHost(self, first + i) for i in range(len(configs))]
            self._hosts |= {first + i: host for i, host in enumerate(hosts)}
        if not self.send(launch=[(first + i, config) for i, config in enumerate(configs)]):
            for host in hosts:
                host.lost(self._why)
        return hosts

    def send(self, **order: Any) -> bool:
        """Tell the process to do something; False if it has ended."""
        return not self.has_ended and self._send(json.dumps(order).encode() + b"\n")

    def close(self, timeout_s: float) -> None:
        """Have it give back all hosts, and end."""
        deadline = time.monotonic() + timeout_s + _END_S
        self._why = self._why or _GIVEN_BACK
        self.send(timeout_s=timeout_s)
        for stop in (None, self._process.terminate, self._process.kill):
            if stop is not None:
                stop()
            try:
                self._process.wait(max(_STOP_S, deadline - time.monotonic()))
                break
            except subprocess.TimeoutExpired:
                deadline = 0.0
        self._thread.join()
        self._socket.close()
        if self._noise >= 0:
            os.close(self._noise)
            self._noise = -1

    def _send(self, data: bytes) -> bool:
        with self._lock:
            try:
                self._socket.sendall(data)
            except OSError:
                return False
        return True

    def _listen(self) -> None:
        with self._socket.makefile("rb") as lines, contextlib.suppress(ConnectionError):
            for line in lines:
                self._hear(json.loads(line))
        code = self._process.wait()
        self._why = self._why or self._explain(code)
        with self._lock:
            self.has_ended = True
            hosts = list(self._hosts.values())
        self.progress = ""
        for host in hosts:
            host.lost(self._why)

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "progress" in message:
            self.progress = message["progress"]
        elif "failed" in message:
            self._why = f"{_TITLE}: {message['failed']}"
        else:
            self._hosts[message["host"]].heard(message)

    def _explain(self, code: int) -> str:
        """Why the process has ended, with the last that Ray had to say."""
        size = os.fstat(self._noise).st_size
        tail = os.pread(self._noise, 4096, max(0, size - 4096)).decode(errors="replace").splitlines()
        last = " ".join(line.strip() for line in [line for line in tail if line.strip()][-3:])
        return f"the process that talks to {_TITLE} (pid {self._process.pid}) {how_ended(code)}{': ' if last else ''}{last}"


def _numbers(resources: Mapping[str, str | float]) -> dict[str, float]:
    try:
        return {name: float(count) for name, count in resources.items()}
    except ValueError as error:
        raise LaunchError(
            f"{_TITLE}: resources are asked for in numbers, such as --resource accelerator=1: {error}"
        ) from None


def _environment() -> dict[str, str]:
    """Ours, and that Ray writes no colours, sends no statistics of use and asks nothing."""
    quiet = {"RAY_COLOR_PREFIX": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_USAGE_STATS_PROMPT_ENABLED": "0"}
    return {**os.environ, "PYTHONUNBUFFERED": "1", **quiet}


def _user_address() -> str:
    """Of the cluster that this process has connected to by itself; empty if it has not."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    if ray.util.client.ray.is_connected():  # it knows only what the server at the other end does for it
        return ""
    address: str = ray.get_runtime_context().gcs_address
    return address


def _own_address() -> str:
    address = _user_address()
    if not address:
        raise LaunchError(
            f"{_TITLE}: this program is not connected to a cluster (a ray:// client does not count): ray.init() on a node"
        )
    return address


def _whereabouts(actors: Sequence[Any], timeout_s: float) -> list[tuple[str, list[str]]]:
    """The node of each actor, and its GPUs."""
    import ray

    def where(_: Any) -> tuple[str, list[str]]:
        context = ray.get_runtime_context()
        return context.get_node_id(), [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", ())]

    try:
        found: list[tuple[str, list[str]]] = ray.get(
            [actor.__ray_call__.remote(where) for actor in actors], timeout=timeout_s
        )
    except ray.exceptions.GetTimeoutError:
        raise LaunchError(f"{_TITLE}: an actor did not say within {timeout_s:g} s where it is; is it busy?") from None
    return found
