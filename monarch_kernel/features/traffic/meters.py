"""Counts that processes report, and the throughput computed from them. No I/O, no clock.

Each process counts its own transfers and reports the totals, so that a repeated report does no harm. Throughput is computed
from the differences: the bytes since the last report are spread over the time that the report covers. It includes what
collectives move.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from monarch_kernel.net.transport.base import Peer, is_rank, proc_of
from monarch_kernel.net.wire.messages import Carried, Collected, Metered

__all__ = ["HISTORY_S", "MeterBook", "Throughput"]

HISTORY_S = 60
"""How long throughput is kept."""

LAG_S = 0.5
"""Delay of reports: throughput is known up to this time ago."""

MAX_KINDS = 1_000
"""Kinds of collectives, by group, operation and data path, that are counted for a rank."""

MAX_NAME = 200
"""Characters of the name of a group, operation or data path."""

_STEP_S = 0.25
_PER_S = round(1 / _STEP_S)
_KEPT = HISTORY_S * _PER_S
_REPORT_EVERY_S = 0.5


class Throughput:
    """The bytes that one process recently received and sent."""

    __slots__ = ("_newest", "_steps")

    def __init__(self) -> None:
        self._steps: dict[int, list[float]] = {}  # bytes in and out; missing steps are 0
        self._newest = 0

    def add(self, now: float, over_s: float, nbytes_in: float, nbytes_out: float) -> None:
        """Add the bytes of the last ``over_s`` seconds."""
        over_s = min(over_s, HISTORY_S) if over_s > _STEP_S / 100 else _STEP_S / 100  # also if it is NaN
        start = now - over_s
        self._newest = math.floor(now / _STEP_S)
        for which in range(math.floor(start / _STEP_S), self._newest + 1):
            part = (min(now, (which + 1) * _STEP_S) - max(start, which * _STEP_S)) / over_s
            step = self._steps.setdefault(which, [0.0, 0.0])
            step[0] += part * nbytes_in
            step[1] += part * nbytes_out
        if len(self._steps) > 2 * _KEPT:
            self._steps = {which: step for which, step in self._steps.items() if which >= self._newest - _KEPT}

    def rate(self, now: float) -> tuple[float, float]:
        """Bytes per second in and out, over the last second that is completely known."""
        end = _known_until(now)
        steps = [self._steps[which] for which in range(end - _PER_S, end) if which in self._steps]
        return sum(step[0] for step in steps), sum(step[1] for step in steps)

    def history(self, now: float) -> tuple[tuple[float, float], ...]:
        """The rates of each of the last `HISTORY_S` seconds, oldest first; the last one is `rate`."""
        last = _known_until(now) - 1
        found = [[0.0, 0.0] for _ in range(HISTORY_S)]
        for which, (nbytes_in, nbytes_out) in self._steps.items():
            ago = (last - which) // _PER_S
            if 0 <= ago < HISTORY_S:
                second = found[HISTORY_S - 1 - ago]
                second[0] += nbytes_in
                second[1] += nbytes_out
        return tuple((nbytes_in, nbytes_out) for nbytes_in, nbytes_out in found)

    def has_ceased(self, now: float) -> bool:
        """Whether no bytes were received or sent in the second of `rate`, or since."""
        return self._newest < _known_until(now) - _PER_S

    def is_over(self, now: float) -> bool:
        """Whether the last bytes are older than the history."""
        return self._newest < _known_until(now) - _KEPT


def _known_until(now: float) -> int:
    return math.floor((now - LAG_S) / _STEP_S)


class _Report(NamedTuple):
    """The counts of one process."""

    carried: dict[tuple[int, int, str], Carried]
    collected: dict[tuple[str, str, str, int], Collected]


class MeterBook:
    """The reported counts of all processes."""

    def __init__(self) -> None:
        self._reports: dict[Peer, _Report] = {}
        self._unread: dict[Peer, int] = {}
        self._throughputs: dict[int, Throughput] = {}
        self._moving: set[int] = set()
        self._reported_at = -math.inf

    def handle(self, peer: Peer, message: Metered, now: float) -> None:
        """Add the changed counts that a process reports."""
        report = self._reports.get(peer)
        if report is None:
            report = self._reports[peer] = _Report({}, {})
        moved: dict[int, list[int]] = {}
        for row in message.carried:
            key = row.source, row.target, row.path
            known = report.carried.get(key)
            report.carried[key] = row
            nbytes = row.nbytes - (0 if known is None else known.nbytes)
            moved.setdefault(row.target, [0, 0])[0] += nbytes
            moved.setdefault(row.source, [0, 0])[1] += nbytes
        for one in message.collected:
            one = one.with_short_names(MAX_NAME)
            kind = one.group, one.operation, one.path, one.ranks
            before = report.collected.get(kind)
            if before is None and len(report.collected) >= MAX_KINDS:
                continue
            report.collected[kind] = one
            # There are fewer than before if a collective has failed, which is then no longer counted.
            nbytes_in = max(0, one.nbytes_in - (0 if before is None else before.nbytes_in))
            nbytes_out = max(0, one.nbytes_out - (0 if before is None else before.nbytes_out))
            if nbytes_in or nbytes_out:
                flow = moved.setdefault(proc_of(peer), [0, 0])
                flow[0] += nbytes_in
                flow[1] += nbytes_out
        self._unread[peer] = message.unread
        if message.is_repeat:  # when these bytes were moved is unknown
            return
        for proc, (nbytes_in, nbytes_out) in moved.items():
            throughput = self._throughputs.get(proc)
            if throughput is None:
                throughput = self._throughputs[proc] = Throughput()
            throughput.add(now, message.over_s, nbytes_in, nbytes_out)
            self._moving.add(proc)

    def forget(self, proc: int) -> None:
        """Forget a process that has ended: what it has counted, and what others have counted of it."""
        for peer in [peer for peer in self._reports if is_rank(peer) and proc_of(peer) == proc]:
            del self._reports[peer]
            self._unread.pop(peer, None)
        for report in self._reports.values():
            for key in [key for key in report.carried if proc in key[:2]]:
                del report.carried[key]

    def carried(self, procs: Collection[int]) -> list[tuple[Carried, Peer]]:
        """The transfers to or from these processes, as each process has counted them."""
        return [
            (row, peer)
            for peer, report in self._reports.items()
            for row in report.carried.values()
            if row.source in procs or row.target in procs
        ]

    def collected(self, procs: Collection[int]) -> tuple[list[tuple[Collected, Peer]], int]:
        """The collectives of these processes, each with the process that counted it, and the number of uncounted ones."""
        found = [
            (one, peer)
            for peer, report in self._reports.items()
            if proc_of(peer) in procs
            for one in report.collected.values()
        ]
        return found, sum(unread for peer, unread in self._unread.items() if proc_of(peer) in procs)

    def rate(self, proc: int, now: float) -> tuple[float, float]:
        """Bytes per second that a process receives and sends."""
        throughput = self._throughputs.get(proc)
        return (0.0, 0.0) if throughput is None else throughput.rate(now)

    def history(self, proc: int, now: float) -> tuple[tuple[float, float], ...]:
        """The rates of a process in each of the last `HISTORY_S` seconds, oldest first."""
        return self._throughputs.get(proc, Throughput()).history(now)

    def due(self, now: float) -> Mapping[int, tuple[tuple[float, float], ...]]:
        """The histories to publish now: of processes that transfer bytes, or have just stopped."""
        if not self._moving or now < self._reported_at + _REPORT_EVERY_S:
            return {}
        self._reported_at = now
        histories = {proc: self.history(proc, now) for proc in sorted(self._moving)}
        for proc in histories:
            if self._throughputs[proc].has_ceased(now):
                self._moving.discard(proc)
        for proc in [proc for proc, throughput in self._throughputs.items() if throughput.is_over(now)]:
            del self._throughputs[proc]  # a history that stays longer is small
        return histories
