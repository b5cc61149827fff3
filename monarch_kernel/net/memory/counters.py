"""What this process has carried to others and from them: bytes, operations and time, by road and direction.

Who counts: of lent memory whoever reads or writes it, of values whoever sends them; so nothing is counted twice. It is
counted where it is done, by the thread that does it, and told to nobody until somebody asks, or a while later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from monarch_kernel.net.memory.shared_blocks import is_for_all
from monarch_kernel.net.wire.codec import Frame
from monarch_kernel.net.wire.messages import Carried, Collected

__all__ = ["SHARED_MEMORY", "SOCKET", "Changes", "Meters", "Piece"]

SHARED_MEMORY = "shared memory"
"""The road of large parts of values between processes of one machine."""

SOCKET = "socket"
"""That of all their other parts that travel apart from the pickle."""


class Piece(bytearray):
    """A piece of lent memory that travels in a message: it is no value, and counted by whoever wants it."""


class Changes(NamedTuple):
    """Counts that have changed in the last ``over_s`` seconds, as they are now."""

    carried: tuple[Carried, ...]
    over_s: float
    collected: tuple[Collected, ...] = ()


class _Tally:
    __slots__ = ("is_told", "nbytes", "operations", "seconds")

    def __init__(self) -> None:
        self.nbytes = self.operations = 0
        self.seconds = 0.0
        self.is_told = True


class Meters:
    """The counts of one process; for any thread.

    Args:
        proc: its place.

    Attributes:
        on_news: called when something is counted after `changes` had nothing to tell for the last time; must be quick.
        count_unread: returns the number of collectives that are in no count.
    """

    def __init__(self, proc: int) -> None:
        self.proc = proc
        self.on_news: Callable[[], None] = lambda: None
        self.count_unread: Callable[[], int] = lambda: 0
        self._tallies: dict[tuple[int, int, str], _Tally] = {}
        self._changed: list[tuple[int, int, str]] = []
        self._collected: dict[tuple[str, str], _Tally] = {}
        self._is_quiet = True
        self._since = 0.0
        self._lock = threading.Lock()

    def count(
        self, source: int, target: int, road: str, nbytes: int, *, operations: int = 1, seconds: float = 0.0
    ) -> None:
        """Add what has gone from one process to another.

        Args:
            source: place of the process from which the bytes have gone.
            target: place of the one to which.
            road: by its name.
            nbytes: how many.
            operations: as how many transfers, or arrays of a value.
            seconds: how long that took; 0 if it can't be told.
        """
        key = source, target, road
        with self._lock:
            tally = self._tallies.get(key)
            if tally is None:
                tally = self._tallies[key] = _Tally()
            tally.nbytes += nbytes
            tally.operations += operations
            tally.seconds += seconds
            if tally.is_told:
                tally.is_told = False
                self._changed.append(key)
            if not self._is_quiet:
                return
            self._is_quiet = False
            self._since = time.monotonic() - seconds
        self.on_news()

    def collect(self, group: str, operation: str, nbytes: int, *, operations: int = 1, seconds: float = 0.0) -> None:
        """Add a collective of this process, or how long one took.

        Args:
            group: the process group, as users call it.
            operation: its kind.
            nbytes: of what goes in, or what comes out, if that is more.
            operations: how many.
            seconds: for how long it was waited for.
        """
        with self._lock:
            tally = self._collected.get((group, operation))
            if tally is None:
                tally = self._collected[group, operation] = _Tally()
            tally.nbytes += nbytes
            tally.operations += operations
            tally.seconds += seconds
            tally.is_told = False
            if not self._is_quiet:
                return
            self._is_quiet = False
            self._since = time.monotonic()
        self.on_news()

    def sent(self, target: int, parts: Sequence[Frame], as_sent: Sequence[Frame]) -> None:
        """Count the frames of a message behind its header.

        Args:
            target: place of the process that it was sent to.
            parts: the message.
            as_sent: what has gone in place of it: with references instead of those that stay in shared memory, or the same.
        """
        left = as_sent[len(as_sent) - len(parts) + 1 :]
        here = there = n_here = n_there = 0
        for part, rest in zip(parts[1:], left):
            nbytes = len(part)
            if len(rest) != nbytes:
                if not is_for_all(part):  # which nobody has copied
                    there += nbytes
                    n_there += 1
            elif nbytes and (type(part) is not memoryview or type(part.obj) is not Piece):
                here += nbytes
                n_here += 1
        if n_here:
            self.count(self.proc, target, SOCKET, here, operations=n_here)
        if n_there:
            self.count(self.proc, target, SHARED_MEMORY, there, operations=n_there)

    def changes(self, *, is_last: bool = False) -> Changes:
        """The counts that have changed since this was last called, as they are now.

        Args:
            is_last: whether, if there are none, this is not called again before there is news.
        """
        with self._lock:
            now = time.monotonic()
            changed, self._changed = self._changed, []
            carried = []
            for key in changed:
                tally = self._tallies[key]
                tally.is_told = True
                carried.append(Carried(*key, tally.nbytes, tally.operations, tally.seconds))
            collected = []
            for kind, tally in self._collected.items():
                if not tally.is_told:
                    tally.is_told = True
                    collected.append(Collected(*kind, tally.nbytes, tally.operations, tally.seconds))
            over_s, self._since = now - self._since, now
            self._is_quiet |= is_last and not carried and not collected
            return Changes(tuple(carried), over_s, tuple(collected))

    def tell_all(self) -> None:
        """Have `changes` give all counts once more: who heard of them is there no longer."""
        with self._lock:
            for key, tally in self._tallies.items():
                if tally.is_told:
                    tally.is_told = False
                    self._changed.append(key)
            for tally in self._collected.values():
                tally.is_told = False
