"""The hosts of a session: they come from launchers, and are replaced, asked and given back.

To heal a mesh whose host is lost, `Session.replace_hosts` asks the launcher that provided the host for another one. The
ranks get their places back there.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from monarch_kernel.base.events import HostView
from monarch_kernel.errors import Failure, MeshDownError
from monarch_kernel.launch.base import HostHandle, Launcher
from monarch_kernel.net.transport.base import HostTransport, host_peer
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.config import AgentConfig
from monarch_kernel.net.wire.messages import ReadLog
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.host_compatibility import Comparison, compare
from monarch_kernel.runtime.controller.process_records import RankRecord
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.runtime.controller.view_data import NEVER_CONNECTED, host_views
from monarch_kernel.runtime.host.logs import LogRecord, log_records
from monarch_kernel.runtime.host.software import software_here
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["HostPool", "Item", "Loop"]

T = TypeVar("T")

Item = Callable[[float], "list[Effect]"]


class Loop(Protocol):
    """The loop that performs the effects of the state."""

    @property
    def closed(self) -> bool:
        """Whether the session is over."""
        ...

    def enter(self, item: Item) -> None:
        """Run an item on the I/O thread, unless the session is over; the item gets the time."""
        ...

    def perform(self, effects: list[Effect]) -> None:
        """Perform effects; on the I/O thread."""
        ...

    def promise(
        self, begin: Callable[[int, float], list[Effect]], finish: Callable[[Sequence[Answer]], T]
    ) -> Future[T]:
        """Make a future; ``begin`` starts its request, with the request's number and the time.

        Raises:
            MeshDownError: The session was shut down.
        """
        ...

    def run_on_io_thread(self, do: Callable[[], T]) -> T:
        """Run a function on the I/O thread, and return its result.

        Raises:
            MeshDownError: The session was shut down.
        """
        ...


class HostPool:
    """The hosts of a session, with the handles of their engines.

    Args:
        loop: Performs effects.
        state: The state of the controller.
        transport: The controller's end.
    """

    def __init__(self, loop: Loop, state: State, transport: HostTransport) -> None:
        self._loop = loop
        self._state = state
        self._transport = transport
        self._ids = itertools.count(1)
        self._handles: dict[int, HostHandle] = {}
        self._dialled: set[int] = set()
        self._closing: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._new_views = itertools.count(1)

    # -- for any thread

    def add(
        self,
        launcher: Launcher,
        configs: Callable[[int], AgentConfig],
        count: int = 1,
        *,
        timeout_s: float | None = None,
        lost_after_s: float | None = None,
    ) -> tuple[int, ...]:
        """Launch host agents; returns their numbers at once.

        Args:
            launcher: Obtains the hosts.
            configs: Returns the configuration of an agent, by its number.
            count: How many.
            timeout_s: How long an agent may take to come up, in seconds; by default as long as one on this machine.
            lost_after_s: For hosts on other machines, after how many seconds of silence a host is lost.

        Raises:
            MeshDownError: The session was shut down.
            LaunchError: The launcher failed.
        """
        if self._loop.closed:
            raise MeshDownError("the session was shut down; start again with this_host() or %mesh up")
        if lost_after_s is not None and self._state.software is None:
            self._state.software = software_here()
        hosts = tuple(next(self._ids) for _ in range(count))
        for host in hosts:
            self._loop.enter(partial(self._expect, host, timeout_s, lost_after_s))
        try:
            handles = launcher.launch([configs(host) for host in hosts])
        except BaseException:
            for host in hosts:
                self._loop.enter(partial(self._state.processes.release_host, host, "it could not be launched", 0.0))
            raise
        self._handles.update(zip(hosts, handles, strict=True))
        if self._loop.closed:
            for handle in handles:
                handle.close(0.1)  # the session was closed meanwhile, perhaps without this handle
        return hosts

    def _expect(self, host: int, timeout_s: float | None, lost_after_s: float | None, now: float) -> list[Effect]:
        self._transport.route(host_peer(host), host)
        self._state.hosts.add(host, now, timeout_s=timeout_s, lost_after_s=lost_after_s)
        return []

    def release(self, hosts: Sequence[int], reason: str, grace_s: float = 2.0, timeout_s: float = 5.0) -> None:
        """End host agents and everything that runs there, and give the hosts back; returns when that is done."""
        for host in hosts:
            self._loop.enter(partial(self._state.processes.release_host, host, reason, grace_s))
        with suppress(MeshDownError):  # then all hosts have been given back
            self._loop.run_on_io_thread(lambda: None)  # wait until the items above are done
        for host in hosts:
            self._start_closing(host, timeout_s + grace_s)
        self.settle()

    def replace(self, host: int, successor: int) -> None:
        """Record that a host replaces one that is gone, and give that one back, which may take longer than this call."""

        def succeed(now: float) -> list[Effect]:
            self._state.hosts[host].successor = successor
            return []

        self._loop.enter(succeed)
        self._start_closing(host, 0.0)

    def give_back(self, host: int) -> None:
        """Give a host that is gone back to its engine, if that was not done, and end what hangs there."""
        self._start_closing(host, 0.0)
        self.settle()

    def _start_closing(self, host: int, timeout_s: float) -> None:
        """Give a host back, on a separate thread: engines may take long, and an interrupt ends only the wait for it."""
        if (handle := self._handles.pop(host, None)) is None:
            return
        record = self._state.hosts.get(host)  # None: just launched
        is_connected = bool(
            record and record.up and (record.end is None or record.end.kind == "stopped")
        )  # that it must end

        def close() -> None:
            handle.close(timeout_s if is_connected else 0.0)
            self._loop.enter(partial(self._state.processes.given_back, host))

        thread = threading.Thread(target=close, name=f"monarch-close-{host}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the program ends, and can't start threads
            close()
            return
        with self._lock:
            self._closing = [each for each in self._closing if each.is_alive()] + [thread]

    def settle(self) -> None:
        """Wait until all hosts that are being given back are."""
        with self._lock:
            closing = self._closing
        for thread in closing:
            thread.join()

    def now(self, host: int) -> int:
        """The number of the current agent, which may have replaced this one."""
        return self._state.hosts.latest(host)

    def is_gone(self, host: int) -> bool:
        """Whether a host agent has ended."""
        record = self._state.hosts.get(host)
        return record is not None and record.gone

    def starts_ranks(self, host: int) -> bool:
        """Whether a host agent can start ranks, now or when it is up: it has not ended, and nothing has asked it to end."""
        record = self._state.hosts.get(host)
        return record is None or not (record.gone or record.is_ending)

    def gone(self, procs: Sequence[int]) -> tuple[int, ...]:
        """The host agents of these processes that have ended."""
        records = [self._state.ranks.get(proc) for proc in procs]
        hosts = dict.fromkeys(record.host for record in records if record is not None)
        return tuple(host for host in hosts if self.is_gone(host))

    def not_up(self, procs: Sequence[int]) -> tuple[int, ...]:
        """The host agents of these processes that have ended, or are not up yet."""
        hosts = dict.fromkeys(self.host_of(proc) for proc in procs)
        records = [record for host in hosts if (record := self._state.hosts.get(host)) is not None]
        return tuple(record.host for record in records if record.gone or not record.up)

    def host_of(self, proc: int) -> int:
        """The host of a process, or the last one if it has ended; 0 if there was none."""
        record = self._state.ranks.get(proc)
        return 0 if record is None else record.host

    def places(self, procs: Sequence[int]) -> tuple[int, ...]:
        """The host of each of these processes."""
        return tuple(self.now(self.host_of(proc)) for proc in procs)

    def procs_on(self, hosts: Sequence[int], view: int = 0) -> tuple[int, ...]:
        """The processes of these hosts that were spawned through a view of them and have not ended, even if they are ending."""
        return tuple(
            record.spec.proc for record in self._ranks_on(hosts) if record.view == view and not record.has_ended
        )

    def new_view(self) -> int:
        """Return the number of another view of hosts."""
        return next(self._new_views)

    def can_end(self, host: int) -> bool:
        """Whether no process on a host is alive, or could be replaced there."""
        return all(record.stopping and record.has_ended for record in self._ranks_on((host,)))

    def _ranks_on(self, hosts: Sequence[int]) -> list[RankRecord]:
        """The records of the processes of these hosts, also of those that the program has started just now."""

        def find() -> list[RankRecord]:
            return [record for record in self._state.ranks.values() if record.host in hosts]

        try:
            return self._loop.run_on_io_thread(find)
        except MeshDownError:  # nothing changes any more
            return find()

    def end_agent(self, host: int) -> None:
        """End an agent on this machine, but not the session; it counts as gone on return."""
        if (handle := self._handles.get(host)) is not None:
            handle.close(0.0)
            self._loop.run_on_io_thread(self.look)

    def wait_for(self, hosts: Sequence[int], finish: Callable[[Sequence[Answer]], T]) -> Future[T]:
        """A future that resolves when each of these host agents is up or gone."""
        return self._loop.promise(lambda id, now: self._state.host_requests.await_up(id, hosts), finish)

    def views(self, hosts: Sequence[int]) -> tuple[HostView, ...]:
        """Hosts as they are now, each with a unique name."""
        return host_views(self._state.hosts, hosts)

    def compare(self, hosts: Sequence[int]) -> Comparison:
        """Compare the software and the clocks of hosts that are up with those of the controller."""
        records = [record for host in hosts if (record := self._state.hosts.get(host)) is not None]
        names = {view.number: view.name for view in self.views(hosts)}
        known = [(names[record.host], record.software, record.clock) for record in records if record.software]
        return compare(self._state.software, known) if self._state.software is not None else Comparison()

    def read_log(self, host: int, proc: int, max_nbytes: int) -> Future[list[LogRecord]]:
        """Read the kept output of a rank from its host; nothing if the host is gone."""

        def read(answers: Sequence[Answer]) -> list[LogRecord]:
            (answer,) = answers
            return [] if isinstance(answer, Failure) else log_records(answer.payload.data)

        if self._loop.closed:
            return Future.resolved([])
        return self._loop.promise(
            lambda id, now: self._state.host_requests.ask(id, host, pack(ReadLog(id, proc, max_nbytes))), read
        )

    def read_stacks(self, host: int, proc: int, *, only_state: bool = False) -> Future[str]:
        """Read the stacks of a rank that does not answer, as faulthandler writes them, or its state; empty if it can't."""

        def read(answers: Sequence[Answer]) -> str:
            (answer,) = answers
            return "" if isinstance(answer, Failure) else str(answer.payload.data, "utf-8", "replace")

        if self._loop.closed:
            return Future.resolved("")
        return self._loop.promise(
            lambda id, now: self._state.host_requests.ask(id, host, pack(ReadLog(id, proc, 0, True, only_state))), read
        )

    def agent_pid(self, host: int) -> int:
        """Process id of a host agent; 0 while it starts."""
        return self._state.hosts[host].pid

    def node(self, host: int) -> str:
        """The engine's name for the machine of a host; empty if it does not matter."""
        handle = self._handles.get(host)
        return handle.node if handle else ""

    def outlive(self, host: int, keep_s: float) -> Future[bool]:
        """Have a host agent and its ranks outlive this process, for ``keep_s`` seconds; resolves when it agrees or is gone."""
        return self._loop.promise(
            lambda id, now: self._state.host_requests.detach(id, host, keep_s),
            lambda answers: not isinstance(answers[0], Failure),
        )

    # -- when the loop begins and ends

    def take_up(self, handles: Mapping[int, HostHandle], next_host: int) -> None:
        """Go on with hosts that another controller had; the next new one gets this number."""
        self._handles.update(handles)
        self._ids = itertools.count(next_host)

    def close(self, timeout_s: float) -> None:
        """Give all hosts back, after each got a message to end."""
        for host in list(self._handles):
            self._start_closing(host, timeout_s)
        self.settle()

    # -- on the I/O thread

    def log_tail(self, host: int) -> tuple[str, ...]:
        """The last known lines of a host's log."""
        handle = self._handles.get(host)
        return handle.log_tail() if handle else ()

    def expired(self, host: int, reason: str) -> None:
        """Handle a host that is silent or did not come up; its engine may know the reason."""
        handle = self._handles.get(host)
        self._on_host_lost(host, (handle.poll() if handle else None) or reason)

    def look(self) -> None:
        """Ask the engines about all hosts, and connect to those that now have an address."""
        for host, handle in list(self._handles.items()):
            record = self._state.hosts.get(host)  # None: just launched
            if record is not None and not record.gone:
                reason = handle.poll()
                if reason is not None:
                    self._on_host_lost(host, reason)
                elif handle.address and host not in self._dialled:
                    self._dialled.add(host)
                    self._transport.dial(host, handle.address)

    def _on_host_lost(self, host: int, reason: str) -> None:
        log = self.log_tail(host)
        now = time.monotonic()
        if reason:
            self._loop.perform(self._state.processes.host_gone(host, reason, log, now))
        else:
            self._loop.perform(
                self._state.processes.host_gone(
                    host, "the host agent did not come up in time", log, now, NEVER_CONNECTED
                )
            )
