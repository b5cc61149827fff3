"""Snapshots and events for views: frozen plain data that any front end (text, HTML, widget, panel) can draw."""

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
    "LoopState",
    "LoopView",
    "MeshView",
    "OutputEvent",
    "RankState",
    "RankView",
    "StopEvent",
    "TensorLineView",
    "TensorsView",
    "ThroughputEvent",
    "TrajectoryView",
]

RankState = Literal["starting", "idle", "running", "failed", "dead", "stopped"]
HostState = Literal["starting", "up", "lost", "released"]
LoopState = Literal["running", "pausing", "paused", "stopping", "over"]


@dataclass(frozen=True, slots=True)
class HostView:
    """One host as the controller sees it now.

    Attributes:
        number: of the host in its session.
        name: of the machine; empty while it is not up.
        state: ``lost`` means that it has ended, was given up, or never came up; ``released`` that it was given back.
        why: how it was lost, as text.
        log: the last lines of the log of a lost host.
        is_silent: whether it was given up because it never sent anything, although its engine reports no problem.
    """

    number: int
    name: str
    state: HostState
    why: str = ""
    log: tuple[str, ...] = ()
    is_silent: bool = False


@dataclass(frozen=True, slots=True)
class HostsView:
    """A mesh of hosts as the controller sees it now.

    Attributes:
        engine: the engine that provides them, such as ``Slurm``; empty for this machine itself.
        hosts: by flat rank.
        waits_for: what the engine reports about hosts that are not up yet, such as ``Slurm: Resources``; empty if nothing.
    """

    engine: str
    hosts: tuple[HostView, ...]
    waits_for: str = ""

    def count(self, state: HostState) -> int:
        """Count the hosts in a state."""
        return sum(host.state == state for host in self.hosts)


class RankView(NamedTuple):
    """One rank as the controller sees it now; a tuple, since an update of a large mesh makes a thousand of them.

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
        last_error: headline of its last failure since its last success; for a dead rank, how it died.
        last_line: the last line it wrote.
        restarts: how many processes the rank had before.
        in_bytes_per_s: bytes that it received from other processes in the last second.
        out_bytes_per_s: bytes that it sent in the last second.
        gpu_nbytes: memory of its GPU in use, by any process, at the last reading.
        gpu_total_nbytes: total memory of this GPU; 0 if there is no GPU, or nothing is known.
        gpu_percent: percentage of the time in which something ran on the GPU.
        failed_s: how long ago the last error was, in seconds; 0 without an error.
        late_s: how long after the first rank it has arrived at collectives lately, as a median, in seconds.
        last: in how many of these collectives it was the last rank.
        collectives: how many they are: those of the last seconds in which ranks have waited long; 0 if that is not known.
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
    failed_s: float = 0.0
    late_s: float = 0.0
    last: int = 0
    collectives: int = 0


class KnobView(NamedTuple):
    """A knob of a live loop; ``low`` and ``high`` are None if it has no such bound."""

    name: str
    value: int | float | str | bool | None
    low: float | None = None
    high: float | None = None


class CurvePoint(NamedTuple):
    """One point of a curve, which stands for one or more steps.

    Attributes:
        step: the last of its steps.
        mean: the mean over steps and ranks; nan if no value was a number.
        least: the least value of a rank; for a rank that reports only means, the mean over its steps.
        most: the greatest value of a rank, likewise.
        least_rank: the rank that has logged the least value; -1 if no value was a number.
        most_rank: the rank that has logged the greatest value, likewise.
    """

    step: int
    mean: float
    least: float
    most: float
    least_rank: int = -1
    most_rank: int = -1


class CurveView(NamedTuple):
    """The values logged under one name.

    Attributes:
        name: the name.
        last: mean over ranks of the last value of each; nan if one of them is.
        by_rank: flat rank and its last value.
        points: few enough to draw; a point of a long curve stands for several steps.
            ends: the ranks with the least and the greatest value in the last step known for all ranks, and these values; only
                one rank if it has logged no finite number; empty if all have logged the same, or no such step is known.
    """

    name: str
    last: float
    by_rank: tuple[tuple[int, float], ...] = ()
    points: tuple[CurvePoint, ...] = ()
    ends: tuple[tuple[int, float], ...] = ()


class LoopView(NamedTuple):
    """A live loop, as the controller sees it now.

    Attributes:
            key: request and number, which distinguish loops.
            mesh: name of the mesh of its ranks.
            where: the cell or call in which it runs, such as ``cell [5]``.
            step: the step of the slowest rank, counted from 0; for a loop that is over, how many steps were started. A rank
                that fails does not set it back.
            steps: how many there are; None if it has no end.
            state: ``running``, ``pausing`` (ranks still run up to the step before which all will wait), ``paused``,
                ``stopping`` (ranks still run up to the step before which all will end), or ``over``.
            age_s: how long ago it started; for a loop that is over, how long it took.
            step_s: seconds that a step takes the slowest rank, without pauses.
            knobs: that can be turned.
            curves: what is logged.
            per_s: ``samples``, ``tokens`` and ``flops`` that all ranks together do in a second, if they are logged.
            mfu: model FLOP utilisation: these ``flops`` as a part of what the devices can do; None if that is not known.
            refused: why the last name that a rank has reported, and that is not kept, is not; empty if all are kept.
            left_s: seconds that the remaining steps take, without pauses; None if that is not known.
            loader: flat rank and the share of its steps in which it waits for a DataLoader; of the ranks that use one.
    """

    key: tuple[int, int]
    mesh: str
    where: str
    step: int
    steps: int | None
    state: LoopState
    age_s: float
    step_s: float = 0.0
    knobs: tuple[KnobView, ...] = ()
    curves: tuple[CurveView, ...] = ()
    per_s: tuple[tuple[str, float], ...] = ()
    mfu: float | None = None
    refused: str = ""
    left_s: float | None = None
    loader: tuple[tuple[int, float], ...] = ()


class TrajectoryView(NamedTuple):
    """A sample that a rank has shown with `monarch_kernel.live.trajectory`.

    Attributes:
        rank: the flat rank that has shown it.
        prompt: the prompt; of a long text the beginning and the end.
        completion: what was generated, likewise.
        reward: its reward; None if it has none.
        version: the version of the weights that generated it; None if that is not known.
    """

    rank: int
    prompt: str
    completion: str
    reward: float | None = None
    version: int | None = None


class WaitView(NamedTuple):
    """A wait in a collective that lasts, or something else that a watch reports, which has no ranks.

    Attributes:
        text: one line that describes it.
        ranks: the ranks that wait.
        missing: the ranks that they wait for.
    """

    text: str
    ranks: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


class TensorLineView(NamedTuple):
    """The distributed tensors that one line of the program has made.

    Attributes:
        line: such as ``cell [7], line 1: y = f(x)``; empty if it is not known any more.
        tensors: how many there are.
        nbytes: their memory on each of their ranks.
        ranks: the ranks that hold them.
    """

    line: str
    tensors: int
    nbytes: int
    ranks: tuple[int, ...]


class TensorsView(NamedTuple):
    """The distributed tensors of the program on a mesh.

    Attributes:
        tensors: how many there are.
        nbytes: their memory on the rank that holds most.
        outstanding: how many operations were issued that some rank has not done.
        lines: the lines that made them; those with the most memory first.
    """

    tensors: int
    nbytes: int
    outstanding: int
    lines: tuple[TensorLineView, ...]


@dataclass(frozen=True, slots=True)
class MeshView:
    """One mesh of processes as the controller sees it now.

    Attributes:
        name: as in ``%mesh up NAME``.
        axes: axis -> size, in order.
        ranks: by flat rank.
        where: engine and hosts, such as ``local`` or ``ray, 4 hosts``.
        age_s: seconds since all of its ranks have been up; 0 if one has not been up yet.
        lost_hosts: its lost hosts, by name.
        refused_connections: hosts that refused unauthenticated connections, and how many; the controller's machine is "".
        loops: the loops that its ranks run, without the points of their curves; if they run none, the last one.
        waits: waits in collectives that last, and what the watch of live loops reports.
        links: what its links can carry in each direction, such as ``eth0 12 GiB/s``; empty if no speed is known.
        record: the run record that is being written, with its size; empty if there is none.
        trajectories: the last samples that its ranks have shown, the newest last.
        trajectory_count: how many samples they have shown altogether.
        tensors: the distributed tensors on its ranks; None if there are none.
        is_up: whether all of its ranks have been up. A rank that died or is replaced does not change that.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    ranks: tuple[RankView, ...]
    where: str = "local"
    age_s: float = 0.0
    lost_hosts: tuple[HostView, ...] = ()
    refused_connections: tuple[tuple[str, int], ...] = ()
    loops: tuple[LoopView, ...] = ()
    waits: tuple[WaitView, ...] = ()
    links: str = ""
    record: str = ""
    trajectories: tuple[TrajectoryView, ...] = ()
    trajectory_count: int = 0
    tensors: TensorsView | None = None
    is_up: bool = True


