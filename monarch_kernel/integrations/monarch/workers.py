"""Hosts that the user brings: a worker process on each waits until a program attaches to it.

A worker starts a host agent for each program that attaches, with the configuration that the program sends. That configuration
has the secrets of the session, and a worker runs any code. So workers listen only where other machines can't connect: at a Unix
socket, or at the loopback interface. Other users of the machine may be able to, so worker and program each look which user is
at the other end before they read or send anything. For other machines there are the launchers, such as `SshLauncher`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from monarch_kernel.actor import Future, HostMesh, allocate
from monarch_kernel.base.peer_users import is_trusted, user_of_peer
from monarch_kernel.base.text import plural, were
from monarch_kernel.integrations.monarch.awaited import future_of
from monarch_kernel.integrations.monarch.config import seconds_of
from monarch_kernel.launch.base import agent_command
from monarch_kernel.net.wire.config import LOOPBACK, AgentConfig
from monarch_kernel.runtime.host.processes import die_with_parent

__all__ = [
    "WorkerLauncher",
    "attach_to_workers",
    "place_of",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "start_worker_loop_forever",
]

_TRUST = "trust_all_connections"
_LEAST_RETRY_S, _MOST_RETRY_S = 0.02, 0.5
_AT = re.compile(r"@(?=[a-z-]+://)")
_LOOK_S = 0.2
"""How often the worker looks for agents that have ended, in seconds."""

_READ_S = 5.0
"""How long a program may take to send its configuration, in seconds."""

_MOST_NBYTES = 64 << 20
"""The largest configuration: it has the environment of the program."""

_START_S = 600.0
"""How long the agent of a worker may take to come up, in seconds."""

_END_S = 12.0
"""How long an agent may take to end after its program has, in seconds; it waits ten seconds for a silent one."""


def run_worker_loop_forever(address: str = "", ca: str = _TRUST, **unused: Any) -> NoReturn:
    """Wait at an address for programs that attach, and start a host agent for each.

    It runs until the process is ended. If the program that started this process has attached, and ends, then it returns: such a
    worker is of no use to others, which do not know it.

    Args:
        address: ``ipc:///path`` for a Unix socket, or ``tcp://127.0.0.1:port``.
        ca: ``trust_all_connections``, because the connection itself has no certificates.
        unused: further options of Monarch, which have no effect.

    Raises:
        SystemExit: the program that started this process has ended.
        ValueError: the address is of another kind, or reaches other machines; the text says what to use.
    """
    _check_ca(ca)
    _Loop(address).run()
    raise SystemExit(0)


def run_worker_loop_until_shutdown(address: str = "", ca: str = _TRUST, **unused: Any) -> None:
    """Wait as `run_worker_loop_forever`, until a program has given the host back, or has ended."""
    _check_ca(ca)
    _Loop(address, is_for_one=True).run()


def start_worker_loop_forever(address: str = "", ca: str = _TRUST, **unused: Any) -> Future[None]:
    """Wait as `run_worker_loop_forever` on a thread; the future ends with it.

    The worker listens when this returns.
    """
    _check_ca(ca)
    loop = _Loop(address)
    return future_of(_on_thread(loop.run))


async def _on_thread(work: Callable[[], None]) -> None:
    """Run a function on a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, None)

    threading.Thread(target=run, name="monarch-worker-loop", daemon=True).start()
    await done


def _listen(address: str) -> socket.socket:
    family, place = place_of(address)
    if family == socket.AF_UNIX and isinstance(place, str) and not place.startswith("\0"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)
    listener = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    mask = os.umask(0o077)
    try:
        listener.bind(place)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener


class _Agent:
    """A host agent that a program uses.

    Attributes:
        process: the agent.
        program: the process of the program.
        deadline: when the agent must have ended; 0 while the program uses it.

    Raises:
        OSError: the program is of another user, or silent.
        ValueError: it sends something else.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.program, config = _receive(connection)
        self.deadline = 0.0
        self.process = subprocess.Popen(
            agent_command(),
            stdin=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
        assert self.process.stdin is not None
        with self.process.stdin as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(config)
        connection.settimeout(None)


class _Loop:
    """Starts an agent for each connection; the end of the connection ends the agent.

    Args:
        address: where programs connect.
        is_for_one: whether the first program that gives its host back ends the loop.
    """

    def __init__(self, address: str, *, is_for_one: bool = False) -> None:
        self._address = address
        self._listener = listener = _listen(address)
        self._is_for_one = is_for_one
        self._parent = os.getppid()
        self._watch = -1
        self._agents: dict[socket.socket, _Agent] = {}
        self._is_over = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until there is no more use for it."""
        try:
            self._serve()
        finally:
            self._selector.close()
            self._listener.close()
            if self._watch >= 0:
                os.close(self._watch)

    def _serve(self) -> None:
        while not self._is_over or self._agents:
            for key, _ in self._selector.select(_LOOK_S if self._agents else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._watch:
                    self._end_with_parent()
                else:
                    self._release(key.fileobj)
            for connection, agent in list(self._agents.items()):
                self._look_at(connection, agent)

    def _end_with_parent(self) -> None:
        """End the agents of the program that has ended, which would otherwise wait for a while until it speaks."""
        self._is_over = True
        self._selector.unregister(self._watch)
        for agent in self._agents.values():
            if agent.program == self._parent:
                agent.process.terminate()

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()[0]
        except OSError:  # no descriptor is left, and the selector would report the same at once
            time.sleep(_LEAST_RETRY_S)
            return
        try:
            self._agents[connection] = _Agent(connection)
        except (OSError, ValueError) as error:
            print(f"worker {self._address} refused a program: {error}", file=sys.stderr, flush=True)
            connection.close()
        else:
            self._selector.register(connection, selectors.EVENT_READ)
            if self._agents[connection].program == self._parent and self._watch < 0:
                self._watch_parent()

    def _watch_parent(self) -> None:
        try:
            self._watch = os.pidfd_open(self._parent)
        except ProcessLookupError:
            self._is_over = True
        except OSError:  # the system has no such descriptors
            return
        else:
            self._selector.register(self._watch, selectors.EVENT_READ)

    def _release(self, connection: Any) -> None:
        """Let the agent end, because the program has given the host back, or has ended."""
        self._selector.unregister(connection)
        agent = self._agents[connection]
        agent.deadline = time.monotonic() + _END_S
        self._is_over = self._is_over or self._is_for_one

    def _look_at(self, connection: socket.socket, agent: _Agent) -> None:
        if agent.process.poll() is not None:
            with contextlib.suppress(OSError):
                connection.sendall(str(agent.process.returncode).encode())
            if not agent.deadline:
                self._selector.unregister(connection)
            connection.close()
            del self._agents[connection]
        elif agent.deadline and time.monotonic() > agent.deadline:
            agent.process.terminate()


def _receive(connection: socket.socket) -> tuple[int, bytes]:
    """Return the process of a program of this user, and the configuration that it sends."""
    uid = user_of_peer(connection)
    if uid is None:
        raise ConnectionError("it has ended")
    if not is_trusted(uid):
        raise PermissionError(f"it belongs to another user (uid {uid})")
    deadline = time.monotonic() + _READ_S
    program = int.from_bytes(_read(connection, 4, deadline), "big")
    nbytes = int.from_bytes(_read(connection, 4, deadline), "big")
    if nbytes > _MOST_NBYTES:
        raise ValueError(f"a configuration of {nbytes:,} bytes is too long")
    config = _read(connection, nbytes, deadline)
    try:
        AgentConfig.decode(config)
    except ValueError:
        raise ValueError("it sent no configuration of a host agent") from None
    return program, config


def _read(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(min(nbytes - len(data), 1 << 20))
        if not part:
            raise ValueError("the program has closed the connection")
        data += part
    return bytes(data)


def _check_ca(ca: str) -> None:
    if ca != _TRUST:
        raise ValueError(
            f"ca must be {_TRUST!r}, not {ca!r}: workers are reached only within a machine; for other machines call "
            "monarch_kernel.actor.allocate() with a launcher, such as SshLauncher, whose connections are encrypted"
        )


def place_of(address: str) -> tuple[socket.AddressFamily, Any]:
    """Return the family and the place of an address.

    Raises:
        ValueError: it is of another kind, or reaches other machines.
    """
    # A worker may be named, as in name@tcp://host:port, and may listen elsewhere, as in tcp://host:port@tcp://0.0.0.0:port.
    parts = _AT.split(address)
    kind, _, rest = next((part for part in parts if "://" in part), address).partition("://")
    if kind == "ipc" and rest.startswith("/"):
        return socket.AF_UNIX, rest
    if kind == "ipc" and rest.startswith("@"):
        return socket.AF_UNIX, f"\0{rest[1:]}"
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and port.isdecimal() and host in ("127.0.0.1", "localhost"):
        return socket.AF_INET, ("127.0.0.1", int(port))
    raise ValueError(
        f"a worker's address is ipc:///path or tcp://127.0.0.1:port, not {address!r}; for other machines call "
        "monarch_kernel.actor.allocate() with a launcher, such as SshLauncher"
    )


def attach_to_workers(
    ca: str = _TRUST,
    workers: Sequence[Any] = (),
    name: str | None = None,
    timeout_s: float | None = None,
    **unused: Any,
) -> HostMesh:
    """Return workers as a mesh of hosts along the axis ``hosts``. Returns at once; workers may still start.

    If a worker does not listen in time, then `HostMesh.initialized` and all that needs it raise an error that names the worker.

    Args:
        ca: as for `run_worker_loop_forever`.
        workers: the addresses of the workers, or futures of them.
        name: the name of the mesh; it has no effect.
        timeout_s: how long workers may take to listen, in seconds. By default the option ``mesh_attach_config_timeout`` of
            `configure`, which is a minute.
        unused: further options of Monarch, which have no effect.

    Raises:
        ValueError: an address is not valid, or there are none; ``timeout_s`` is not more than 0.
    """
    _check_ca(ca)
    addresses = [each if isinstance(each, str) else each.get() for each in workers]
    for address in addresses:
        place_of(address)
    if not addresses:
        raise ValueError("attach_to_workers() needs the addresses of workers")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be more than 0, not {timeout_s}")
    reach_s = seconds_of("mesh_attach_config_timeout") if timeout_s is None else timeout_s
    return allocate(WorkerLauncher(addresses, reach_s), len(addresses), timeout_s=reach_s + _START_S)


class WorkerLauncher:
    """Starts agents through workers that wait at these addresses, one for each.

    Args:
        addresses: the addresses.
        reach_s: how long a worker may take to listen, in seconds.
    """

    name = "workers"
    listens_at = LOOPBACK

    def __init__(self, addresses: Sequence[str], reach_s: float) -> None:
        self._reach_s = reach_s
        self._addresses = list(addresses)
        self._hosts: list[WorkerHost] = []

    def launch(self, configs: Sequence[AgentConfig]) -> list[WorkerHost]:
        """Send a configuration to a worker that is not in use."""
        used = {host.worker for host in self._hosts if host.poll() is None}
        free = [address for address in self._addresses if address not in used]
        hosts = [WorkerHost(address, config, self._reach_s) for address, config in zip(free, configs)]
        if len(hosts) < len(configs):
            from monarch_kernel.errors import LaunchError

            for host in hosts:
                host.close(0.0)
            raise LaunchError(
                f"{plural(len(configs), 'worker')} {were(len(configs))} asked for, but only {len(free)} "
                f"{'is' if len(free) == 1 else 'are'} free"
            )
        self._hosts += hosts
        return hosts

    def progress(self) -> str:
        """Return how many workers can't be reached yet."""
        waiting = [host.worker for host in self._hosts if host.is_waiting]
        return f"workers: {', '.join(waiting)} can't be reached yet" if waiting else ""

    def close(self, timeout_s: float) -> None:
        """Give all workers back."""
        for host in self._hosts:
            host.close(timeout_s)
        self._hosts.clear()


class WorkerHost:
    """An agent that a worker has started, or will.

    Attributes:
        worker: the address of the worker.
        is_waiting: whether the worker can't be reached yet.
    """

    address = ""
    node = ""

    def __init__(self, worker: str, config: AgentConfig, reach_s: float) -> None:
        self.worker = worker
        self._reach_s = reach_s
        self.is_waiting = True
        self._socket: socket.socket | None = None
        self._ended = ""
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._connect, args=(config.encode(),), name="monarch-worker", daemon=True
        )
        self._thread.start()

    def _connect(self, config: bytes) -> None:
        family, place = place_of(self.worker)
        pause_s, deadline = _LEAST_RETRY_S, time.monotonic() + self._reach_s
        while not self._closed.is_set():
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection.connect(place)
                uid = self._user_of(connection)
                if uid is not None and not is_trusted(uid):
                    connection.close()
                    with self._lock:
                        self._ended = (
                            f"worker {self.worker}: it belongs to another user (uid {uid}), and was sent nothing"
                        )
                        self.is_waiting = False
                    return
                if uid is None:
                    raise ConnectionError("the worker has ended")
                connection.sendall(os.getpid().to_bytes(4, "big") + len(config).to_bytes(4, "big") + config)
            except OSError as error:  # the worker is not up yet
                connection.close()
                if time.monotonic() >= deadline:
                    with self._lock:
                        self._ended = (
                            f"worker {self.worker}: it could not be reached within {self._reach_s:g} s ({error}); start it, or "
                            "wait for longer with attach_to_workers(timeout_s=)"
                        )
                        self.is_waiting = False
                    return
                self._closed.wait(min(pause_s, max(0.0, deadline - time.monotonic())))
                pause_s = min(_MOST_RETRY_S, 2 * pause_s)
                continue
            with self._lock:
                self._socket, self.is_waiting = connection, False
            if self._closed.is_set():
                self._release()
            return

    def _user_of(self, connection: socket.socket) -> int | None:
        """Return the user of the worker; None if it has closed the connection without accepting it."""
        while (uid := user_of_peer(connection)) is None and not self._closed.is_set():
            connection.settimeout(_LEAST_RETRY_S)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1, socket.MSG_PEEK):
                    return None
        connection.settimeout(None)
        return uid

    def poll(self) -> str | None:
        """Return None while the agent runs or the worker may come up, else how it ended."""
        with self._lock:
            if self._ended or self._socket is None:
                return self._ended or None
            try:
                said = self._socket.recv(64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                said = b""
            code = said.decode(errors="replace")
            how = f"its agent ended with exit code {code}" if code else "the worker ended"
            self._ended = f"worker {self.worker}: {how}"
            return self._ended

    def log_tail(self) -> tuple[str, ...]:
        """Return nothing: the agent writes to the output of the worker."""
        return ()

    def close(self, timeout_s: float) -> None:
        """Give the worker back; it ends the agent if the agent does not end by itself."""
        self._closed.set()
        self._thread.join(timeout_s)
        self._release()

    def _release(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
                self._ended = self._ended or f"worker {self.worker} was given back"
