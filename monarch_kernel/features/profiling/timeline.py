"""What one rank did, on the clock of the controller. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from monarch_kernel.features.profiling.recording import Recording, Sample
from monarch_kernel.features.profiling.spans import Spans, within
from monarch_kernel.features.profiling.trace import RankTrace

__all__ = ["Collective", "Key", "NameOfEnd", "Timeline", "Transfer", "timeline_of"]

Key = tuple[str, tuple[int, ...], int]
"""Identifies a collective on all ranks: torch's name of its group, the ranks in the group, and its number there."""

_MATCH_S = 0.005
"""A collective in the trace starts within this time of the collective in the flight recorder."""


class Collective(NamedTuple):
    """A collective of one rank, with the times of the controller's clock.

    Attributes:
        key: identifies it on all ranks.
        label: the name of the group for users; empty for the default one.
        operation: such as ``gloo:all_reduce``.
        start: when this rank has arrived.
        end: when it was over; the same as ``start`` if that is unknown.
    """

    key: Key
    label: str
    operation: str
    start: float
    end: float


class Transfer(NamedTuple):
    """Bytes that went from one process to another, with the times of the controller's clock.

    Attributes:
        source: the process that they come from, such as ``trainers[2]``.
        target: the process that they go to.
        path: the data path.
        nbytes: how many they are.
        start: when the transfer has started; the same as ``end`` if that is unknown.
        end: when it was over.
        is_message: whether it is a ``send`` or a ``recv``, of which both ends have noted their part.
    """

    source: str
    target: str
    path: str
    nbytes: int
    start: float
    end: float
    is_message: bool = False


NameOfEnd = Callable[[int, bool], str]
"""Names a process by its number, or, if the flag is set, a rank by its number, which is -1 for the one that has recorded it."""


@dataclass(frozen=True)
class Timeline:
    """One rank, with the times of the controller's clock.

    Attributes:
        start: when the first step has started.
        end: when the last step has ended.
        steps: the number of steps; 0 if there are none.
        marks: the starts of the steps, and the end of the last one.
        compute: when it computed.
        loader: when it waited for a batch.
        collectives: what it took part in.
        samples: the looks at its code.
        transfers: what it sent and received.
        held: the resident memory of the process, if it was recorded: time, and bytes.
    """

    start: float
    end: float
    steps: int = 0
    marks: tuple[float, ...] = ()
    compute: Spans = field(default_factory=list)
    loader: Spans = field(default_factory=list)
    collectives: tuple[Collective, ...] = ()
    samples: tuple[Sample, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    held: tuple[tuple[float, int], ...] = ()


def timeline_of(
    recording: Recording,
    trace: RankTrace | None,
    steps: int,
    ahead_s: float = 0.0,
    name: NameOfEnd = lambda end, is_rank: f"[{end}]" if is_rank else str(end),
) -> Timeline:
    """Put what a rank has recorded on the clock of the controller.

    Args:
        recording: what the rank has recorded.
        trace: its trace, if it has one.
        steps: the number of steps that are wanted.
        ahead_s: by how much the clock of its machine is ahead of the controller's.
        name: names the ends of transfers.
    """
    marks = tuple(mark - ahead_s for mark in recording.marks[: steps + 1])
    if len(marks) < 2:
        marks = ()
    start, end = (marks[0], marks[-1]) if marks else (recording.began - ahead_s, recording.ended - ahead_s)

    def here(spans: Spans) -> Spans:
        return within([(one - ahead_s, other - ahead_s) for one, other in spans], start, end)

    spans = _spans_of(recording, trace)
    return Timeline(
        start,
        end,
        max(0, len(marks) - 1),
        marks,
        here(trace.compute) if trace else [],
        here(trace.loader) if trace else [],
        tuple(
            Collective(
                (each.group, each.members, each.number),
                each.label,
                each.operation,
                at - ahead_s,
                max(at, over) - ahead_s,
            )
            for each, (at, over) in zip(recording.collectives, spans)
        ),
        tuple(each._replace(at=each.at - ahead_s) for each in recording.samples),
        tuple(
            Transfer(
                name(each.source, each.is_message),
                name(each.target, each.is_message),
                each.path,
                each.nbytes,
                each.ended - each.seconds - ahead_s,
                each.ended - ahead_s,
                each.is_message,
            )
            for each in recording.transfers
        ),
        tuple((at - ahead_s, nbytes) for at, nbytes in recording.held),
    )


def _spans_of(recording: Recording, trace: RankTrace | None) -> list[tuple[float, float]]:
    """Find start and end of each collective in the trace, by its name and its start.

    On a GPU a collective starts when its kernel does, some time after the CPU has started it.
    """
    left: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for operation, start, end in trace.communication if trace else ():
        left[operation].append((start, end))
    found = []
    for each in recording.collectives:
        spans = left[each.operation]
        if trace is not None and trace.is_on_gpu:
            at = next((at for at, span in enumerate(spans) if span[0] > each.at - _MATCH_S), None)
        else:
            at = min(range(len(spans)), key=lambda at: abs(spans[at][0] - each.at), default=None)
            if at is not None and abs(spans[at][0] - each.at) > _MATCH_S:
                at = None
        if at is None:
            found.append((each.at, each.at))
        else:
            start, end = spans.pop(at)
            found.append((start, end) if trace is not None and trace.is_on_gpu else (each.at, end))
    return found