@dataclass(frozen=True, slots=True)
class DetachedView:
    """A detached mesh, which outlives its kernels.

    Attributes:
        name: of the mesh.
        axes: axis and size, in order.
        runs: for each rank the cell it runs, empty if none; None if it is dead. Empty tuple if that is not known.
        detached_s: how long it has had no kernel, in seconds.
        owner: pid of the kernel that is attached to it; 0 if there is none.
        where: what is known instead of ``runs``, as text.
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
        text: any number of lines; the last may be incomplete.
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
    """A failure whose frames a rank keeps for post-mortem debugging.

    Attributes:
        request: the request that failed.
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
    """A stop in the debugger: the code that a rank runs for a request has stopped, and waits for a line of input.

    Attributes:
        proc: number of the rank's process.
        rank: flat rank in its mesh.
        mesh: name of the mesh.
        request: the request whose code has stopped.
        description: what the rank does, in the words of the user, such as ``cell [5]`` or ``counter.add``.
        turn: number of the prompt.
        where: the next line to run.
        text: output of the debugger.
        prompt: the prompt that it shows.
        begins: whether the code has just stopped, rather than being between two commands.
        since: when it stopped, on the controller's monotonic clock.
        is_waiting: whether it waits for a line, rather than executing the last one.
    """

    proc: int
    rank: int
    mesh: str
    request: int
    description: str
    turn: int
    where: str
    text: str
    prompt: str
    begins: bool
    since: float
    is_waiting: bool = True


@dataclass(frozen=True, slots=True)
class ThroughputEvent:
    """Throughput of the ranks of a mesh; sent about twice a second while bytes flow, and once more when they stop.

    Attributes:
        mesh: name of the mesh; empty for the program itself.
        ranks: flat rank -> bytes that it has received and sent in each of the last 60 seconds, oldest first.
            The last pair is the current throughput. Ranks whose values are all unchanged, that is 0, are left out.
    """

    mesh: str
    ranks: dict[int, tuple[tuple[float, float], ...]]
