"""Describes the state of meshes as JSON frames for browsers: each is complete, and small enough for five frames a second.

*Protocol.* The widget in a cell, the panel of JupyterLab and `notebook.clients` use the same messages: JSON objects with a
``kind``. A browser sends:

- ``hello``: it starts to show meshes and has no state. The kernel answers with a ``history`` and a ``frame``.
- ``alive``: it still shows meshes. It repeats this every `ALIVE_S` seconds. The kernel assumes that a browser is gone after
  `GONE_S` without it, since a closed page sends nothing.
- ``away``: it shows no meshes for now, for example because the page is hidden.
- ``command``: ``id``, ``command``, ``mesh``, and arguments. One of `COMMANDS` takes ``ranks`` (a list; all by default),
  ``abort``, and ``count`` (lines of ``logs``). `PROFILE` takes ``ranks``, ``count`` and ``seconds``. One of `LOOP_COMMANDS`
  takes ``loop`` (request and number, as in `LoopFrame`), ``count`` for ``step``, ``knob`` and ``value`` for ``set``. `RECORD`
  takes no mesh. The kernel answers with a ``reply``.

The kernel sends:

- ``frame``: the fields of `ViewState`. Frames may be lost; the next one is complete.
- ``curves``: ``mesh``, and ``loops``: for each `LoopFrame` its ``request``, ``number``, and ``curves``, name -> [steps, means,
  minima, maxima, ends, ranks of the minima, ranks of the maxima] of the logged values. Minima, maxima and their ranks are empty
  if minima and maxima equal the means. Ends are the last values of the ranks with the smallest and the largest value, [[rank,
  value], [rank, value]]; of one rank, if its value is not finite; or of none, if all ranks logged the same value. Numbers that
  are not finite are null. ``earlier`` has the curves of the loops of the mesh that ended before, each with its ``where``: the
  last `EARLIER` of them, the oldest first; if it is omitted, they are those of the last message. The kernel sends curves after
  a ``hello``, and then at most once a second, if they have changed.
- ``trajectories``: ``mesh``, ``count``, and ``samples``: the last samples of `live.trajectory`, the newest first, each [rank,
  version, reward, prompt, completion]. A version or reward that is not known is null, and a reward that is not finite a text.
  They are sent as curves are.
- ``history``: ``meshes``, name -> bytes per second received and sent, [[in, out], ...], for each of the last 60 seconds.
- ``reply``: ``id``, ``ok``, ``text``: the result of the command, or the reason why it failed.

Times are in seconds since 1970 by the clock of the kernel, so the kernel sends nothing merely because time passes. A browser
computes the offset of its clock from `ViewState.at`. Fields that have their default are omitted, except ``version``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarch_kernel.base.events import CurveView, LoopView, MeshView, RankState, RankView, TensorsView, WaitView
from monarch_kernel.base.text import plain
from monarch_kernel.errors import format_ranks
from monarch_kernel.notebook.view.loops import loader_text
from monarch_kernel.notebook.view.text import late_text

__all__ = [
    "ALIVE_S",
    "CARDS",
    "COMMANDS",
    "EARLIER",
    "GONE_S",
    "LOOP_COMMANDS",
    "PROFILE",
    "RECORD",
    "TARGET",
    "VERSION",
    "ErrorFrame",
    "KnobFrame",
    "LoopFrame",
    "MeshFrame",
    "RankFrame",
    "TensorsFrame",
    "ViewState",
    "WaitFrame",
    "curves_message",
    "mesh_frame",
    "pack_states",
    "to_json",
    "unpack_states",
]

TARGET = "monarch_kernel.view"
"""Target name of the comms that panels open."""

VERSION = 1
"""Version of the protocol; a browser with an older version asks the user to reload the page."""

ALIVE_S = 5.0
GONE_S = 15.0

CARDS = 32
"""Frames describe each rank of a mesh of up to this size; of larger meshes, they have all states and a few ranks."""

COMMANDS = ("interrupt", "heal", "restart", "down", "traceback", "stacks", "logs")

PROFILE = "profile"
RECORD = "record"
"""Further commands, for which browsers have no button: profile a mesh, and say what the record of the run holds."""

LOOP_COMMANDS = ("pause", "resume", "step", "stop", "set")

STATES: tuple[RankState, ...] = ("starting", "idle", "running", "failed", "dead", "stopped")

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_NOTED = 3
_MAX_ERRORS = 4
_MAX_ERRORS_OF_MANY = 2
_MAX_LOOPS = 3
_MAX_LINES = 8
EARLIER = 3
"""Loops that have ended, whose curves a browser can draw with those of the current ones."""

_MAX_OF_LOOP = 24
_MAX_TEXT = 200
_MAX_WAIT = 500
_SHORT_TEXT = 60
_STEADY_S = 0.3
"""A start time that is computed from a duration is the previous one if it differs by less than this."""


@dataclass(frozen=True, slots=True)
class RankFrame:
    """The state of one rank.

    Attributes:
        rank: flat rank in its mesh.
        state: one of `STATES`.
        activity: what it runs, such as ``cell [5]``; empty when idle.
        since: when the activity started.
        line: the current line of the user's code, such as ``cell [5], line 3``, if known.
        waits: the collective that it waits in, such as ``all_reduce``, if known.
        said: the last line that it wrote.
        error: headline of its last failure, or how it died; empty in a large mesh, where `MeshFrame.errors` has it. A rank that
            runs has had the error before.
        host: name of the machine, if the mesh spans several.
        pid: process id on that machine.
        device: ``cpu``, ``cuda:0`` ...
        rss: resident memory in bytes.
        cpu: processor use in percent; 100 is one core.
        in_rate: bytes per second that it receives.
        out_rate: bytes per second that it sends.
        restarts: number of earlier processes of this rank.
        gpu_used: used memory of its GPU, in bytes.
        gpu_total: total memory of its GPU; 0 if it has none, or if unknown.
        gpu_use: share of time in which the GPU was busy, in percent.
        error_at: when it failed or died.
        late: how late it arrives at collectives, such as ``24 ms, last in 55 of 60``; empty if that is not known.
    """

    rank: int
    state: str
    activity: str = ""
    since: float = 0.0
    line: str = ""
    waits: str = ""
    said: str = ""
    error: str = ""
    host: str = ""
    pid: int = 0
    device: str = ""
    rss: int = 0
    cpu: int = 0
    in_rate: int = 0
    out_rate: int = 0
    restarts: int = 0
    gpu_used: int = 0
    gpu_total: int = 0
    gpu_use: int = 0
    error_at: float = 0.0
    late: str = ""


@dataclass(frozen=True, slots=True)
class ErrorFrame:
    """One distinct error, and the ranks that have it.

    Attributes:
        text: headline of the error.
        ranks: the ranks that have it, such as ``[0-3,7]``.
        rank: the first of these ranks, which a request for the traceback names.
        count: number of these ranks.
        is_death: whether the error ended their processes.
        at: when the first of these ranks had it; 0 if that is not known, here and in `RankFrame`.
        is_past: whether the ranks run something else by now.
    """

    text: str
    ranks: str
    rank: int
    count: int
    is_death: bool = False
    at: float = 0.0
    is_past: bool = False


@dataclass(frozen=True, slots=True)
class WaitFrame:
    """A wait in a collective that lasts, or something else that a watch reports.

    Attributes:
        text: one line that describes it.
        ranks: the ranks that wait, such as ``[0,2]``; empty if it is no wait.
        missing: the ranks that they wait for; empty if none is missing.
    """

    text: str
    ranks: str
    missing: str = ""


@dataclass(frozen=True, slots=True)
class KnobFrame:
    """A knob of a loop, with its value and bounds."""

    name: str
    value: int | float | str | bool | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class LoopFrame:
    """The state of a live loop.

    Attributes:
        request: identifies the loop, together with ``number``.
        number: counts the loops of a request.
        where: the code that runs the loop, such as ``cell [5]``.
        state: ``running``, ``pausing``, ``paused``, ``stopping`` or ``over``.
        since: when it started.
        step: the current step of the slowest rank, counted from 0.
        steps: total number of steps; None if the loop has no end.
        step_s: seconds per step, without pauses.
        knobs: the knobs of the loop.
        metrics: name, and mean over ranks of the last logged value; None if the mean is not finite.
        per_s: ``samples``, ``tokens`` and ``flops`` per second, summed over ranks.
        mfu: model FLOP utilisation, from 0 to 1; None if unknown.
        took: how long it took, in seconds; 0 if it is not over.
        left_s: seconds that the remaining steps take, without pauses; None if unknown.
        loader: how long ranks wait for their DataLoader, such as ``loader 31 % of a step``; empty if none uses one.
    """

    request: int
    number: int
    where: str
    state: str
    since: float
    step: int = 0
    steps: int | None = None
    step_s: float = 0.0
    knobs: tuple[KnobFrame, ...] = ()
    metrics: tuple[tuple[str, float | None], ...] = ()
    per_s: tuple[tuple[str, float], ...] = ()
    mfu: float | None = None
    took: float = 0.0
    left_s: float | None = None
    loader: str = ""


@dataclass(frozen=True, slots=True)
class TensorsFrame:
    """The distributed tensors on a mesh.

    Attributes:
        count: how many there are.
        nbytes: their memory on the rank that holds most, in bytes.
        outstanding: operations that some rank has not done.
        lines: the lines that made those with the most memory: each with its tensors, their bytes on a rank, and the ranks that
            hold them, such as ``[0-1]``; empty for all.
        more: number of lines that are omitted.
    """

    count: int
    nbytes: int
    outstanding: int = 0
    lines: tuple[tuple[str, int, int, str], ...] = ()
    more: int = 0


@dataclass(frozen=True, slots=True)
class MeshFrame:
    """The state of one mesh.

    Attributes:
        name: as in ``%mesh up NAME``.
        axes: axes and their sizes, in order.
        where: engine and hosts, such as ``local``.
        since: when all of its ranks were up; 0 if one has not been up yet.
        counts: state -> number of ranks in it; states without ranks are omitted.
        states: for a mesh with more than `CARDS` ranks, the states of all, as `pack_states` writes them; else empty.
        ranks: all ranks, by flat rank; for a larger mesh, the ranks that most need attention.
        errors: distinct errors; those on most ranks first.
        more_errors: number of distinct errors that are omitted.
        in_rate: bytes per second that its ranks receive together.
        out_rate: bytes per second that its ranks send together.
        notes: other messages, such as lost hosts.
        loops: the loops that its ranks run, or the last one.
        waits: waits in collectives that last, and what the watch of live loops reports.
        links: what its links can carry in each direction, such as ``eth0 12 GiB/s``; empty if no speed is known.
        tensors: the distributed tensors on its ranks; None if there are none.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    where: str
    since: float
    counts: dict[str, int]
    states: str = ""
    ranks: tuple[RankFrame, ...] = ()
    errors: tuple[ErrorFrame, ...] = ()
    more_errors: int = 0
    in_rate: int = 0
    out_rate: int = 0
    notes: tuple[str, ...] = ()
    loops: tuple[LoopFrame, ...] = ()
    waits: tuple[WaitFrame, ...] = ()
    links: str = ""
    tensors: TensorsFrame | None = None


