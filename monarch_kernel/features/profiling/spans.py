"""Sets of spans of time: sorted pairs of start and end that do not overlap. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Spans", "contains", "length", "minus", "union", "within"]

Spans = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return what any of these spans covers; they may overlap, and have any order."""
    found: Spans = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def minus(spans: Spans, others: Spans) -> Spans:
    """Return what the first set covers, and the second does not."""
    found: Spans = []
    at = 0
    for start, end in spans:
        while at < len(others) and others[at][1] <= start:
            at += 1
        each = at
        while each < len(others) and others[each][0] < end:
            if others[each][0] > start:
                found.append((start, others[each][0]))
            start = max(start, others[each][1])
            each += 1
        if start < end:
            found.append((start, end))
    return found


def within(spans: Spans, start: float, end: float) -> Spans:
    """Return the parts between two times."""
    return [(max(start, one), min(end, other)) for one, other in spans if one < end and other > start]


def length(spans: Spans) -> float:
    """Return how long they are together."""
    return sum(end - start for start, end in spans)


def contains(spans: Spans, times: Sequence[float]) -> list[bool]:
    """Tell for each of some ascending times whether it is within a span."""
    found = []
    at = 0
    for time in times:
        while at < len(spans) and spans[at][1] <= time:
            at += 1
        found.append(at < len(spans) and spans[at][0] <= time)
    return found
