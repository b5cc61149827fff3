"""The controller's part of late ranks: compares when ranks have started their last collectives, for views."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from monarch_kernel.base.events import MeshView
from monarch_kernel.features.profiling.lateness import Lateness, lateness
from monarch_kernel.features.profiling.messages import Arrived
from monarch_kernel.net.wire.messages import Message
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.extensions import Core, Extension, register
from monarch_kernel.runtime.controller.process_records import RankRecord

__all__ = ["LateRanks"]

_KEPT = 128
_OLD_S = 5.0
"""What a rank has reported before that is not shown any more."""

_EVERY_S = 1.0
_LEAST = 8
_MOST_S = 60.0
"""Ranks that are further apart are not late: a message about the wait says more."""

_Group = tuple[str, tuple[int, ...]]
_Arrivals = dict[_Group, tuple[tuple[int, float], ...]]


@register
class LateRanks(Extension):
    """Keeps the last arrivals of each rank, and adds to views how late the ranks are."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.handlers = {Arrived: self._arrived}
        self._known: dict[int, _Arrivals] = {}  # views read it on other threads, so its values do not change
        self._reported: dict[int, float] = {}
        self._found: dict[tuple[int, ...], tuple[float, dict[int, Lateness]]] = {}

    def may_send(self, proc: int, message: Message) -> bool:
        return isinstance(message, Arrived)

    def process_lost(self, proc: int) -> list[Effect]:
        self._known.pop(proc, None)
        self._reported.pop(proc, None)
        return []

    def shown(self, view: MeshView, procs: Sequence[int], now: float) -> MeshView:
        if not self._known:
            return view
        late = self.late(tuple(procs), now)
        if not late:
            return view
        return replace(
            view,
            ranks=tuple(
                rank._replace(late_s=found.late_s, last=found.last, collectives=found.of)
                if (found := late.get(rank.rank)) is not None
                else rank
                for rank in view.ranks
            ),
        )

    def _arrived(self, record: RankRecord, message: Arrived, now: float) -> list[Effect]:
        proc = record.spec.proc
        host = self.core.hosts.get(record.host)
        ahead_s = host.clock.offset_s if host is not None and host.clock is not None else 0.0
        known = self._known.get(proc, {})
        groups: _Arrivals = {}
        for each in message.groups:
            key = each.group, each.members
            kept = known.get(key, ())
            if kept and each.numbers and each.numbers[0] <= kept[-1][0]:  # the group was formed again
                kept = ()
            new = ((number, at - ahead_s) for number, at in zip(each.numbers, each.times))
            groups[key] = (*kept, *new)[-_KEPT:]
        self._known[proc] = groups
        self._reported[proc] = now
        return []

    def late(self, procs: tuple[int, ...], now: float) -> dict[int, Lateness]:
        """Return how late the ranks of a mesh are; for any thread. It is computed once a second.

        Args:
            procs: the processes of the mesh, in the order of the ranks.
            now: the time.
        """
        at, found = self._found.get(procs, (0.0, {}))
        if now < at + _EVERY_S:
            return found
        found = self.late_since(0.0, procs, now)
        self._found = {**{key: old for key, old in self._found.items() if now < old[0] + _OLD_S}, procs: (now, found)}
        return found

    def late_since(self, since_s: float, procs: tuple[int, ...], now: float) -> dict[int, Lateness]:
        """Return how late the ranks of a mesh are in the collectives that they start after a time; for any thread.

        Args:
            since_s: the time, in seconds since 1970.
            procs: the processes of the mesh, in the order of the ranks.
            now: the time.
        """
        arrivals: defaultdict[tuple[_Group, int], dict[int, float]] = defaultdict(dict)
        for rank, proc in enumerate(procs):
            if now < self._reported.get(proc, 0.0) + _OLD_S:
                for key, kept in self._known.get(proc, {}).items():
                    for number, time_s in kept:
                        if time_s >= since_s:
                            arrivals[key, number][rank] = time_s
        complete = [
            each
            for (key, _), each in arrivals.items()
            if len(each) == len(key[1] or procs) and max(each.values()) - min(each.values()) < _MOST_S
        ]
        return {rank: each for rank, each in lateness(complete).items() if each.of >= _LEAST}
