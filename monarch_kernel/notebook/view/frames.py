"""What browsers draw: the state of meshes as JSON, small enough for five frames a second, each complete in itself.

*Protocol.* The widget in a cell and the panel of JupyterLab speak the same, by messages that are JSON objects with a ``kind``.
What a browser says:

- ``hello``: it looks from now on, and knows nothing; answered with a ``history`` and a ``frame``.
- ``alive``: it still looks. Said every `ALIVE_S` seconds; after `GONE_S` without it nobody looks: a page that is closed
  says nothing.
- ``away``: nobody looks for now, such as when the page is hidden.
- ``command``: ``id``, ``command``, ``mesh``, and what it takes. One of `COMMANDS`: ``ranks`` (a list; all if left out), and
  ``abort``. One of `LOOP_COMMANDS`: ``loop`` (request and number, as in `LoopFrame`), ``count`` of ``step``, ``knob`` and
  ``value`` of ``set``. Answered with a ``reply``.

What the kernel says:

- ``frame``: the fields of `Frame`. Frames may be lost; the next one says all.
- ``curves``: ``mesh``, and ``loops``: for each `LoopFrame` its ``request``, ``number``, and ``curves``, name -> [steps, means,
  leasts, mosts, ends] of what was logged. Leasts and mosts are empty where they are the means. Ends are two ranks and what
  they logged last, [[rank, value], [rank, value]]: the least and the greatest; one, which logged no finite number; or none,
  where all have logged the same. What is no finite number is null. Told when a browser begins to look, and then at most once
  a second; of a loop that is not there nothing has changed.
- ``history``: ``meshes``, name -> bytes a second that came in and went out, [[in, out], ...], for each of the last 60 seconds.
- ``reply``: ``id``, ``ok``, ``text``: what the command came to, or why it could not be done.

Times are in seconds since 1970, by the clock of the kernel (`Frame.at` tells a browser by how much its own differs), so nothing
has to be sent because time passes. Fields that have their default are left out (``version`` is always there).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarch_kernel.base.events import CurveView, LoopView, MeshView, RankState, RankView
from monarch_kernel.base.text import plain
from monarch_kernel.errors import format_ranks

__all__ = [
    "ALIVE_S",
    "CARDS",
    "COMMANDS",
    "GONE_S",
    "LOOP_COMMANDS",
    "VERSION",
    "ErrorFrame",
    "Frame",
    "KnobFrame",
    "LoopFrame",
    "MeshFrame",
    "RankFrame",
    "curves_message",
    "mesh_frame",
    "pack_states",
    "to_json",
]

VERSION = 1
"""Of the protocol; a browser that knows another says so."""

ALIVE_S = 5.0
GONE_S = 15.0

CARDS = 32
"""Ranks of a mesh that are told one by one; of larger ones the state of all, and more of those that need attention."""

COMMANDS = ("interrupt", "heal", "restart", "down", "traceback", "stacks", "logs")

LOOP_COMMANDS = ("pause", "resume", "step", "stop", "set")

STATES: tuple[RankState, ...] = ("starting", "idle", "running", "failed", "dead", "stopped")

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_NOTED = 3
_MAX_ERRORS = 4
_MAX_ERRORS_OF_MANY = 2
_MAX_LOOPS = 3
_MAX_OF_LOOP = 24
_MAX_TEXT = 200
_SHORT_TEXT = 60
_STEADY_S = 0.3
"""The beginning of something, counted back from now, may seem to move by so much."""


@dataclass(frozen=True, slots=True)
class RankFrame:
    """One rank.

    Attributes:
        rank: flat rank in its mesh.
        state: one of `STATES`.
        activity: what it runs, such as ``cell [5]``; empty when idle.
        since: when it began that.
        line: the line of the user's code where it is, such as ``cell [5], line 3``, if that is known.
        waits: the collective that it waits in, such as ``all_reduce``, if that is known.
        said: the last line that it wrote.
        error: headline of its last failure, or how it died; of a large mesh the errors say it.
        host: name of the machine, where the mesh is on several.
        pid: process id there.
        device: ``cpu``, ``cuda:0`` ...
        rss: resident memory in bytes.
        cpu: processor use, 100 is one core.
        in_rate: bytes a second that it takes in.
        out_rate: bytes a second that it sends.
        restarts: how many processes were in this place before.
        gpu_used: memory of its GPU that is taken, in bytes.
        gpu_total: memory that its GPU has; 0 if it has none, or nothing is known.
        gpu_use: of the time, that in which something ran on it, in percent.
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


