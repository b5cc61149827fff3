"""Keeps the counts from which torch names process groups equal on all ranks of a mesh.

Torch names a group by the number of groups that its process has made so far, and its members meet under that name. If only
some ranks have called ``new_group``, because the others failed, were interrupted or were not in the cell, the members of all
later groups wait under different names, forever. So each rank reports its count with its answers, and when no rank of the
mesh works, the controller makes those that are behind continue from the highest count. Existing groups stay usable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import SkipGroupNames
from monarch_kernel.runtime.controller.process_records import RankRecord
from monarch_kernel.runtime.rpc.requests import Send

__all__ = ["GroupCounts"]


class GroupCounts:
    """The counts of all ranks.

    Args:
        ranks: By number of the process; owned by the caller.
    """

    def __init__(self, ranks: Mapping[int, RankRecord]) -> None:
        self._ranks = ranks
        self._changed: set[int] = set()  # the first processes of the meshes with changed counts

    def report(self, records: Iterable[RankRecord], count: int) -> None:
        """Take the count of ranks."""
        for record in records:
            if count != record.groups:
                record.groups = count
                self._changed.add(record.spec.proc - record.spec.rank)

    def align(self) -> list[Send]:
        """Tell ranks that are behind to continue from the highest count of their mesh; call this after a request has ended."""
        effects: list[Send] = []
        for first in list(self._changed):
            size = self._ranks[first].spec.world_size
            records = [self._ranks[proc] for proc in range(first, first + size) if proc in self._ranks]
            if any(record.open_requests for record in records):
                continue  # it may be making a group now
            self._changed.remove(first)
            count = max(record.groups for record in records)
            packed = pack(SkipGroupNames(count))
            for record in records:
                if 0 <= record.groups < count:
                    record.groups = count
                    effects += record.send(packed)
        return effects