@dataclass(frozen=True, slots=True)
class ViewState:
    """The state of all meshes at one moment.

    Attributes:
        at: time of the frame.
        meshes: the meshes, in the order in which they came up.
        seq: counts frames.
        version: version of the protocol.
        coming: what a mesh that comes up waits for; empty if none comes up.
    """

    at: float
    meshes: tuple[MeshFrame, ...] = ()
    seq: int = 0
    version: int = VERSION
    coming: str = ""


def mesh_frame(
    view: MeshView, at: float, last: MeshFrame | None = None, doing: dict[int, tuple[str, str]] | None = None
) -> MeshFrame:
    """Make the frame of a mesh.

    Args:
        view: the state of the mesh.
        at: the current time, in seconds since 1970.
        last: the previous frame; fields that have not changed keep its values.
        doing: rank -> the current line of the user's code and the collective that it waits in, as far as they are known.
    """
    is_large = len(view.ranks) > CARDS
    before = {rank.rank: rank for rank in last.ranks} if last is not None else {}
    counts: dict[str, int] = {}
    for rank in view.ranks:
        counts[rank.state] = counts.get(rank.state, 0) + 1
    shown = _noted(view.ranks) if is_large else view.ranks
    shows_host = len({rank.host for rank in view.ranks}) > 1
    errors = _errors(view.ranks, at, last.errors if last is not None else (), _SHORT_TEXT if is_large else _MAX_TEXT)
    n_errors = _MAX_ERRORS_OF_MANY if is_large else _MAX_ERRORS
    return MeshFrame(
        view.name,
        view.axes,
        view.where,
        _steady(at - view.age_s, last.since if last is not None else 0.0) if view.is_up else 0.0,
        {state: counts[state] for state in STATES if state in counts},
        pack_states([rank.state for rank in view.ranks]) if is_large else "",
        tuple(
            _rank_frame(rank, at, before.get(rank.rank), (doing or {}).get(rank.rank, ("", "")), is_large, shows_host)
            for rank in shown
        ),
        tuple(errors[:n_errors]),
        max(0, len(errors) - n_errors),
        round(sum(rank.in_bytes_per_s for rank in view.ranks)),
        round(sum(rank.out_bytes_per_s for rank in view.ranks)),
        (
            *(
                f"host {host.name or host.number} is lost: {_short(host.why, _MAX_TEXT)}"
                for host in view.lost_hosts[:_NOTED]
            ),
            *([_short(view.record, _MAX_TEXT)] if view.record else []),
        ),
        tuple(_loop_frame(loop, at, last.loops if last is not None else ()) for loop in view.loops[-_MAX_LOOPS:]),
        tuple(map(_wait_frame, view.waits[:_NOTED])),
        _short(view.links, _MAX_TEXT),
        None if view.tensors is None else _tensors_frame(view.tensors, len(view.ranks)),
    )


