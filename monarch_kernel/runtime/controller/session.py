"""A session: the runtime of this process, its private directory, and the hosts it has launched."""

from __future__ import annotations

import atexit
import os
import resource
import secrets
import shutil
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import Launcher, listens_at
from monarch_kernel.launch.local import LocalLauncher
from monarch_kernel.net.hosts.handshakes import free_descriptors
from monarch_kernel.net.hosts.links import new_keys
from monarch_kernel.net.hosts.zmq import ZmqRouter
from monarch_kernel.net.wire.config import AgentConfig, LinkKeys
from monarch_kernel.runtime.controller.environment import Changes, changes, read_at_start
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.controller.stale_sessions import make_directory, sweep
from monarch_kernel.runtime.host.logs import LogRecord, read_log
from monarch_kernel.runtime.host.network import listening_addresses
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.handles import PROCESS

__all__ = ["LocalAgents", "Origin", "Session", "close_session", "current_session"]


OUTPUT_WAIT_S = 0.5
CLOSE_S = 5.0
LOG_S = 20.0
MAX_LOG_NBYTES = 1 << 20
"""Limit for the log of one rank on another machine: the file there may be more than a network carries at once."""
LEAST_DESCRIPTORS = 32
"""Descriptors that a session with a small mesh takes in this process, with some for short-lived files."""
MAX_LOGS_NBYTES = 64 << 20
"""Limit for all logs that are read together."""


@dataclass(frozen=True)
class Origin:
    """How a host was launched, to launch another in its place."""

    launcher: Launcher
    config: AgentConfig
    timeout_s: float
    lost_after_s: float


class LocalAgents:
    """How agents of this machine prepare.

    Attributes:
        is_light: whether they import no torch before the first rank. An integration sets it, whose ranks import it themselves.
    """

    is_light = False


