"""Finds where the time of steps goes, and for which rank others wait, from what all ranks have recorded. Pure."""

from __future__ import annotations

import statistics
from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from monarch_kernel.features.profiling.lateness import Lateness, lateness
from monarch_kernel.features.profiling.recording import Place
from monarch_kernel.features.profiling.spans import Spans, contains, length, minus, union, within
from monarch_kernel.features.profiling.timeline import Key, Timeline

__all__ = ["LEAST", "PARTS", "Findings", "Line", "Straggler", "analyse"]

PARTS = ("compute", "waiting for others", "transfer", "loader", "rest")

LEAST = 4
"""Steps, or long waits, in which the others wait for a rank before it is named."""

_MOSTLY = 0.8
_SHARE = 0.1
_EXPLAINED = 0.3
_MAX_LINES = 3


class Line(NamedTuple):
    """A line of code, and the time in it in a step, in seconds: as a mean of the ranks, and on the rank with the most."""

    place: Place
    mean_s: float
    most_s: float
    rank: int


class Straggler(NamedTuple):
    """A rank that the others wait for.

    Attributes:
        rank: its flat rank.
        late: how late it is.
        place: the line that takes it longer than the others; None if there is none.
        more_s: how much longer, in a step.
    """

    rank: int
    late: Lateness
    place: Place | None = None
    more_s: float = 0.0


@dataclass(frozen=True)
class Findings:
    """What the recordings show.

    Attributes:
        steps: the number of steps that all ranks have; 0 if there are none, and then times are of the whole recording.
        step_s: how long a step takes, as a mean of the ranks.
        parts: rank -> seconds of a step in each of `PARTS`.
        late: rank -> how late it arrives at collectives.
        straggler: the rank that the others wait for; None if there is none.
        lines: the lines in which ranks are longest.
    """

    steps: int
    step_s: float
    parts: dict[int, tuple[float, ...]]
    late: dict[int, Lateness]
    straggler: Straggler | None
    lines: tuple[Line, ...]


def analyse(timelines: Mapping[int, Timeline]) -> Findings:
    """Compare ranks.

    Args:
        timelines: rank -> what it did.
    """
    arrivals = _arrivals(timelines)
    last_at = {key: max(each.values()) for key, each in arrivals.items()}
    steps = min((each.steps for each in timelines.values()), default=0)
    parts: dict[int, tuple[float, ...]] = {}
    times: dict[int, dict[Place, float]] = {}
    for rank, each in timelines.items():
        count = each.steps if steps else 1
        spans = _parts(each, last_at)
        used = [length(span) / count for span in spans]
        parts[rank] = (*used, max(0.0, (each.end - each.start) / count - sum(used)))
        times[rank] = _by_place(each, union([*spans[1], *spans[2]]), count)
    step_s = statistics.fmean(sum(each) for each in parts.values()) if parts else 0.0
    late = lateness(list(arrivals.values()))
    straggler = _straggler(late, times, steps, step_s) if _is_steady(arrivals, timelines, late) else None
    return Findings(steps, step_s, parts, late, straggler, _lines(times))


def _arrivals(timelines: Mapping[int, Timeline]) -> dict[Key, dict[int, float]]:
    """Return when ranks have arrived at each collective in the steps, of which all the ranks that take part are known."""
    found: defaultdict[Key, dict[int, float]] = defaultdict(dict)
    for rank, each in timelines.items():
        for call in each.collectives:  # the first steps of an optimizer import and compile, and do not count
            if not each.marks or each.marks[0] <= call.start <= each.marks[-1]:
                found[call.key][rank] = call.start
    return {
        key: ranks
        for key, ranks in found.items()
        if len(ranks) > 1 and set(key[1] or timelines) & set(timelines) <= set(ranks)
    }