def _tensors_frame(tensors: TensorsView, n_ranks: int) -> TensorsFrame:
    lines = tuple(
        (
            _short(each.line, _MAX_TEXT),
            each.tensors,
            each.nbytes,
            "" if len(each.ranks) == n_ranks else _short(format_ranks(each.ranks), _SHORT_TEXT),
        )
        for each in tensors.lines[:_MAX_LINES]
    )
    return TensorsFrame(
        tensors.tensors, tensors.nbytes, tensors.outstanding, lines, max(0, len(tensors.lines) - _MAX_LINES)
    )


def curves_message(mesh: str, loops: Sequence[LoopView], earlier: Sequence[LoopView] = ()) -> dict[str, Any]:
    """Make the ``curves`` message of some loops.

    Args:
        mesh: name of the mesh.
        loops: the loops that the frames have.
        earlier: loops that have ended before.
    """
    return {
        "kind": "curves",
        "mesh": mesh,
        "loops": [
            {"request": loop.key[0], "number": loop.key[1], "curves": _curves(loop)} for loop in loops[-_MAX_LOOPS:]
        ],
        "earlier": [
            {"where": _short(loop.where, _SHORT_TEXT), "curves": _curves(loop)} for loop in earlier if loop.curves
        ],
    }


def _curves(loop: LoopView) -> dict[str, list[list[Any]]]:
    return {_short(curve.name, _SHORT_TEXT): _curve(curve) for curve in loop.curves[:_MAX_OF_LOOP]}