class Session:
    """Everything that one controller owns; the directory (mode 0700) holds its socket and logs.

    Args:
        directory: An existing empty directory; a new one by default.
        token: The secret that ranks and agents must present; a new one by default.
        epoch: How many controllers the ranks and agents have had.
        keys: Keys of connections to other machines; new ones by default.
    """

    def __init__(
        self, directory: Path | None = None, token: str = "", epoch: int = 0, keys: LinkKeys | None = None
    ) -> None:
        self.pid = os.getpid()
        self._owned = -1  # the lock, held as long as the directory exists
        if directory is None:
            directory, self._owned = _new_directory()
        self.directory = directory
        self._address = f"ipc://{self.directory}/controller"
        self._keys = keys or new_keys()
        self._epoch = epoch
        self.token = token or secrets.token_hex(16)
        try:
            self._transport = ZmqRouter(self._address, self._keys, epoch)
        except BaseException:
            if self._owned >= 0:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(self._owned)
            raise
        self.runtime = Runtime(self._transport, self.token, OUTPUT_WAIT_S, epoch)
        self.runtime.session = self
        self._launcher = LocalLauncher(self.directory)
        self._local_host: int | None = None
        self._origins: dict[int, Origin] = {}
        self._held: set[int] = set()  # hosts that were not given back
        self._launchers: list[Launcher] = []
        self._ports: dict[str, int] = {}  # where other hosts connect to, by the address of the interface
        self._lock = threading.Lock()

    def local_host(self, *, is_idle: bool = False) -> int:
        """Number of this machine's agent; launches one if there is none, or it has ended, or is about to.

        An agent that is launched ``is_idle`` prepares nothing for ranks: it cleans up if this process is killed.
        """
        with self._lock:
            if self._local_host is None or not self.runtime.host_pool.starts_ranks(self._local_host):
                if self._launcher.environment is None:
                    self._launcher.environment = dict(os.environ)
                (self._local_host,) = self.runtime.host_pool.add(
                    self._launcher, lambda host: self._config_here(host, is_idle)
                )
            return self._local_host

    def environment_changes(self) -> Changes:
        """What this process has changed in its environment since the environment of this machine's agent."""
        before = self._launcher.environment
        return Changes({}, (), ()) if before is None else changes(before, os.environ)

    def renew_local_host(self) -> None:
        """Replace this machine's agent by one with the environment of now, if ranks need that and no mesh needs the other.

        Ranks are forked from a process of the agent, and some variables take effect only when a process starts.
        """
        changed = self.environment_changes()
        host = self._local_host
        if host is None or not read_at_start([*changed.values, *changed.removed]):
            return
        with self._lock:
            if host != self._local_host or not self.runtime.host_pool.can_end(host):
                return
            self.runtime.host_pool.end_agent(host)
            self._launcher.environment = None
        self.runtime.host_pool.replace(host, self.local_host())
        self.runtime.run_on_io_thread(lambda: None)  # wait until handles of the host mean the new agent

    def add_hosts(
        self,
        launcher: Launcher,
        count: int,
        *,
        timeout_s: float = 600.0,
        lost_after_s: float = 1.0,
        grace_s: float = 10.0,
        is_light: bool = False,
    ) -> tuple[int, ...]:
        """Launch hosts with an engine, each with an agent; returns their numbers at once.

        Args:
            launcher: The launcher of the engine; it is closed with the session, or when its last host is given back.
            count: How many hosts.
            timeout_s: How long they may take to come up, in seconds.
            lost_after_s: After how many seconds of silence a host is lost.
            grace_s: How long an agent waits for a silent controller, in seconds, before it ends everything. It is longer where
                a host may be silent for longer, so that the agent does not give up before the controller does.
            is_light: Whether ranks there start without torch and IPython.

        Raises:
            LaunchError: The engine can't be reached, or will never have that many hosts.
            MeshDownError: the session was shut down.
        """
        self._look_after()
        at = listens_at(launcher)
        self._listen(at)
        config = self._config_elsewhere(lost_after_s, grace_s, is_light=is_light, at=at)
        if launcher not in self._launchers:
            self._launchers.append(launcher)
        origin = Origin(launcher, config, timeout_s, lost_after_s)
        hosts = self.runtime.host_pool.add(
            launcher, config.numbered, count, timeout_s=timeout_s, lost_after_s=lost_after_s
        )
        self._origins.update(dict.fromkeys(hosts, origin))
        self._held.update(hosts)
        return hosts

    def replace_hosts(self, gone: Collection[int]) -> dict[int, int]:
        """Replace hosts that are gone, by hosts of the same launchers; maps their numbers to those of the new ones.

        Raises:
            LaunchError: An engine can't be reached, or has no more hosts.
            MeshDownError: the session was shut down.
        """
        found: dict[int, int] = {}
        for host in gone:
            with self._lock:
                origin = self._origins.get(host)
                successor = self.runtime.host_pool.now(host)
                if origin is not None and (successor == host or self.runtime.host_pool.is_gone(successor)):
                    try:
                        new = self._another(origin)
                    except LaunchError:  # a list of hosts may have none but the one that is gone
                        self.runtime.host_pool.give_back(successor)
                        new = self._another(origin)
                    self._origins[new] = origin
                    self._held.discard(successor)
                    self._held.add(new)
                    self.runtime.host_pool.replace(successor, new)
                    successor = new
            found[host] = self.local_host() if origin is None else successor
        return found

    def _another(self, origin: Origin) -> int:
        """Launch one more host in the way of an earlier one."""
        (host,) = self.runtime.host_pool.add(
            origin.launcher,
            origin.config.numbered,
            timeout_s=origin.timeout_s,
            lost_after_s=origin.lost_after_s,
        )
        return host

    def release_hosts(self, hosts: Sequence[int], reason: str, grace_s: float = 2.0) -> None:
        """Give hosts back to their engines, with everything that runs there; returns when that is done."""
        ours = [host for host in map(self.runtime.host_pool.now, hosts) if host in self._held]
        self.runtime.host_pool.release(ours, reason, grace_s)
        for host in ours:
            self._held.discard(host)
            launcher = self._origins[host].launcher
            if launcher in self._launchers and all(self._origins[each].launcher is not launcher for each in self._held):
                self._launchers.remove(launcher)
                launcher.close(CLOSE_S)

    def launcher_of(self, host: int) -> Launcher | None:
        """The launcher of a host, even if the host was given back; None for this machine itself."""
        origin = self._origins.get(host)
        return None if origin is None else origin.launcher

    def engine_of(self, host: int) -> str | None:
        """The name of the engine of a host; None for this machine itself."""
        launcher = self.launcher_of(host)
        return None if launcher is None else launcher.name

    def addresses_for(self, host: int) -> tuple[str, ...]:
        """The addresses that the agent of a host elsewhere connects to; empty if the controller connects to the agent."""
        origin = self._origins.get(host)
        return () if origin is None else origin.config.addresses

    def host_of(self, proc: int) -> int:
        """The host of a process; for a process on this machine, the current agent."""
        host = self.runtime.host_pool.host_of(proc)
        return self.runtime.host_pool.now(host) if host in self._origins else self.local_host()

    def _listen(self, at: str, port: int = 0) -> None:
        """Let other hosts connect at the address of an interface.

        Raises:
            OSError: the port is taken.
        """
        self._ports[at] = self.runtime.run_on_io_thread(lambda: self._transport.listen(port, at))

    def _config_elsewhere(
        self, lost_after_s: float, grace_s: float = 10.0, *, is_light: bool = False, at: str
    ) -> AgentConfig:
        """The configuration of agents on other hosts, which connect at the address of an interface."""
        return AgentConfig(
            0,
            self.token,
            listening_addresses(at, self._ports[at]),
            self._keys,
            epoch=self._epoch,
            beat_s=min(0.25, lost_after_s / 4),
            grace_s=max(grace_s, 2 * lost_after_s),
            is_light=is_light,
            listens_at=at,
        )

    def _config_here(self, host: int, is_idle: bool) -> AgentConfig:
        """The configuration of this machine's own agent."""
        return AgentConfig(
            host,
            self.token,
            (self._address,),
            self._keys,
            str(self.directory),
            controller_pid=os.getpid(),
            log=str(self.directory / f"agent-{host}.log"),
            epoch=self._epoch,
            beat_s=1.0,
            is_idle=is_idle,
            is_light=LocalAgents.is_light,
        )

    def _look_after(self) -> None:
        """Launch an agent here that cleans up this machine if this process is killed."""
        self.local_host(is_idle=True)

    def record_of(self, proc: int, *, is_here: bool) -> str:
        """The file in which a rank records what it runs; on another machine, its name there; empty for none."""
        return ""

    def logs(self, procs: Sequence[int]) -> list[list[LogRecord]]:
        """Read the kept output of ranks; reads it from hosts elsewhere by requests, and nothing from hosts that are gone."""
        max_nbytes = min(MAX_LOG_NBYTES, MAX_LOGS_NBYTES // max(1, len(procs)))
        asked = {
            proc: self.runtime.host_pool.read_log(host, proc, max_nbytes)
            for proc in procs
            if (host := self.runtime.host_pool.host_of(proc)) in self._origins
        }
        return [asked[proc].get(LOG_S) if proc in asked else read_log(self.directory, proc) for proc in procs]

    def close(self) -> None:
        """End everything; takes as long as the processes take to end."""
        if os.getpid() == self.pid:  # a fork of the controller owns nothing
            self.runtime.close()
            for launcher in self._launchers:
                launcher.close(CLOSE_S)
            shutil.rmtree(self.directory, ignore_errors=True)
            if self._owned >= 0:
                os.close(self._owned)
                self._owned = -1


def _new_directory() -> tuple[Path, int]:
    """Make a directory for a session, and remove those of sessions whose owner has ended.

    Raises:
        LaunchError: there is no place for it, or this process may open too few files.
    """
    if (free := free_descriptors()) < LEAST_DESCRIPTORS:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise LaunchError(
            f"this process may open {limit:,} files, and only {free} more; ranks need {LEAST_DESCRIPTORS} more: raise the "
            "limit in the shell that starts Jupyter, such as with ulimit -n 4096, and restart the kernel"
        )
    try:
        sweep()
        return make_directory()
    except OSError as error:
        raise LaunchError(str(error)) from None


class _Current:
    """The session of this process. ``this_host()`` takes no handle, so the session is kept here, and only here."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.lock = threading.Lock()


_current = _Current()


def _client_of_program() -> Runtime | None:
    """The client of the current session, for handles that the program unpickles itself."""
    session = _current.session
    return session.runtime if session is not None and session.pid == os.getpid() else None


PROCESS.program = _client_of_program


def current_session() -> Session:
    """The session of this process; made at the first call."""
    with _current.lock:
        if _current.session is None or _current.session.pid != os.getpid():
            _current.session = Session()
            atexit.register(_current.session.close)
        return _current.session


def close_session() -> Future[None]:
    """End the session of this process, if there is one."""
    with _current.lock:
        session, _current.session = _current.session, None
    if session is not None:
        atexit.unregister(session.close)
        session.close()
    return Future.resolved(None)
