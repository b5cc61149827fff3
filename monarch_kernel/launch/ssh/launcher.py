"""The SSH launcher: it starts host agents over SSH, and tunnels their connections through SSH where necessary.

Theory of operation
===================

All work runs in asyncio on one thread, ``monarch-ssh``; the methods of the launcher submit work to it, or read its results.
Each host has one task (`SshHost._run`), from the first connection to the end of its agent.

**Connecting.** Controller and agent connect in one of these ways, in order of preference:

1. The agent dials the addresses of the controller.
2. The agent dials a port of its host, which sshd forwards to the controller (a reverse tunnel, ``ssh -R``). This is the
   last of the addresses in the agent's config, so that the agent itself finds out whether it can dial the controller directly.
3. If sshd refuses such a port, and the host can't reach the controller's addresses, the agent listens, and the controller dials
   a port of this machine, which SSH forwards to the agent (``ssh -L``).

**The agent** leads its own session, writes to a file in a private directory, and reads its config from standard input. A shell
remains as its parent: it copies the file to the launcher, reports how the agent ended, and removes the directory. So neither of
them depends on the connection. When the connection breaks, the launcher reconnects with the same ports, and ZeroMQ redials
automatically. An agent that stays disconnected ends after its grace period.

Script and config are sent over standard input: so the user's login shell does not matter, and other users of the host can't
read them.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Sequence
from typing import Literal

from monarch_kernel.base.text import plural
from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import agent_command
from monarch_kernel.launch.ssh.host import SshHost
from monarch_kernel.launch.ssh.hostlist import SshTarget, read_hosts
from monarch_kernel.launch.ssh.login import Login
from monarch_kernel.launch.ssh.loop_thread import LoopThread
from monarch_kernel.net.wire.config import AgentConfig

__all__ = ["SshLauncher"]


class SshLauncher:
    """Starts agents on as many machines of a list as are requested; the others are spares.

    The launcher uses ``~/.ssh/config``, ``known_hosts`` and the user's SSH agent. It refuses hosts with an unknown host key.

    Args:
        hosts: names, ``"a,b,c"``, or the path of a host file (`read_hosts`).
        python: interpreter on the hosts, which must have this package; by default the path of this one. ``~/`` is the home
            directory on the host.
        user: user on hosts that name none; by default the configured one.
        port: port of hosts that name none; by default the configured one.
        identity: file with the user's private key; by default the configured one.
        config: configuration file instead of ``~/.ssh/config``.
        forward_agent: whether programs on the hosts may use the user's SSH agent; by default as configured
            (``ForwardAgent``).
        tunnel: ``auto``: agents dial the controller directly if they can, else through the SSH connection; ``always``:
            always through the SSH connection; ``never``: always directly.
        connect_timeout_s: how long a login may take, in seconds.
        occupied: hosts of the list where an earlier launcher has agents of the same mesh, and which must not be used.
        last_resort: hosts where an earlier launcher lost agents, and which are used last.

    Raises:
        LaunchError: the list of hosts can't be read.
    """

    name = "ssh"

    def __init__(
        self,
        hosts: Sequence[str] | str | os.PathLike[str],
        *,
        python: str = "",
        user: str = "",
        port: int = 0,
        identity: str | os.PathLike[str] = "",
        config: str | os.PathLike[str] = "",
        forward_agent: bool | None = None,
        tunnel: Literal["auto", "always", "never"] = "auto",
        connect_timeout_s: float = 10.0,
        occupied: Sequence[str] = (),
        last_resort: Sequence[str] = (),
    ) -> None:
        if tunnel not in ("auto", "always", "never"):
            raise ValueError(f"tunnel={tunnel!r} is not one of 'auto', 'always', 'never'")
        self.login = Login(user, port, identity, config, forward_agent, connect_timeout_s)
        self.command = agent_command(python)
        self.tunnel: str = tunnel
        self._places = read_hosts(hosts)
        free = [place for place in self._places if str(place) not in occupied]
        self._free = sorted(free, key=lambda place: str(place) in last_resort)  # in the order of use
        self._hosts: list[SshHost] = []
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None

    def launch(self, configs: Sequence[AgentConfig]) -> list[SshHost]:
        """Start agents on hosts of the list: first on unused ones, then on those that were given back or failed.

        Raises:
            LaunchError: the list does not have that many free hosts.
        """
        with self._lock:
            for host in self._hosts[:]:
                if host.poll() is not None:
                    self._set_free(host)
            if len(configs) > len(self._free):
                n, n_used = len(self._places), len(self._places) - len(self._free)
                used = f", of which {n_used} {'is' if n_used == 1 else 'are'} in use" if n_used else ""
                raise LaunchError(
                    f"asked for {plural(len(configs), 'host')} by SSH; the list has {n}{used}: add hosts to it, or request "
                    "fewer"
                )
            if self._loop is None:
                self._loop = LoopThread()
            new = [SshHost(self, self._loop, self._free.pop(0), config) for config in configs]
            self._hosts += new
        for host in new:
            host.begin()
        return new

    def progress(self) -> str:
        """Return what the launcher is doing, and with which hosts."""
        waiting = [(doing, str(host.place)) for host in self._hosts if (doing := host.doing)]
        if not waiting:
            return ""
        first = waiting[0][0]
        same = [place for doing, place in waiting if doing == first]
        more = f" and {len(same) - 3} more" if len(same) > 3 else ""
        return f"SSH: {first} {', '.join(same[:3])}{more}"

    def close(self, timeout_s: float) -> None:
        """End all agents in parallel, then the connections, then the thread."""
        with self._lock:
            hosts, loop, self._loop = list(self._hosts), self._loop, None
        if loop is not None:
            concurrent.futures.wait([host.begin_to_close(timeout_s) for host in hosts])
            loop.stop()

    def swap(self, host: SshHost, tried: Sequence[SshTarget]) -> SshTarget | None:
        """Replace the unreachable place of a host by a free one that it has not tried; None if there is none."""
        with self._lock:
            spare = next((place for place in self._free if place not in tried), None)
            if spare is not None:
                self._free.remove(spare)
                self._free.append(host.place)
                host.place = spare
            return spare

    def release(self, host: SshHost) -> None:
        """Free the place of a host."""
        with self._lock:
            if host in self._hosts:
                self._set_free(host)

    def _set_free(self, host: SshHost) -> None:
        self._hosts.remove(host)
        self._free.append(host.place)