def _curve(curve: CurveView) -> list[list[Any]]:
    points = curve.points
    is_line = all(point.least == point.most for point in points if math.isfinite(point.mean))
    spread = [] if is_line else points
    return [
        [point.step for point in points],
        [_figures(point.mean) for point in points],
        [_figures(point.least) for point in spread],
        [_figures(point.most) for point in spread],
        [[rank, _figures(value)] for rank, value in curve.ends],
        [point.least_rank for point in spread],
        [point.most_rank for point in spread],
    ]


def _loop_frame(loop: LoopView, at: float, last: Sequence[LoopFrame]) -> LoopFrame:
    before = next((each.since for each in last if (each.request, each.number) == loop.key), 0.0)
    return LoopFrame(
        *loop.key,
        loop.where,
        loop.state,
        _steady(at - loop.age_s, before),
        loop.step,
        loop.steps,
        _figures(loop.step_s) or 0.0,
        tuple(KnobFrame(*knob) for knob in loop.knobs[:_MAX_OF_LOOP]),
        tuple((_short(curve.name, _SHORT_TEXT), _figures(curve.last)) for curve in loop.curves[:_MAX_OF_LOOP]),
        tuple((name, _figures(rate) or 0.0) for name, rate in loop.per_s),
        None if loop.mfu is None else _figures(loop.mfu),
        (_figures(loop.age_s) or 0.0) if loop.state == "over" else 0.0,
        None if loop.left_s is None else _figures(loop.left_s),
        loader_text(loop),
    )


def _wait_frame(wait: WaitView) -> WaitFrame:
    ranks, missing = (format_ranks(each) if each else "" for each in (wait.ranks, wait.missing))
    return WaitFrame(_short(wait.text, _MAX_WAIT), _short(ranks, _SHORT_TEXT), _short(missing, _SHORT_TEXT))


