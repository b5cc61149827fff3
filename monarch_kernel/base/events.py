"""What the views are told: frozen snapshots and events, plain data that any face (text, HTML, widget, panel) can draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = [
    "CurvePoint",
    "CurveView",
    "DetachedView",
    "HostState",
    "HostView",
    "HostsView",
    "KeptError",
    "KnobView",
    "LoopView",
    "MeshView",
    "OutputEvent",
    "RankState",
    "RankView",
    "StopEvent",
    "ThroughputEvent",
]

RankState = Literal["starting", "idle", "running", "failed", "dead", "stopped"]
HostState = Literal["starting", "up", "lost", "released"]


@dataclass(frozen=True, slots=True)
class HostView:
    """One host as the controller sees it now.

    Attributes:
        number: of the host in its session.
        name: of the machine; empty while it is not up.
        state: ``lost`` means that it has ended, was given up, or never came; ``released`` that it was given back.
        why: how it was lost, in words.
        log: the last lines of a lost one.
        is_unheard: whether it was given up because nothing was ever heard of it, and its engine knows of nothing wrong.
    """

    number: int
    name: str
    state: HostState
    why: str = ""
    log: tuple[str, ...] = ()
    is_unheard: bool = False


@dataclass(frozen=True, slots=True)
class HostsView:
    """A mesh of hosts as the controller sees it now.

    Attributes:
        engine: who has given them, such as ``Slurm``; empty for this machine itself.
        hosts: by flat rank.
        waits_for: what the engine says of those that are not up yet, such as ``Slurm: Resources``; empty for nothing.
    """

    engine: str
    hosts: tuple[HostView, ...]
    waits_for: str = ""

    def count(self, state: HostState) -> int:
        """How many are in a state."""
        return sum(host.state == state for host in self.hosts)


class RankView(NamedTuple):
    """One rank as the controller sees it now; a tuple, for it is made a thousand times in an update of a large mesh.

    Attributes:
        rank: flat rank in its mesh.
        point: axis -> coordinate, in axis order.
        state: ``failed`` means alive and idle, and its last cell or call raised.
        activity: what it runs, such as ``cell [5]`` or ``trainer.step``; empty when idle.
        running_s: for how long it has run that, in seconds.
        host: name of the machine.
        pid: process id there; 0 while starting.
        device: ``cpu``, ``cuda:0`` ...
        rss_nbytes: resident memory at the last reading; 0 if unknown.
        cpu_percent: processor use at the last reading, 100 is one core.
        last_error: headline of its last failure since its last success; for a dead rank how it died.
        last_line: the last line it wrote.
        restarts: how many processes were in this place before.
        in_bytes_per_s: how fast it takes bytes in, from other processes, as the last second had it.
        out_bytes_per_s: how fast it sends them out.
        gpu_nbytes: memory of its GPU that is taken, by whomever, at the last reading.
        gpu_total_nbytes: memory that this GPU has; 0 if it has none, or nothing is known.
        gpu_percent: of the time, that in which something ran on it.
    """

    rank: int
    point: tuple[tuple[str, int], ...]
    state: RankState
    activity: str = ""
    running_s: float = 0.0
    host: str = ""
    pid: int = 0
    device: str = "cpu"
    rss_nbytes: int = 0
    cpu_percent: float = 0.0
    last_error: str = ""
    last_line: str = ""
    restarts: int = 0
    in_bytes_per_s: float = 0.0
    out_bytes_per_s: float = 0.0
    gpu_nbytes: int = 0
    gpu_total_nbytes: int = 0
    gpu_percent: float = 0.0


class KnobView(NamedTuple):
    """A knob of a loop; ``low`` and ``high`` are None where it has no such bound."""

    name: str
    value: int | float | str | bool | None
    low: float | None = None
    high: float | None = None


class CurvePoint(NamedTuple):
    """Some steps of a curve.

    Attributes:
        step: the last of them.
        mean: over steps and ranks; nan if no value was a number.
        least: the least value of a rank, each a mean over its steps where it has told only that.
        most: the greatest.
    """

    step: int
    mean: float
    least: float
    most: float


class CurveView(NamedTuple):
    """What was logged under a name.

    Attributes:
        name: of it.
        last: mean over ranks of what each has logged last; nan if one has logged that.
        by_rank: flat rank and what it has logged last.
        points: few enough to draw; of a long curve one stands for several steps.
        ends: the ranks with the least and the greatest value in the last step that is known of all, with these; one rank
            alone, if it has logged no finite number; none, if all have logged the same, or no such step is known.
    """

    name: str
    last: float
    by_rank: tuple[tuple[int, float], ...] = ()
    points: tuple[CurvePoint, ...] = ()
    ends: tuple[tuple[int, float], ...] = ()


class LoopView(NamedTuple):
    """A loop that is steered, as the controller sees it now.

    Attributes:
        key: request and number, which tell loops apart.
        mesh: name of the mesh of its ranks.
        where: in which it runs, such as ``cell [5]``.
        step: that the slowest rank is at; of a loop that is over how many were begun.
        steps: how many there are; None if it has no end.
        state: ``running``, ``paused`` (then all ranks stand before the same step, or will) or ``over``.
        age_s: how long ago it was begun.
        step_s: seconds that a step takes the slowest rank.
        knobs: that can be turned.
        curves: what is logged.
        per_s: ``samples``, ``tokens`` and ``flops`` that all ranks together do in a second, where they are logged.
        mfu: model FLOP utilisation: these ``flops`` as a part of what the devices can do; None where that is not known.
    """

    key: tuple[int, int]
    mesh: str
    where: str
    step: int
    steps: int | None
    state: Literal["running", "paused", "over"]
    age_s: float
    step_s: float = 0.0
    knobs: tuple[KnobView, ...] = ()
    curves: tuple[CurveView, ...] = ()
    per_s: tuple[tuple[str, float], ...] = ()
    mfu: float | None = None


@dataclass(frozen=True, slots=True)
class MeshView:
    """One mesh of processes as the controller sees it now.

    Attributes:
        name: as in ``%mesh up NAME``.
        axes: axis -> size, in order.
        ranks: by flat rank.
        where: engine and hosts, such as ``local`` or ``ray, 4 hosts``.
        age_s: seconds since it was brought up.
        lost_hosts: those of its hosts that are lost, by what they are called.
        strangers: where connections of strangers were refused, and how many; the controller's machine is "".
        loops: that its ranks are in, without the points of their curves; if they are in none, the last one.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    ranks: tuple[RankView, ...]
    where: str = "local"
    age_s: float = 0.0
    lost_hosts: tuple[HostView, ...] = ()
    strangers: tuple[tuple[str, int], ...] = ()
    loops: tuple[LoopView, ...] = ()