@dataclass(frozen=True, slots=True)
class ErrorFrame:
    """One error, of all ranks that have it.

    Attributes:
        text: its headline.
        ranks: who has it, such as ``[0-3,7]``.
        rank: the first of them, by which its traceback is asked for.
        count: how many they are.
        is_death: whether they have died of it.
    """

    text: str
    ranks: str
    rank: int
    count: int
    is_death: bool = False


@dataclass(frozen=True, slots=True)
class KnobFrame:
    """A knob of a loop, and between what it may be."""

    name: str
    value: int | float | str | bool | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class LoopFrame:
    """A loop that is steered.

    Attributes:
        request: with ``number`` it tells loops apart.
        number: counts the loops of a request.
        where: in which it runs, such as ``cell [5]``.
        state: ``running``, ``paused`` or ``over``.
        since: when it began.
        step: that the slowest rank is at.
        steps: how many there are; None if it has no end.
        step_s: seconds that a step takes.
        knobs: that can be turned.
        metrics: name and mean over ranks of what was logged last; None if that is no finite number.
        per_s: ``samples``, ``tokens`` and ``flops`` in a second, of all ranks.
        mfu: model FLOP utilisation, from 0 to 1; None if it is not known.
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


@dataclass(frozen=True, slots=True)
class MeshFrame:
    """One mesh.

    Attributes:
        name: as in ``%mesh up NAME``.
        axes: axis and size, in order.
        where: engine and hosts, such as ``local``.
        since: when it was brought up.
        counts: state -> how many ranks are in it; those without are left out.
        states: of a mesh with more than `CARDS` ranks the states of all, as `pack_states` writes them; else empty.
        ranks: all, by flat rank; of a larger mesh those that need attention most.
        errors: distinct ones, those of most ranks first.
        more_errors: how many distinct ones are not told.
        in_rate: bytes a second that its ranks take in, together.
        out_rate: bytes a second that they send.
        notes: what else is to be said, such as hosts that are lost.
        loops: that its ranks are in, or the last one.
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


@dataclass(frozen=True, slots=True)
class Frame:
    """All that is known at one moment.

    Attributes:
        at: when that was.
        meshes: in the order in which they came up.
        seq: counts frames.
        version: of the protocol.
    """

    at: float
    meshes: tuple[MeshFrame, ...] = ()
    seq: int = 0
    version: int = VERSION


