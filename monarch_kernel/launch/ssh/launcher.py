"""Machines that one can log in to: the host agent is started over SSH, and dials back, through that connection if need be.

Theory of operation
===================

All is done by asyncio on one thread, ``monarch-ssh``; the methods of the Protocol hand over to it, or read what it has left. A
host has one task (`SshHost._run`), from the first connection to the end of its agent.

**Ways.** How controller and agent come together, the best first:

1. the agent dials the addresses of the controller;
2. the agent dials a port of its own machine, which sshd passes on to the controller (a reverse tunnel, ``ssh -R``). It is the
   last of the addresses in the agent's config, so that the agent itself finds out whether the first way is open;
3. where sshd refuses such a port, and the controller's addresses can't be reached from there: the agent listens, and the
   controller dials a port of this machine, which SSH passes on to the agent (``ssh -L``).

**The agent** leads a session of its own, writes to a file in a private directory, and reads its config from standard input. A
shell stays behind as its parent: it copies the file to us, tells how the agent has ended, and removes the directory. So neither
of them depends on the connection. When that breaks it is made again, with the same ports; ZeroMQ dials again by itself. An
agent that stays cut off is ended by its own grace period.

Script and config come over standard input: so it does not matter which shell the user has there, and nobody else on that
machine can read them.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Sequence
from typing import Literal

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import agent_command
from monarch_kernel.launch.ssh.host import SshHost
from monarch_kernel.launch.ssh.hostlist import Place, read_hosts
from monarch_kernel.launch.ssh.login import Login
from monarch_kernel.launch.ssh.loop import LoopThread
from monarch_kernel.launch.text import plural
from monarch_kernel.net.wire.config import AgentConfig

__all__ = ["SshLauncher"]


class SshLauncher:
    """Starts agents on machines of a list, as many as are asked for; the others are spares.

    ``~/.ssh/config``, ``known_hosts`` and the user's SSH agent are heeded. A host whose key is not known is refused.

    Args:
        hosts: names, ``"a,b,c"``, or the path of a host file (`read_hosts`).
        python: interpreter there, which has this package; left out, the path of the one here. ``~/`` is the home there.
        user: on hosts that name none; left out, as configured.
        port: of hosts that name none; left out, as configured.
        identity: file with the user's private key; left out, as configured.
        config: file that is read in place of ``~/.ssh/config``.
        forward_agent: whether programs there may use the user's SSH agent; left out, as configured (``ForwardAgent``).
        tunnel: ``auto``: agents dial the controller directly where they can, else through the SSH connection; ``always``:
            through the connection; ``never``: directly.
        connect_timeout_s: how long it may take to log in.
        occupied: hosts of the list where an earlier launcher has agents of the same mesh; no other comes there.
        doubted: hosts where it had agents that are gone; they are taken last.

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
        doubted: Sequence[str] = (),
    ) -> None:
        if tunnel not in ("auto", "always", "never"):
            raise ValueError(f"tunnel={tunnel!r} is none of 'auto', 'always', 'never'")
        self.login = Login(user, port, identity, config, forward_agent, connect_timeout_s)
        self.command = agent_command(python)
        self.tunnel: str = tunnel
        self._places = read_hosts(hosts)
        free = [place for place in self._places if str(place) not in occupied]
        self._free = sorted(free, key=lambda place: str(place) in doubted)  # in the order in which they will be taken
        self._hosts: list[SshHost] = []
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None

    def launch(self, configs: Sequence[AgentConfig]) -> list[SshHost]:
        """Take hosts of the list: first those that were never used, then those that were given back or have failed.

        Raises:
            LaunchError: there are not as many.
        """
        with self._lock:
            for host in self._hosts[:]:
                if host.poll() is not None:
                    self._set_free(host)
            if len(configs) > len(self._free):
                n, n_used = len(self._places), len(self._places) - len(self._free)
                used = f", of which {n_used} {'is' if n_used == 1 else 'are'} in use" if n_used else ""
                raise LaunchError(
                    f"asked for {plural(len(configs), 'host')} by SSH; the list has {n}{used}: add hosts to it, or ask for "
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
        """Which hosts are being connected to, and what was in the way."""
        waiting = [(doing, str(host.place)) for host in self._hosts if (doing := host.doing)]
        if not waiting:
            return ""
        first = waiting[0][0]
        same = [place for doing, place in waiting if doing == first]
        more = f" and {len(same) - 3} more" if len(same) > 3 else ""
        return f"SSH: {first} {', '.join(same[:3])}{more}"

    def close(self, timeout_s: float) -> None:
        """End all agents at the same time, then the connections, then the thread."""
        with self._lock:
            hosts, loop, self._loop = list(self._hosts), self._loop, None
        if loop is not None:
            concurrent.futures.wait([host.begin_to_close(timeout_s) for host in hosts])
            loop.stop()

    def swap(self, host: SshHost, tried: Sequence[Place]) -> Place | None:
        """Give a host whose place can't be reached another one, if one is free that it has not tried."""
        with self._lock:
            spare = next((place for place in self._free if place not in tried), None)
            if spare is not None:
                self._free.remove(spare)
                self._free.append(host.place)
                host.place = spare
            return spare

    def release(self, host: SshHost) -> None:
        """Let others have the place of a host."""
        with self._lock:
            if host in self._hosts:
                self._set_free(host)

    def _set_free(self, host: SshHost) -> None:
        self._hosts.remove(host)
        self._free.append(host.place)
