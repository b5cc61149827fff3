"""Attachment to host agents and ranks that another controller has started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from monarch_kernel.launch.base import HostHandle
from monarch_kernel.net.transport.base import HostTransport, host_peer
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.net.wire.messages import Attach, RankSpec
from monarch_kernel.runtime.controller.adoption import Resumed
from monarch_kernel.runtime.controller.host_pool import HostPool, Loop
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["Attachment"]


class Attachment:
    """Attaches a session to the meshes of an earlier controller; for any thread.

    Args:
        loop: Performs effects.
        wait: Waits until a waiter is ready, for some seconds.
        state: The controller's state.
        transport: The controller's end.
        host_pool: The hosts of the session.
        token: What ranks and agents have.
        epoch: How many controllers the ranks had before this one.

    Attributes:
        resumed: Cells of an earlier controller, each with the future of its answers.
        silent: Ranks that had not answered when `attach` returned.
    """

    def __init__(
        self,
        loop: Loop,
        wait: Callable[[Waiter, float | None], bool],
        state: State,
        transport: HostTransport,
        host_pool: HostPool,
        token: str,
        epoch: int,
    ) -> None:
        self.resumed: list[tuple[Resumed, Future[Sequence[Answer]]]] = []
        self.silent: tuple[int, ...] = ()
        self._loop = loop
        self._wait = wait
        self._state = state
        self._transport = transport
        self._host_pool = host_pool
        self._token = token
        self._epoch = epoch
        self._is_over = Waiter()

    def attach(
        self,
        hosts: Mapping[int, Sequence[RankSpec]],
        handles: Mapping[int, HostHandle],
        timeout_s: float,
        *,
        lost_after_s: float | None = None,
        known: int = 0,
    ) -> bool:
        """Attach to host agents and their ranks; return False if no agent answers.

        Args:
            hosts: The ranks of each host.
            handles: Handles of the hosts that are on this machine.
            timeout_s: How long they may take to answer, in seconds.
            lost_after_s: After how many seconds of silence a host on another machine is lost.
            known: Hosts with smaller numbers belong to the session. Any other of these that sends something has to end.
        """
        self._host_pool.take_up(handles, max(known, *hosts) + 1)
        for extension in self._state.extensions.values():
            extension.adopting()
        message = Attach(self._token, os.getpid(), self._epoch)

        def expect() -> None:
            for host in hosts:
                self._transport.route(host_peer(host), host)
            for host in set(range(1, known)) - set(hosts):
                self._transport.give_up(host)

        self._loop.run_on_io_thread(expect)
        self._loop.enter(partial(self._state.attach, hosts, message, lost_after_s=lost_after_s))
        self._wait(self._is_over, timeout_s)
        records = [self._state.hosts.get(host) for host in hosts]
        return any(record is not None and record.up for record in records)

    def finish(self, silent: tuple[int, ...]) -> None:
        """All have answered except these ranks, or the time is up; on the I/O thread."""
        self.silent = silent
        self._is_over.set()