def mesh_frame(
    view: MeshView, at: float, last: MeshFrame | None = None, doing: dict[int, tuple[str, str]] | None = None
) -> MeshFrame:
    """A mesh as browsers draw it.

    Args:
        view: what is known of it.
        at: the time, in seconds since 1970.
        last: the frame before, so that what has not changed looks the same.
        doing: rank -> the line of the user's code where it is, and the collective that it waits in, as far as that is known.
    """
    is_large = len(view.ranks) > CARDS
    before = {rank.rank: rank for rank in last.ranks} if last is not None else {}
    counts: dict[str, int] = {}
    for rank in view.ranks:
        counts[rank.state] = counts.get(rank.state, 0) + 1
    shown = _noted(view.ranks) if is_large else view.ranks
    tells_host = len({rank.host for rank in view.ranks}) > 1
    errors = _errors(view.ranks, _SHORT_TEXT if is_large else _MAX_TEXT)
    n_errors = _MAX_ERRORS_OF_MANY if is_large else _MAX_ERRORS
    return MeshFrame(
        view.name,
        view.axes,
        view.where,
        _steady(at - view.age_s, last.since if last is not None else 0.0),
        {state: counts[state] for state in STATES if state in counts},
        pack_states([rank.state for rank in view.ranks]) if is_large else "",
        tuple(
            _rank_frame(rank, at, before.get(rank.rank), (doing or {}).get(rank.rank, ("", "")), is_large, tells_host)
            for rank in shown
        ),
        tuple(errors[:n_errors]),
        max(0, len(errors) - n_errors),
        round(sum(rank.in_bytes_per_s for rank in view.ranks)),
        round(sum(rank.out_bytes_per_s for rank in view.ranks)),
        tuple(
            f"host {host.name or host.number} is lost: {_short(host.why, _MAX_TEXT)}"
            for host in view.lost_hosts[:_NOTED]
        ),
        tuple(_loop_frame(loop, at, last.loops if last is not None else ()) for loop in view.loops[-_MAX_LOOPS:]),
    )


def curves_message(mesh: str, loops: Sequence[LoopView]) -> dict[str, Any]:
    """What browsers are told of the curves of loops."""
    return {
        "kind": "curves",
        "mesh": mesh,
        "loops": [
            {
                "request": loop.key[0],
                "number": loop.key[1],
                "curves": {_short(curve.name, _SHORT_TEXT): _curve(curve) for curve in loop.curves[:_MAX_OF_LOOP]},
            }
            for loop in loops[-_MAX_LOOPS:]
        ],
    }


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
    )


def _figures(value: float) -> float | None:
    """As much of a number as one can see; JSON has none that is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _rank_frame(
    rank: RankView, at: float, last: RankFrame | None, doing: tuple[str, str], is_short: bool, tells_host: bool
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
        host=rank.host if tells_host else "",
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
    )


def _noted(ranks: Sequence[RankView]) -> list[RankView]:
    """Those that need attention most: the dead, the failed, then who has run for longest."""
    weight = {"dead": 0, "failed": 1, "running": 2}
    listed = [rank for rank in ranks if rank.state in weight]
    return sorted(listed, key=lambda rank: (weight[rank.state], -rank.running_s, rank.rank))[:_NOTED]


def _errors(ranks: Sequence[RankView], max_text: int) -> list[ErrorFrame]:
    who: dict[tuple[str, bool], list[int]] = {}
    for rank in ranks:
        if rank.last_error and rank.state in ("failed", "dead", "running", "idle"):
            who.setdefault((rank.last_error, rank.state == "dead"), []).append(rank.rank)
    found = sorted(who.items(), key=lambda each: (-len(each[1]), each[1][0]))
    return [
        ErrorFrame(_short(text, max_text), _short(format_ranks(those), _SHORT_TEXT), those[0], len(those), is_death)
        for (text, is_death), those in found
    ]


def pack_states(states: Sequence[RankState]) -> str:
    """States of many ranks, two in a character: a digit to the base of 36 is six times the first, plus the second.

    They count as in `STATES`; an odd one out has 0 beside it.
    """
    numbers = [STATES.index(state) for state in states]
    if len(numbers) % 2:
        numbers.append(0)
    return "".join(_DIGITS[6 * one + other] for one, other in zip(numbers[::2], numbers[1::2]))


def to_json(frame: Any) -> dict[str, Any]:
    """A frame, or a part of one, as an object of JSON; fields that have their default are left out."""
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
    """The time of a beginning, as it was told before if it is the same."""
    return last if abs(since - last) < _STEADY_S else round(since, 1)


def _short(text: str, max_length: int) -> str:
    first = plain(text).strip().split("\n")[0].replace("\t", " ").rstrip()
    return first if len(first) <= max_length else first[: max_length - 1] + "…"
