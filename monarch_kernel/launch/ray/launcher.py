"""The Ray launcher: each host is an actor of a Ray cluster.

Theory of operation
===================

This process never connects to Ray. A child process does (`driver`), which starts with the first launch. So the notebook gets
neither Ray's threads and signal handlers nor its forty lines about each node that dies, a lost cluster ends that child and not
the kernel, and the user's own use of Ray in this process is not affected. The child finds objects that the user created in Ray,
such as a placement group, by their ids, because it is a driver of the same cluster.

The launcher and the child communicate over a socket. A thread (``monarch-ray``) receives the child's messages and updates the
handles. No method of the launcher waits for Ray, except `close`.
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
from monarch_kernel.launch.base import agent_command, module_command
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
    """Gets hosts from a Ray cluster, each on a different node.

    Args:
        address: address of the cluster: ``HOST:PORT``, or ``ray://HOST:PORT`` from a machine outside it. ``auto`` is the
            cluster that this process has connected to with ``ray.init``, else that of ``$RAY_ADDRESS``, else the one that this
            machine is part of. ``local`` starts a cluster on this machine.
        gpus: GPUs of each host.
        cpus: CPU cores that each host reserves in Ray; its ranks may use all cores of the machine.
        resources: other resources that each host takes, by the names that the nodes were started with.
        python: interpreter of the hosts; by default the one that Ray runs there.
        runtime_env: Ray's runtime environment of the agents: packages, variables, a working directory.
        grows: whether nodes may still join the cluster, as with an autoscaler. Otherwise the launcher gives up at once if the
            cluster does not have the nodes.
        dials: whether to connect to the agents from here, at a port that each chooses; for nodes that can't connect to this
            machine.
        command: command to run on a host instead of the agent.
        occupied: nodes where an earlier launcher has hosts of the same mesh, and which must not be used.
        last_resort: nodes where an earlier launcher lost hosts, and which are used only as a last resort.

    Raises:
        LaunchError: Ray is not installed, or an option is not valid.
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
        last_resort: Sequence[str] = (),
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise LaunchError(f"{_TITLE} is not installed; install it with: pip install 'monarch_kernel[ray]'")
        bundle = {"GPU": gpus, "CPU": cpus, **_numbers(dict(resources))}
        bundle = {name: float(count) for name, count in bundle.items() if count}
        if not bundle or min(bundle.values()) < 0:
            raise LaunchError(f"{_TITLE}: each host must take some resource of a node, such as --cpus 1 or --gpus 8")
        self._options = Options(
            address=address,
            bundle=bundle,
            command=tuple(command) or (python, *agent_command()[1:]),
            runtime_env=dict(runtime_env) if runtime_env else None,
            grows=grows,
            occupied=tuple(occupied),
            last_resort=tuple(last_resort),
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
        """Create a launcher for hosts in the bundles of the program's own placement group, which is never removed.

        A lost host can be replaced when Ray has found another node for its bundle.

        Args:
            group: the placement group; each bundle is a host, in their order.
            gpus: GPUs that a host takes from its bundle; by default all of them. 0 leaves them to the program.
            python: as of the class.
            runtime_env: as of the class.
            command: as of the class.

        Raises:
            LaunchError: this program is not connected to Ray, or the bundles have different numbers of GPUs.
        """
        bundles = [bundle.get("GPU", 0.0) for bundle in group.bundle_specs]
        if gpus is None:
            if len(set(bundles)) > 1:
                raise LaunchError(
                    f"{_TITLE}: the bundles have {bundles} GPUs; give the number that each host takes, such as gpus=0"
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
        """Create a launcher for hosts on the nodes of the program's own Ray actors, with their GPUs and no other resources.

        Keep the actors alive, and don't use their GPUs, for as long as the hosts exist: Ray may assign the GPUs of an actor
        that has ended to another program. A lost host can't be replaced.

        Args:
            actors: Ray actors of any class; each node that has any is a host, in their order. `places` is their number.
            python: as of the class.
            runtime_env: as of the class.
            command: as of the class.
            timeout_s: how long the actors may take to report their node, in seconds.

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
        """The number of hosts for which the program gave places; 0 if it gave none."""
        return len(self._options.places)

    def launch(self, configs: Sequence[AgentConfig]) -> list[RayHost]:
        """Request one host for each config; all of them come up together.

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
        """Return what Ray still waits for."""
        driver = self._driver
        return f"{_TITLE}: {driver.progress}" if driver is not None and driver.progress else ""

    def close(self, timeout_s: float) -> None:
        """Give all hosts back, and end the driver."""
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
        """Return the options, with ``auto`` resolved to the cluster that the user has connected this process to, if any."""
        if self._options.address == "auto" and (address := _user_address()):
            return Options(**{**vars(self._options), "address": address})
        return self._options


class RayHost:
    """The handle of a host, updated from messages of the driver process."""

    def __init__(self, driver: _Driver, number: int) -> None:
        self._driver = driver
        self._number = number
        self._closed = threading.Event()
        self.address = ""
        self.node = ""
        self._ended: str | None = None
        self._log: tuple[str, ...] = ()

    def poll(self) -> str | None:
        """Return None while the host runs or may still come up, else why it ended."""
        return self._ended

    def log_tail(self) -> tuple[str, ...]:
        """Return the last lines that the agent wrote."""
        return self._log

    def close(self, timeout_s: float) -> None:
        """Give the host back. With a timeout of 0, as for a lost host, wait only briefly for the confirmation."""
        if not self._closed.is_set() and self._driver.send(close=self._number, timeout_s=timeout_s):
            self._closed.wait(timeout_s + _FORCE_S if timeout_s else _ANSWER_S)
        self._ended = self._ended or _GIVEN_BACK

    def handle_message(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the driver process about this host."""
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
        """Mark the host as ended, because no more messages will come."""
        self._ended = self._ended or why
        self._closed.set()


class _Driver:
    """The driver process, and the state that it has reported."""

    def __init__(self, options: Options) -> None:
        self._hosts: dict[int, RayHost] = {}
        self._lock = threading.Lock()
        self._why = ""
        self.progress = "starting"
        self.has_ended = False
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as noise, theirs:
            self._process = subprocess.Popen(
                module_command("monarch_kernel.launch.ray.driver", str(theirs.fileno())),
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
        """Order hosts."""
        with self._lock:
            first = len(self._hosts)
            hosts = [RayHost(self, first + i) for i in range(len(configs))]
            self._hosts |= {first + i: host for i, host in enumerate(hosts)}
        if not self.send(launch=[(first + i, config) for i, config in enumerate(configs)]):
            for host in hosts:
                host.lost(self._why)
        return hosts

    def send(self, **order: Any) -> bool:
        """Send an order to the process; return False if it has ended."""
        return not self.has_ended and self._send(json.dumps(order).encode() + b"\n")

    def close(self, timeout_s: float) -> None:
        """Order the process to give all hosts back and to end; kill it after a timeout."""
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
                self._handle_message(json.loads(line))
        code = self._process.wait()
        self._why = self._why or self._explain(code)
        with self._lock:
            self.has_ended = True
            hosts = list(self._hosts.values())
        self.progress = ""
        for host in hosts:
            host.lost(self._why)

    def _handle_message(self, message: Mapping[str, Any]) -> None:
        if "progress" in message:
            self.progress = message["progress"]
        elif "failed" in message:
            self._why = f"{_TITLE}: {message['failed']}"
        else:
            self._hosts[message["host"]].handle_message(message)

    def _explain(self, code: int) -> str:
        """Say why the process ended, with the last output of Ray."""
        size = os.fstat(self._noise).st_size
        tail = os.pread(self._noise, 4096, max(0, size - 4096)).decode(errors="replace").splitlines()
        last = " ".join(line.strip() for line in [line for line in tail if line.strip()][-3:])
        return f"the process that talks to {_TITLE} (pid {self._process.pid}) {how_ended(code)}{': ' if last else ''}{last}"


def _numbers(resources: Mapping[str, str | float]) -> dict[str, float]:
    try:
        return {name: float(count) for name, count in resources.items()}
    except ValueError as error:
        raise LaunchError(f"{_TITLE}: resources take numbers, such as --resource accelerator=1: {error}") from None


def _environment() -> dict[str, str]:
    """Return the environment of the driver, in which Ray prints no colours, sends no usage statistics and asks no questions."""
    quiet = {"RAY_COLOR_PREFIX": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_USAGE_STATS_PROMPT_ENABLED": "0"}
    return {**os.environ, "PYTHONUNBUFFERED": "1", **quiet}


def _user_address() -> str:
    """Return the address of the cluster that the user has connected this process to; empty if there is none."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    if ray.util.client.ray.is_connected():  # a Ray client does not know the address of the cluster
        return ""
    address: str = ray.get_runtime_context().gcs_address
    return address


def _own_address() -> str:
    address = _user_address()
    if not address:
        raise LaunchError(
            f"{_TITLE}: this program is not connected to a cluster (a ray:// client does not count); call ray.init() on a node"
        )
    return address


def _whereabouts(actors: Sequence[Any], timeout_s: float) -> list[tuple[str, list[str]]]:
    """Return the node and the GPUs of each actor."""
    import ray

    def where(_: Any) -> tuple[str, list[str]]:
        context = ray.get_runtime_context()
        return context.get_node_id(), [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", ())]

    try:
        found: list[tuple[str, list[str]]] = ray.get(
            [actor.__ray_call__.remote(where) for actor in actors], timeout=timeout_s
        )
    except ray.exceptions.GetTimeoutError:
        raise LaunchError(f"{_TITLE}: an actor did not report its node within {timeout_s:g} s; is it busy?") from None
    return found