def _figures(value: float) -> float | None:
    """Round a number to visible precision; None if it is not finite, which JSON can't express."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _rank_frame(
    rank: RankView, at: float, last: RankFrame | None, doing: tuple[str, str], is_short: bool, shows_host: bool
) -> RankFrame:
    max_text = _SHORT_TEXT if is_short else _MAX_TEXT
    frame = RankFrame(
        rank.rank,
        rank.state,
        _short(rank.activity, _SHORT_TEXT),
        0.0 if not rank.activity else _steady(at - rank.running_s, last.since if last is not None else 0.0),
        *(doing if rank.state == "running" else ("", "")),
        said="" if is_short else _short(rank.last_line, max_text),
        error="" if is_short else _short(rank.last_error, max_text),
        host=rank.host if shows_host else "",
        restarts=rank.restarts,
    )
    if is_short:
        return frame
    return dataclasses.replace(
        frame,
        pid=rank.pid,
        device=rank.device,
        rss=rank.rss_nbytes,
        cpu=round(rank.cpu_percent),
        in_rate=round(rank.in_bytes_per_s),
        out_rate=round(rank.out_bytes_per_s),
        gpu_used=rank.gpu_nbytes,
        gpu_total=rank.gpu_total_nbytes,
        gpu_use=round(rank.gpu_percent),
        error_at=_error_at(at, rank, last.error_at if last is not None else 0.0),
        late=late_text(rank),
    )


def _noted(ranks: Sequence[RankView]) -> list[RankView]:
    """Choose the ranks that most need attention: dead ones, failed ones, then the longest-running ones."""
    weight = {"dead": 0, "failed": 1, "running": 2}
    listed = [rank for rank in ranks if rank.state in weight]
    return sorted(listed, key=lambda rank: (weight[rank.state], -rank.running_s, rank.rank))[:_NOTED]


def _errors(ranks: Sequence[RankView], at: float, last: Sequence[ErrorFrame], max_text: int) -> list[ErrorFrame]:
    """Fold equal errors; those that ranks have had before what they run now come last."""
    by_error: dict[tuple[str, bool, bool], list[RankView]] = {}
    for rank in ranks:
        if rank.last_error and rank.state in ("failed", "dead", "running"):
            key = (rank.last_error, rank.state == "dead", rank.state == "running")
            by_error.setdefault(key, []).append(rank)
    before = {(each.text, each.is_death, each.is_past, each.rank): each.at for each in last}
    found = []
    for (error, is_death, is_past), its_ranks in by_error.items():
        text, first = _short(error, max_text), its_ranks[0]
        since = before.get((text, is_death, is_past, first.rank), 0.0)
        named = _short(format_ranks([rank.rank for rank in its_ranks]), _SHORT_TEXT)
        found.append(
            ErrorFrame(text, named, first.rank, len(its_ranks), is_death, _error_at(at, first, since), is_past)
        )
    return sorted(found, key=lambda each: (each.is_past, -each.count, each.rank))


def pack_states(states: Sequence[RankState]) -> str:
    """Pack the states of many ranks, two per character: a base-36 digit is six times the first state plus the second.

    States are indices into `STATES`; a last state without a second one is packed with 0.
    """
    numbers = [STATES.index(state) for state in states]
    if len(numbers) % 2:
        numbers.append(0)
    return "".join(_DIGITS[6 * one + other] for one, other in zip(numbers[::2], numbers[1::2]))


def unpack_states(packed: str, count: int) -> list[RankState]:
    """Return the states that `pack_states` has packed.

    Args:
        packed: the packed states.
        count: number of states.
    """
    pairs = [divmod(_DIGITS.index(digit), len(STATES)) for digit in packed]
    return [STATES[state] for pair in pairs for state in pair][:count]


def to_json(frame: Any) -> dict[str, Any]:
    """Convert a frame, or a part of one, to a JSON object without the fields that have their default."""
    found: dict[str, Any] = {}
    for each in dataclasses.fields(frame):
        value = getattr(frame, each.name)
        if value != each.default or each.name == "version":
            found[each.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_json(value)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def _steady(since: float, last: float) -> float:
    """Return a start time; the previous one if the two differ by less than `_STEADY_S`."""
    return last if abs(since - last) < _STEADY_S else round(since, 1)


def _error_at(at: float, rank: RankView, last: float) -> float:
    return _steady(at - rank.failed_s, last) if rank.last_error and rank.failed_s else 0.0


def _short(text: str, max_length: int) -> str:
    first = plain(text).strip().split("\n")[0].replace("\t", " ").rstrip()
    return first if len(first) <= max_length else first[: max_length - 1] + "…"
