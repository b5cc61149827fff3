"""Which ranks arrive late at collectives. Pure.

In a step with many collectives, a rank that is late is so at the first of them: there the others wait for it, and at the next
ones all are even. So only the collectives in which ranks have waited long are counted: at least half as long as in the longest
waits, without the longest tenth, which may be a checkpoint or an evaluation. If no rank is slow, their waits are short, and
each rank is the last one in some of them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Lateness", "lateness"]

_LONG = 0.5
_TENTH = 0.9


class Lateness(NamedTuple):
    """How late one rank arrives at the collectives in which ranks wait long.

    Attributes:
        late_s: how long after the first rank, as a median.
        last: in how many of them it is the last rank.
        of: how many there are.
        by_s: how long after the second-last rank where it is the last one, as a median; 0 if it never is.
        lost_s: for how long all others have waited for it alone, in all collectives.
        behind: in how many of them it arrives after the median of the other ranks. On a busy machine, where each rank is
            delayed now and then, a slow rank is not always the last one, but nearly always behind.
        behind_s: how long after that median, as a median.
    """

    late_s: float
    last: int
    of: int
    by_s: float
    lost_s: float
    behind: int
    behind_s: float


def lateness(collectives: Sequence[Mapping[int, float]]) -> dict[int, Lateness]:
    """Compare the arrivals of ranks.

    Args:
        collectives: for each collective, the time at which each of its ranks has arrived.

    Returns:
        The lateness of each rank, ascending.
    """
    arrivals = [each for each in collectives if len(each) > 1]
    waits = sorted(max(each.values()) - min(each.values()) for each in arrivals)
    if not waits:
        return {}
    least = _LONG * waits[int(_TENTH * (len(waits) - 1))]
    late: defaultdict[int, list[float]] = defaultdict(list)
    behind: defaultdict[int, list[float]] = defaultdict(list)
    ahead: defaultdict[int, list[float]] = defaultdict(list)
    lost: defaultdict[int, float] = defaultdict(float)
    for each in arrivals:
        times = sorted(each.values())
        second, last = times[-2:]
        of = max(each, key=each.__getitem__)
        lost[of] += last - second
        first = times[0]
        if last - first < least:
            continue
        ahead[of].append(last - second)
        middle = (len(each) - 1) // 2  # of the other ranks: the upper median
        for place, (rank, at) in enumerate(sorted(each.items(), key=lambda item: item[1])):
            late[rank].append(at - first)
            behind[rank].append(at - times[middle + 1 if place <= middle else middle])
    return {
        rank: Lateness(
            statistics.median(late[rank]),
            len(ahead[rank]),
            len(late[rank]),
            statistics.median(ahead[rank]) if ahead[rank] else 0.0,
            lost[rank],
            sum(each > 0 for each in behind[rank]),
            statistics.median(behind[rank]),
        )
        for rank in sorted(late)
    }
