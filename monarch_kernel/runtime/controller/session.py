"""A session: the runtime of this process, its private directory, and the hosts it has launched."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import Launcher
from monarch_kernel.launch.local import LocalLauncher
from monarch_kernel.net.hosts.links import new_keys
from monarch_kernel.net.hosts.zmq import ZmqRouter
from monarch_kernel.net.wire.config import AgentConfig, LinkKeys
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.controller.stale_sessions import make_directory, sweep
from monarch_kernel.runtime.host.logs import LogRecord, read_log
from monarch_kernel.runtime.host.network import own_addresses
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["Origin", "Session", "close_session", "current_session"]


OUTPUT_WAIT_S = 0.5
CLOSE_S = 5.0
LOG_S = 20.0
MAX_LOG_NBYTES = 1 << 20
"""Of a rank on another machine: what is kept there may be more than a network carries at once."""
MAX_LOGS_NBYTES = 64 << 20
"""Of all that are asked together."""


@dataclass(frozen=True)
class Origin:
    """Where a host comes from, and another in its place."""

    launcher: Launcher
    config: AgentConfig
    timeout_s: float
    lost_after_s: float


class Session:
    """All that one controller owns; the directory (mode 0700) holds its socket and logs.

    Args:
        directory: an empty one, if not a new one.
        token: what ranks and agents must present, if not a new one.
        epoch: how many controllers they have had.
        keys: of connections to other machines, if not new ones.
    """

    def __init__(
        self, directory: Path | None = None, token: str = "", epoch: int = 0, keys: LinkKeys | None = None
    ) -> None:
        self.pid = os.getpid()
        self._owned = -1  # held as long as the directory is there
        if directory is None:
            sweep()
            directory, self._owned = make_directory()
        self.directory = directory
        self._address = f"ipc://{self.directory}/controller"
        self._keys = keys or new_keys()
        self._epoch = epoch
        self.token = token or secrets.token_hex(16)
        self._transport = ZmqRouter(self._address, self._keys, epoch)
        self.runtime = Runtime(self._transport, self.token, OUTPUT_WAIT_S, epoch)
        self.runtime.session = self
        self._launcher = LocalLauncher(self.directory)
        self._local_host: int | None = None
        self._origins: dict[int, Origin] = {}
        self._held: set[int] = set()  # those that were not given back
        self._launchers: list[Launcher] = []
        self._port = 0  # where hosts elsewhere connect to
        self._lock = threading.Lock()

    def local_host(self, *, is_idle: bool = False) -> int:
        """Number of this machine's agent, which is launched if it is not there, or no more.

        One that is launched ``is_idle`` gets nothing ready for ranks: it looks after what we leave, should we be killed.
        """
        with self._lock:
            if self._local_host is None or self.runtime.fleet.is_gone(self._local_host):
                (self._local_host,) = self.runtime.fleet.add(
                    self._launcher, lambda host: self._config_here(host, is_idle)
                )
            return self._local_host

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
        """Have an engine give hosts, each with an agent; returns at once, their numbers.

        Args:
            launcher: of the engine; closed with the session, or when its last host is given back.
            count: how many hosts.
            timeout_s: how long they have to come up, in seconds.
            lost_after_s: after how many seconds of silence a host is lost.
            grace_s: how long an agent waits for a controller that is silent, in seconds, before it ends all; longer where a
                host may be silent for longer, so that it does not give up before we do.
            is_light: whether ranks there come up without torch and IPython.

        Raises:
            LaunchError: the engine can't be reached, or will never have that many.
            MeshDownError: the session was shut down.
        """
        self._look_after()
        self._port = self.runtime.with_baton(self._transport.listen)
        config = self._config_elsewhere(lost_after_s, grace_s, is_light=is_light)
        if launcher not in self._launchers:
            self._launchers.append(launcher)
        origin = Origin(launcher, config, timeout_s, lost_after_s)
        hosts = self.runtime.fleet.add(launcher, config.numbered, count, timeout_s=timeout_s, lost_after_s=lost_after_s)
        self._origins.update(dict.fromkeys(hosts, origin))
        self._held.update(hosts)
        return hosts

    def replace_hosts(self, gone: Collection[int]) -> dict[int, int]:
        """Have others take the places of hosts that are gone, by those that have given them; gives their numbers by the old.

        Raises:
            LaunchError: an engine can't be reached, or has none.
            MeshDownError: the session was shut down.
        """
        found: dict[int, int] = {}
        for host in gone:
            with self._lock:
                origin = self._origins.get(host)
                successor = self.runtime.fleet.now(host)
                if origin is not None and (successor == host or self.runtime.fleet.is_gone(successor)):
                    try:
                        new = self._another(origin)
                    except LaunchError:  # a list of hosts may have no other than the one that is gone
                        self.runtime.fleet.give_back(successor)
                        new = self._another(origin)
                    self._origins[new] = origin
                    self._held.discard(successor)
                    self._held.add(new)
                    self.runtime.fleet.replace(successor, new)
                    successor = new
            found[host] = self.local_host() if origin is None else successor
        return found

    def _another(self, origin: Origin) -> int:
        """Have an engine give one more host, as it has given others."""
        (host,) = self.runtime.fleet.add(
            origin.launcher,
            origin.config.numbered,
            timeout_s=origin.timeout_s,
            lost_after_s=origin.lost_after_s,
        )
        return host

    def release_hosts(self, hosts: Sequence[int], reason: str, grace_s: float = 2.0) -> None:
        """Give hosts back to their engines, with all that runs there; returns when that is done."""
        ours = [host for host in map(self.runtime.fleet.now, hosts) if host in self._held]
        self.runtime.fleet.release(ours, reason, grace_s)
        for host in ours:
            self._held.discard(host)
            launcher = self._origins[host].launcher
            if launcher in self._launchers and all(self._origins[each].launcher is not launcher for each in self._held):
                self._launchers.remove(launcher)
                launcher.close(CLOSE_S)

    def launcher_of(self, host: int) -> Launcher | None:
        """Who has given a host, or gave one that is given back; None for this machine itself."""
        origin = self._origins.get(host)
        return None if origin is None else origin.launcher

    def addresses_for(self, host: int) -> tuple[str, ...]:
        """Where the agent of a host elsewhere connects to; empty if it is dialled."""
        origin = self._origins.get(host)
        return () if origin is None else origin.config.addresses

    def host_of(self, proc: int) -> int:
        """The host of a process; if that is this machine, its agent that is there now."""
        host = self.runtime.fleet.host_of(proc)
        return self.runtime.fleet.now(host) if host in self._origins else self.local_host()

    def _config_elsewhere(self, lost_after_s: float, grace_s: float = 10.0, *, is_light: bool = False) -> AgentConfig:
        """What all agents on other machines must know."""
        return AgentConfig(
            0,
            self.token,
            tuple(f"tcp://{address}:{self._port}" for address in own_addresses()),
            self._keys,
            life=self._epoch,
            beat_s=min(0.25, lost_after_s / 4),
            grace_s=max(grace_s, 2 * lost_after_s),
            is_light=is_light,
        )

    def _config_here(self, host: int, is_idle: bool) -> AgentConfig:
        """What this machine's own agent must know."""
        return AgentConfig(
            host,
            self.token,
            (self._address,),
            self._keys,
            str(self.directory),
            controller_pid=os.getpid(),
            log=str(self.directory / f"agent-{host}.log"),
            life=self._epoch,
            beat_s=1.0,
            is_idle=is_idle,
        )

    def _look_after(self) -> None:
        """See to it that nothing is left on this machine, should we be killed."""
        self.local_host(is_idle=True)

    def record_of(self, proc: int, *, is_here: bool) -> str:
        """The file in which a rank keeps a record of what it runs, elsewhere its name there; empty for none."""
        return ""

    def logs(self, procs: Sequence[int]) -> list[list[LogRecord]]:
        """What is kept of the output of ranks; hosts elsewhere are asked, and of those that are gone nothing is left."""
        max_nbytes = min(MAX_LOG_NBYTES, MAX_LOGS_NBYTES // max(1, len(procs)))
        asked = {
            proc: self.runtime.fleet.read_log(host, proc, max_nbytes)
            for proc in procs
            if (host := self.runtime.fleet.host_of(proc)) in self._origins
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


class _Current:
    """The session of this process: what ``this_host()`` means needs no handle, so it is kept here, and only here."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.lock = threading.Lock()


_current = _Current()


def current_session() -> Session:
    """The session of this process; made when it is first asked for."""
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