def _parts(timeline: Timeline, last_at: Mapping[Key, float]) -> tuple[Spans, ...]:
    """Return when a rank computed, waited for others, transferred, and waited for its loader; each moment counts once."""
    waits, transfers = [], []
    for call in timeline.collectives:
        last = min(call.end, last_at.get(call.key, call.start))
        waits.append((call.start, last))
        transfers.append((max(call.start, last), call.end))
    loader = timeline.loader
    compute = minus(timeline.compute, loader)
    busy = union([*compute, *loader])
    waiting = minus(within(union(waits), timeline.start, timeline.end), busy)
    transfer = minus(within(union(transfers), timeline.start, timeline.end), union([*busy, *waiting]))
    return compute, waiting, transfer, loader


def _by_place(timeline: Timeline, idle: Spans, count: int) -> dict[Place, float]:
    """Return the time in each line in a step, without the time in which the rank waits in collectives."""
    samples = [each for each in timeline.samples if timeline.start <= each.at <= timeline.end]
    found: defaultdict[Place, float] = defaultdict(float)
    for each, is_idle in zip(samples, contains(idle, [each.at for each in samples])):
        if each.place is not None and not is_idle:
            found[each.place] += each.lasts_s / count
    return dict(found)


def _costs_most(late: Mapping[int, Lateness]) -> int:
    """The rank for which the others wait longest."""
    return max(late, key=lambda each: late[each].lost_s)


def _is_steady(
    arrivals: Mapping[Key, Mapping[int, float]], timelines: Mapping[int, Timeline], late: Mapping[int, Lateness]
) -> bool:
    """Whether the rank for which the others wait longest is the same one in most steps, or, without steps, in most waits."""
    if not late:
        return False
    rank = _costs_most(late)
    marks = timelines[rank].marks
    if len(marks) <= LEAST:
        return late[rank].last >= max(LEAST, _MOSTLY * late[rank].of)
    lost: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for each in arrivals.values():
        *_, second, last = sorted(each.values())
        lost[bisect(marks, last)][max(each, key=each.__getitem__)] += last - second
    steps = [lost[step] for step in range(1, len(marks)) if step in lost]
    most = sum(max(each, key=each.__getitem__) == rank for each in steps)
    return most >= max(LEAST, _MOSTLY * len(steps))


def _straggler(
    late: Mapping[int, Lateness], times: Mapping[int, Mapping[Place, float]], steps: int, step_s: float
) -> Straggler | None:
    """Describe the rank for which the others wait longest, if they lose much time to it."""
    rank = _costs_most(late)
    found = late[rank]
    if found.lost_s < _SHARE * step_s * max(1, steps):
        return None
    more = _more(times, rank)
    by_function: defaultdict[tuple[str, str], float] = defaultdict(float)
    for place, more_s in more.items():
        if more_s > 0:
            by_function[place.file, place.function] += more_s
    if not by_function:
        return Straggler(rank, found)
    function, more_s = max(by_function.items(), key=lambda each: each[1])
    if more_s < _EXPLAINED * found.lost_s / max(1, steps):
        return Straggler(rank, found)
    place = max((each for each in more if (each.file, each.function) == function), key=more.__getitem__)
    return Straggler(rank, found, place, more_s)


def _more(times: Mapping[int, Mapping[Place, float]], rank: int) -> dict[Place, float]:
    """Return for each line of a rank how much longer it takes than the median of the other ranks."""
    others = [each for other, each in times.items() if other != rank]
    return {
        place: seconds - statistics.median(each.get(place, 0.0) for each in others)
        for place, seconds in times[rank].items()
        if others
    }


def _lines(times: Mapping[int, Mapping[Place, float]]) -> tuple[Line, ...]:
    places: Sequence[Place] = list(dict.fromkeys(place for each in times.values() for place in each))
    found = []
    for place in places:
        on = {rank: each.get(place, 0.0) for rank, each in times.items()}
        most = max(on, key=on.__getitem__)
        found.append(Line(place, statistics.fmean(on.values()), on[most], most))
    return tuple(sorted(found, key=lambda line: -line.mean_s)[:_MAX_LINES])
