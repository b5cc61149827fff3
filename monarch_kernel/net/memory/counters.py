"""Counts what this process has sent and received: bytes, operations and time, by data path and direction.

The process that reads or writes lent memory counts it, and the sender of a value counts the value, so nothing is counted
twice. The thread that does the work counts it. The counts are reported on request, or after a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from monarch_kernel.net.memory.shared_blocks import is_for_all
from monarch_kernel.net.wire.codec import Frame
from monarch_kernel.net.wire.messages import Carried, Collected

__all__ = ["SHARED_MEMORY", "SOCKET", "Changes", "CollectiveKind", "Meters", "Piece", "Transferred"]

SHARED_MEMORY = "shared memory"
"""Data path of large parts of values between processes of one machine."""

SOCKET = "socket"
"""Data path of all other parts that travel apart from the pickle."""


class Piece(bytearray):
    """A piece of lent memory that travels in a message: not a value, and counted by the process that asked for it."""


class Changes(NamedTuple):
    """Current values of the counts that have changed in the last ``over_s`` seconds; all counts if ``is_repeat``."""

    carried: tuple[Carried, ...]
    over_s: float
    collected: tuple[Collected, ...] = ()
    is_repeat: bool = False


class _Tally:
    __slots__ = ("is_reported", "nbytes", "operations", "seconds")

    def __init__(self) -> None:
        self.nbytes = self.operations = 0
        self.seconds = 0.0
        self.is_reported = True


class CollectiveKind(NamedTuple):
    """What collectives that are counted together have in common.

    Attributes:
        group: name of the process group, as shown to users.
        operation: such as ``all_reduce``.
        path: the data path: the backend of the process group, such as ``gloo``.
        ranks: number of ranks in the group.
    """

    group: str
    operation: str
    path: str
    ranks: int


class Transferred(NamedTuple):
    """One transfer in which this process took part.

    Attributes:
        ended: when it was over, in seconds since 1970.
        seconds: how long it took; 0 if unknown.
        nbytes: its size.
        path: the data path, such as ``shared memory`` or ``gloo``.
        source: where the bytes come from: the number of a process, or, if ``is_message``, a rank; -1 is this rank.
        target: where they go.
        is_message: whether it is a ``send`` or a ``recv`` of torch.distributed.
    """

    ended: float
    seconds: float
    nbytes: int
    path: str
    source: int
    target: int
    is_message: bool = False


class _CollectiveTally:
    __slots__ = ("is_reported", "nbytes", "nbytes_in", "nbytes_out", "operations", "seconds", "timed_nbytes", "timed_s")

    def __init__(self) -> None:
        self.nbytes = self.operations = self.nbytes_in = self.nbytes_out = self.timed_nbytes = 0
        self.seconds = self.timed_s = 0.0
        self.is_reported = True


class Meters:
    """The counts of one process. Any thread may use them.

    Args:
        proc: number of the process.

    Attributes:
        on_news: called when something is counted after `changes` last returned nothing; must be quick.
        before_changes: called before counts are read; counts what has been noted so far.
        count_unread: returns the number of collectives that are in no count.
        on_transfer: called with each transfer, while a profile records; must be quick.
    """

    def __init__(self, proc: int) -> None:
        self.proc = proc
        self.on_news: Callable[[], None] = lambda: None
        self.before_changes: Callable[[], None] = lambda: None
        self.count_unread: Callable[[], int] = lambda: 0
        self.on_transfer: Callable[[Transferred], object] | None = None
        self._tallies: dict[tuple[int, int, str], _Tally] = {}
        self._changed: list[tuple[int, int, str]] = []
        self._collected: dict[CollectiveKind, _CollectiveTally] = {}
        self._is_quiet = True
        self._is_repeat = False
        self._since = 0.0
        self._lock = threading.Lock()

    def count(
        self, source: int, target: int, path: str, nbytes: int, *, operations: int = 1, seconds: float = 0.0
    ) -> None:
        """Add bytes that went from one process to another.

        Args:
            source: number of the process from which the bytes came.
            target: number of the process to which they went.
            path: name of the data path.
            nbytes: number of bytes.
            operations: number of transfers, or of arrays of a value.
            seconds: duration; 0 if unknown.
        """
        if (tell := self.on_transfer) is not None and nbytes:
            tell(Transferred(time.time(), seconds, nbytes, path, source, target))
        key = source, target, path
        with self._lock:
            tally = self._tallies.get(key)
            if tally is None:
                tally = self._tallies[key] = _Tally()
            tally.nbytes += nbytes
            tally.operations += operations
            tally.seconds += seconds
            if tally.is_reported:
                tally.is_reported = False
                self._changed.append(key)
            if not self._is_quiet:
                return
            self._is_quiet = False
            self._since = time.monotonic() - seconds
        self.on_news()

    def collect(
        self,
        kind: CollectiveKind,
        nbytes: int = 0,
        nbytes_in: int = 0,
        nbytes_out: int = 0,
        *,
        operations: int = 1,
        seconds: float = 0.0,
        timed_nbytes: int = 0,
        timed_s: float = 0.0,
    ) -> None:
        """Add a collective of this process, or the duration of one.

        Args:
            kind: what it is counted with.
            nbytes: size of the input, or of the output if that is larger.
            nbytes_in: bytes that this process receives from others.
            nbytes_out: bytes that it sends to others.
            operations: number of collectives.
            seconds: how long this process waited for it.
            timed_nbytes: size of the whole collective, if its duration is known.
            timed_s: its duration, if known.
        """
        with self._lock:
            tally = self._collected.get(kind)
            if tally is None:
                tally = self._collected[kind] = _CollectiveTally()
            tally.nbytes += nbytes
            tally.nbytes_in += nbytes_in
            tally.nbytes_out += nbytes_out
            tally.operations += operations
            tally.seconds += seconds
            tally.timed_nbytes += timed_nbytes
            tally.timed_s += timed_s
            tally.is_reported = False
            if not self._is_quiet:
                return
            self._is_quiet = False
            self._since = time.monotonic()
        self.on_news()

    def sent(self, target: int, parts: Sequence[Frame], as_sent: Sequence[Frame]) -> None:
        """Count the frames of a message after its header.

        Args:
            target: number of the process that received the message.
            parts: the message.
            as_sent: the frames that were actually sent: references in place of frames in shared memory, or the same frames.
        """
        left = as_sent[len(as_sent) - len(parts) + 1 :]
        here = there = n_here = n_there = 0
        for part, rest in zip(parts[1:], left):
            nbytes = len(part)
            if len(rest) != nbytes:
                if not is_for_all(part):  # memory that processes share is not copied
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
        """Return the counts that have changed since the last call, with their current values.

        Args:
            is_last: whether the caller, if there are none, does not call again before ``on_news`` is called.
        """
        self.before_changes()
        with self._lock:
            now = time.monotonic()
            changed, self._changed = self._changed, []
            carried = []
            for key in changed:
                tally = self._tallies[key]
                tally.is_reported = True
                carried.append(Carried(*key, tally.nbytes, tally.operations, tally.seconds))
            collected = []
            for kind, count in self._collected.items():
                if not count.is_reported:
                    count.is_reported = True
                    collected.append(
                        Collected(
                            kind.group,
                            kind.operation,
                            count.nbytes,
                            count.operations,
                            count.seconds,
                            kind.path,
                            kind.ranks,
                            count.nbytes_in,
                            count.nbytes_out,
                            count.timed_nbytes,
                            count.timed_s,
                        )
                    )
            over_s, self._since = now - self._since, now
            self._is_quiet |= is_last and not carried and not collected
            is_repeat, self._is_repeat = self._is_repeat, False
            return Changes(tuple(carried), over_s, tuple(collected), is_repeat)

    def forget(self, proc: int) -> None:
        """Forget what was counted of a process that has ended."""
        with self._lock:
            for key in [key for key in self._tallies if proc in key[:2]]:
                if not self._tallies.pop(key).is_reported:
                    self._changed.remove(key)

    def tell_all(self) -> None:
        """Make `changes` return all counts once more, for a new receiver that has none of them."""
        with self._lock:
            self._is_repeat = True
            for key, tally in self._tallies.items():
                if tally.is_reported:
                    tally.is_reported = False
                    self._changed.append(key)
            for count in self._collected.values():
                count.is_reported = False