@dataclass(frozen=True, slots=True)
class DetachedView:
    """A mesh that outlives its kernels.

    Attributes:
        name: of the mesh.
        axes: axis and size, in order.
        runs: for each rank the cell it runs, empty if none; None if it is dead. None at all where that is not known.
        detached_s: how long it has had no kernel, in seconds.
        owner: pid of the kernel that has it; 0 if none has.
        where: what is known instead of ``runs``, in words.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    runs: tuple[str | None, ...]
    detached_s: float
    owner: int
    where: str = ""


@dataclass(frozen=True, slots=True)
class OutputEvent:
    """Text that a rank wrote.

    Attributes:
        request: id of the cell or call that was running when it was written; 0 if none was.
        rank: flat rank in its mesh.
        stream: ``stdout`` or ``stderr``.
        text: what was written, any number of lines, perhaps not ending in one.
        dropped_lines: lines left out before ``text`` because the rank wrote faster than can be shown.
        mesh: name of the rank's mesh.
    """

    request: int
    rank: int
    stream: Literal["stdout", "stderr"]
    text: str
    dropped_lines: int = 0
    mesh: str = ""


@dataclass(frozen=True, slots=True)
class KeptError:
    """A failure whose frames a rank keeps for a post-mortem.

    Attributes:
        request: that failed.
        kind: as in `Failure`.
        headline: the error in one line.
        where: the innermost line of the user's own code, such as ``cell [5], line 3``.
    """

    request: int
    kind: str
    headline: str
    where: str


@dataclass(frozen=True, slots=True)
class StopEvent:
    """The code that a rank runs for a request stands still in the debugger, and waits for a line of input.

    Attributes:
        proc: number of the rank's process.
        rank: flat rank in its mesh.
        mesh: name of the mesh.
        request: that stands still.
        note: what that is, such as ``cell [5]`` or ``counter.add``.
        turn: number of the prompt.
        where: the line that comes next.
        text: what the debugger has said.
        prompt: that it shows.
        begins: whether the code ran until now, and is not between two commands.
        since: when it stopped, on the controller's monotonic clock.
        is_waiting: whether it waits for a line, and does not carry out the last one.
    """

    proc: int
    rank: int
    mesh: str
    request: int
    note: str
    turn: int
    where: str
    text: str
    prompt: str
    begins: bool
    since: float
    is_waiting: bool = True


@dataclass(frozen=True, slots=True)
class ThroughputEvent:
    """How fast bytes go to and from ranks of a mesh; told while they do, about twice a second, and once more when none do.

    Attributes:
        mesh: name of the mesh; empty for the program itself.
        ranks: flat rank -> bytes a second that it has taken in and sent out, for each of the last 60 seconds, oldest first.
            The last is how fast they go now. Ranks where it is all the same as before, that is 0, are not in it.
    """

    mesh: str
    ranks: dict[int, tuple[tuple[float, float], ...]]
