"""The cells that wait for a shell, and the interrupts that apply to them or to the cells of subshells.

"Run All" sends all cells at once, to the main shell or to a subshell. An interrupt that comes when no statement of the running
cell is left, or between two cells, applies to the cells that wait for the same shell, and never to one that arrives later.

`Subshells` interrupts the cells of subshells. Three threads use it: the thread of the shell channel reports cells that arrive,
the thread of a subshell those that start and end, and the signal handler in the main thread interrupts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from monarch_kernel.net.transport.thread_interrupts import USER_THREAD, UserThread

__all__ = ["Subshells", "WaitingCells"]


class WaitingCells:
    """The cells and messages of comms that one shell has not handled.

    Attributes:
        next_ids: ids of cells and messages of which the first one that starts is interrupted.
        arrived: id -> whether it had to wait for another one.
    """

    def __init__(self) -> None:
        self.next_ids: frozenset[str] = frozenset()
        self.arrived: dict[str, bool] = {}
        self._messages: set[str] = set()  # those that are messages of comms, and not cells

    def arrive(self, id: str, *, is_busy: bool, is_message: bool) -> None:
        """Note a cell or a message; ``is_busy`` says whether the shell handles another one."""
        if is_message:
            self._messages.add(id)
        self.arrived[id] = is_busy or bool(self.arrived)

    @property
    def waiting(self) -> frozenset[str]:
        """The ids of those that had to wait, perhaps with the one that the shell handles now."""
        return frozenset(id for id, waits in list(self.arrived.items()) if waits)

    def start(self, id: str) -> frozenset[str]:
        """Take the interrupt that applies to a cell or a message that starts; an empty set if there is none.

        The result has the ids to which it applies if no code of the user raises it. An interrupt that a message raises still
        applies to the cells that wait.
        """
        if id not in self.next_ids:
            return frozenset()
        applies_to = self.next_ids & self._messages if id in self._messages else self.next_ids
        self.next_ids -= applies_to
        return applies_to

    def end(self, id: str) -> None:
        """Forget a cell or a message, which may have been aborted before it started."""
        self.arrived.pop(id, None)
        self._messages.discard(id)


class _Subshell(WaitingCells):
    """The cells of one subshell.

    Attributes:
        thread: runs a request of the subshell now; None between two requests.
        passed_on: the ids to which an interrupt of the request applies if the user's code does not raise it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread: UserThread | None = None
        self.passed_on: frozenset[str] = frozenset()


class Subshells:
    """The subshells of a kernel that handle requests, or for which cells wait."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler in the main thread may interrupt the main thread's own use
        self._by_id: dict[str | None, _Subshell] = {}

    def interrupt(self) -> None:
        """Interrupt what they run, or what waits for them; call this from the main thread."""
        with self._lock:
            for subshell in list(self._by_id.values()):
                waiting = subshell.waiting
                if subshell.thread is None:
                    subshell.next_ids = waiting
                else:
                    subshell.passed_on = waiting
                    subshell.thread.interrupt()

    def cell_arrived(self, subshell: str | None, id: str, *, is_message: bool = False) -> None:
        """Note a cell or a message of a comm, before the subshell gets it."""
        with self._lock:
            there = self._by_id.setdefault(subshell, _Subshell())
            there.arrive(id, is_busy=there.thread is not None, is_message=is_message)

    def cell_starts(self, id: str) -> None:
        """Interrupt the cell or the message that starts, in the thread of its subshell, if an interrupt came before."""
        with self._lock:
            for there in self._by_id.values():
                if there.thread is not None and there.thread is USER_THREAD.get() and (ids := there.start(id)):
                    there.passed_on |= ids
                    there.thread.note()

    def cell_ended(self, id: str) -> None:
        """Forget a cell or a message."""
        with self._lock:
            for subshell, there in list(self._by_id.items()):
                there.end(id)
                self._drop_if_idle(subshell, there)

    @contextmanager
    def request(self, subshell: str | None) -> Iterator[None]:
        """Enclose the handling of a request by the calling thread."""
        thread = UserThread()
        with self._lock:
            there = self._by_id.setdefault(subshell, _Subshell())
            there.thread = thread
        token = USER_THREAD.set(thread)
        try:
            yield
        finally:
            with self._lock:
                thread.leave_user_code()
                there.thread = None
                if thread.is_noted:
                    there.next_ids |= there.passed_on
                there.passed_on = frozenset()
                self._drop_if_idle(subshell, there)
            USER_THREAD.reset(token)

    def _drop_if_idle(self, subshell: str | None, there: _Subshell) -> None:
        if there.thread is None and not there.arrived:
            self._by_id.pop(subshell, None)
