"""Rules for stragglers: the rank that others wait for in collectives. No I/O, no clock.

Theory of operation. There are two rules, because neither sees all. Where Python starts the collectives, ranks report when they
have started the last ones (`features.profiling`). These times do not depend on when anybody asks, so `latest_of` also works on
a machine that is busy: a rank that starts nearly all of the collectives after the median of the others is a straggler, even if
another rank is delayed now and then and arrives last.

The other rule, `StragglerWatch`, looks at the ranks repeatedly. While a rank computes longer than the others, they wait for it
in a collective that it has not started. So a look at the number of collectives that each rank has started finds either equal
numbers, or the ranks that are late. The share of looks that find one late rank is about the share of a step that the others
lose to it. In a healthy loop such looks are rare, or find changing ranks. This needs no clocks that agree, costs a rank
microseconds, and counts collectives that C++ starts, as in DistributedDataParallel.

The numbers also count messages between two ranks, which only some ranks send. So a rank is blamed only if the numbers were
equal in between.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from monarch_kernel.errors import Failure
from monarch_kernel.runtime.diagnostics.source_names import describe_line
from monarch_kernel.runtime.diagnostics.stacks import Doing

__all__ = ["LateRank", "Look", "Straggler", "StragglerWatch", "latest_of", "look_at", "place_of"]

_LOOKS = 200
_LEAST = 16
"""Looks that must have found a rank that others wait for, before one can be blamed."""

_OTHERS = 1
"""Looks among the last `_LEAST` that may have found another rank."""

_SHARE = 0.1
_CLOSE = 3

_LEAST_COLLECTIVES = 24
_BEHIND = 0.9
_OTHERS_BEHIND = 0.75
"""If another rank is behind in this share, too, no single rank is to blame."""


class LateRank(Protocol):
    """How late a rank arrives at collectives, as `features.profiling.lateness` finds it."""

    @property
    def of(self) -> int:
        """The number of collectives that are compared."""
        ...

    @property
    def behind(self) -> int:
        """In how many of them it arrives after the median of the other ranks."""
        ...

    @property
    def behind_s(self) -> float:
        """How long after that median, as a median."""
        ...


class Look(NamedTuple):
    """What one look found.

    Attributes:
        late: the one rank that has started fewer collectives than another one; None if there is none, or several.
        number: the largest number of collectives.
        is_even: whether the numbers are equal.
    """

    late: int | None = None
    number: int = 0
    is_even: bool = False


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        rank: its flat rank.
        share: the share of looks in which the others wait for it, or of collectives that it starts after them.
        place: the line where it is then; empty if unknown.
        late_s: how long after the median of the others it starts collectives; 0 if that is not known.
    """

    rank: int
    share: float
    place: str = ""
    late_s: float = 0.0


def latest_of(late: Mapping[int, LateRank], step_s: float) -> Straggler | None:
    """Find the rank that starts nearly all collectives after the others, by a tenth of a step or more.

    Args:
        late: how late ranks are, by rank.
        step_s: how long a step takes, in seconds; 0 if that is not known; then no rank is blamed.
    """
    shares = {rank: each.behind / each.of for rank, each in late.items() if each.of >= _LEAST_COLLECTIVES}
    if len(shares) < 2 or step_s <= 0:
        return None
    second, first = sorted(shares, key=shares.__getitem__)[-2:]
    by_s = late[first].behind_s
    if shares[first] < _BEHIND or shares[second] >= _OTHERS_BEHIND or by_s < _SHARE * step_s:
        return None
    return Straggler(first, shares[first], late_s=by_s)


def look_at(started: Mapping[int, int | Failure]) -> Look:
    """Find the rank that others wait for.

    Args:
        started: the number of collectives that each rank has started, negative if it has no usable process group.
    """
    numbers = {rank: number for rank, number in started.items() if not isinstance(number, Failure)}
    if len(numbers) < len(started) or len(numbers) < 2 or min(numbers.values()) <= 0:
        return Look()
    most = max(numbers.values())
    late = [rank for rank, number in numbers.items() if number < most]
    return Look(late[0] if len(late) == 1 else None, most, not late)


def place_of(answer: Doing | Failure | None, others: Iterable[Doing | Failure]) -> str:
    """The user's line that a rank runs while all others wait for it; empty if it is unknown, or if they do not wait for it.

    Args:
        answer: what the rank does.
        others: what the others do.
    """
    if not isinstance(answer, Doing) or answer.collectives:
        return ""
    reached = answer.reached
    for other in others:
        calls = other.collectives if isinstance(other, Doing) else ()
        if not any(call.number > reached.get(call.group, 0) for call in calls):
            return ""
    frames = [each.user_frame for each in answer.activities if each.user_frame is not None]
    return describe_line(frames[0]) if frames else ""


class StragglerWatch:
    """Counts the looks at the ranks of one loop."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque(maxlen=_LOOKS)
        self._found: set[int] = set()
        self._last_number = 0

    @property
    def is_close(self) -> bool:
        """Whether the last looks with a wait found the same rank, so that more looks soon would be useful."""
        late = [look.late for look in self._looks if look.late is not None][-_CLOSE:]
        return len(late) == _CLOSE and len(set(late)) == 1 and late[0] not in self._found

    def take(self, look: Look) -> Straggler | None:
        """Take a look; returns a straggler when it has become certain, each rank once.

        Of the looks at one wait only the first counts, so that a rank that makes the others wait once, as for an evaluation on
        rank 0, is no straggler.
        """
        if look.late is not None:
            if look.number == self._last_number:
                return None
            self._last_number = look.number
        self._looks.append(look)
        late = [at for at, each in enumerate(self._looks) if each.late is not None][-_LEAST:]
        if len(late) < _LEAST:
            return None
        looks = list(self._looks)
        ((rank, count),) = Counter(looks[at].late for at in late).most_common(1)
        share = (count - 1) / max(1, len(looks) - 1 - late[0])
        if rank is None or count < _LEAST - _OTHERS or share < _SHARE or rank in self._found:
            return None
        if not any(look.is_even for look in looks[late[0] :]):
            return None
        self._found.add(rank)
        return Straggler(rank, share)
