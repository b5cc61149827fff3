"""What one rank records for a profile. Plain data; times are in seconds since 1970, by the clock of the rank's machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from monarch_kernel.net.memory.counters import Transferred

__all__ = ["LOOP", "OPTIMIZER", "Place", "Recording", "Sample", "Started"]

LOOP = "live.loop"
OPTIMIZER = "the optimizer"


class Place(NamedTuple):
    """A line of the user's code, and the function that it is in."""

    file: str
    line: int
    function: str


class Sample(NamedTuple):
    """A look at the code of a rank.

    Attributes:
        at: when it was.
        lasts_s: the time since the look before, for which this one stands.
        place: the innermost line of the user's code; None if there is none.
    """

    at: float
    lasts_s: float
    place: Place | None


class Started(NamedTuple):
    """A collective that a rank has started.

    Attributes:
        group: torch's name of the process group.
        label: the name of the group for users; empty for the default one.
        members: the ranks in the group; empty if unknown.
        number: of the collective in its group.
        operation: such as ``gloo:all_reduce``.
        at: when the rank has started it.
    """

    group: str
    label: str
    members: tuple[int, ...]
    number: int
    operation: str
    at: float


@dataclass(frozen=True)
class Recording:
    """What one rank has recorded.

    Attributes:
        pid: its process id.
        machine: identifies the machine, whose clock has set the times.
        began: when the recording has started.
        ended: when it has ended.
        unit: what a step is: `LOOP`, `OPTIMIZER`, or empty if there were no steps.
        marks: the starts of steps; the last one is the end of the last step.
        samples: the looks at its code.
        collectives: those that it has started, in order.
        links: links of the machine and of the GPU whose speed is known: name, and bytes per second in each direction.
        transfers: the values, buffers and messages that it has sent or received, in the order in which they ended.
        trace: the trace of torch.profiler, as JSON compressed by gzip; empty if there is none.
        memory: a snapshot of the memory of its GPU, pickled; empty if there is none.
        held: the resident memory of the process, if that is wanted: time, and bytes.
        problem: why there is no trace; empty if there is one.
    """

    pid: int
    machine: str
    began: float
    ended: float
    unit: str = ""
    marks: tuple[float, ...] = ()
    samples: tuple[Sample, ...] = ()
    collectives: tuple[Started, ...] = ()
    trace: bytes = b""
    memory: bytes = b""
    problem: str = ""
    transfers: tuple[Transferred, ...] = ()
    links: tuple[tuple[str, float], ...] = ()
    held: tuple[tuple[float, int], ...] = ()
