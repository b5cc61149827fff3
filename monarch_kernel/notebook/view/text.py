"""Formats meshes and their ranks as text and as static HTML: for terminals, saved notebooks and screen readers.

A sign and a word show each state; colour carries no extra information.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from monarch_kernel.base.events import DetachedView, MeshView, RankState, RankView
from monarch_kernel.base.text import Column, aligned, format_nbytes, format_seconds, html_table, one_line, plain, plural
from monarch_kernel.errors import format_ranks
from monarch_kernel.notebook.view.loops import loop_text
from monarch_kernel.notebook.view.pictures import curves_html
from monarch_kernel.notebook.view.tensors import tensors_text
from monarch_kernel.notebook.view.trajectories import trajectories_html

__all__ = ["detached_text", "late_text", "mesh_html", "mesh_line", "mesh_text", "meshes_text"]

NO_MESH = "No mesh is up. Bring one up with: %mesh up NAME -n 4"
DETACHED = "Meshes outside this kernel (%mesh attach NAME attaches one, %mesh down NAME ends one):"

_SIGNS: dict[RankState, str] = {
    "starting": "…",
    "idle": "○",
    "running": "▶",
    "failed": "✗",
    "dead": "†",
    "stopped": "■",
}
_COLORS: dict[RankState, str] = {
    "running": "var(--jp-success-color1, #2e7d32)",
    "failed": "var(--jp-error-color1, #d32f2f)",
    "dead": "var(--jp-error-color1, #d32f2f)",
}
_MAX_RANKS = 32  # a larger mesh lists only the ranks that need attention
_MAX_NOTED = 16
_MAX_LONGEST = 4
_MAX_LOST = 4
_MAX_ERROR = {"text": 80, "html": 200}


def mesh_line(view: MeshView) -> str:
    """Format one mesh in a line, without its ranks, if all of them are well; else as a table."""
    return mesh_text(view) if any(rank.state in ("failed", "dead") for rank in view.ranks) else one_line(_caption(view))


def mesh_text(view: MeshView) -> str:
    """Format one mesh and its ranks as a table with aligned columns."""
    shown, rest = _ranks_to_show(view)
    lines = [one_line(_caption(view))]
    if shown:
        columns = _columns(view, shown, "text")
        lines += aligned(columns)
    if rest:
        lines.append(rest)
    return "\n".join([*lines, *map(one_line, _below(view))])


def mesh_html(view: MeshView, at: float | None = None) -> str:
    """Format one mesh, its ranks, curves and samples as HTML that needs neither a script nor a style sheet.

    Args:
        view: the state of the mesh; only curves with points are drawn.
        at: when that was its state, in seconds since 1970, for a reader who sees the table later.
    """
    shown, rest = _ranks_to_show(view)
    below = [*([rest] if rest else []), *_below(view)]

    def mark(row: int, title: str, content: str) -> str:
        if title != "state":
            return content
        sign, word = content.split(" ", 1)
        state = shown[row].state
        color = f"color:{_COLORS[state]}" if state in _COLORS else ""
        # The word repeats the sign, so a screen reader can skip the sign.
        return f'<span aria-hidden="true" style="{color}">{sign}</span> {word}'

    columns = _columns(view, shown, "html") if shown else ()
    caption = _caption(view) + ("" if at is None else f" (as of {_moment(at)})")
    table = html_table(caption, columns, below, mark=mark, wraps=("last error",))
    # A live view next to it hides it by this class.
    return f'<div class="mk-static">{table}{curves_html(view.loops)}{trajectories_html(view)}</div>'


def _below(view: MeshView) -> list[str]:
    return [
        *map(loop_text, view.loops),
        *(wait.text for wait in view.waits),
        *(tensors_text(view.tensors, len(view.ranks)) if view.tensors is not None else []),
        *([view.record] if view.record else []),
        *_lost_hosts(view),
        *_refused_connections(view),
    ]


def _moment(at: float) -> str:
    """Format a moment with its date and time zone: a saved notebook is read on other days, and elsewhere."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def detached_text(views: Sequence[DetachedView]) -> str:
    """Format meshes that are not attached to this kernel, one per line."""
    lines = aligned(
        [
            ("name", [view.name for view in views], False),
            ("axes", [" ".join(f"{axis}={size}" for axis, size in view.axes) for view in views], False),
            ("ranks", [view.where or _runs(view.runs) for view in views], False),
            (
                "kernel",
                [
                    f"pid {view.owner}" if view.owner else f"none for {format_seconds(view.detached_s)}"
                    for view in views
                ],
                False,
            ),
        ]
    )
    return "\n".join([DETACHED, *lines])


def _runs(runs: Sequence[str | None]) -> str:
    counts = Counter("dead" if one is None else f"running {one}" if one else "idle" for one in runs)
    return ", ".join(f"{count:,} {what}" for what, count in counts.items())


def meshes_text(views: Sequence[MeshView]) -> str:
    """Format all meshes, one per line, as ``%mesh`` prints them."""
    if not views:
        return NO_MESH
    return "\n".join(
        aligned(
            [
                ("name", [view.name for view in views], False),
                ("axes", [_axes(view) for view in views], False),
                ("ranks", [_states(view.ranks) for view in views], False),
                ("where", [view.where for view in views], False),
                ("up for", [_age(view) for view in views], True),
                *([("latest", latest, False)] if any(latest := [_latest(view.ranks) for view in views]) else []),
            ]
        )
    )


def _columns(view: MeshView, ranks: Sequence[RankView], output_format: str) -> list[Column]:
    """Make the columns of the rank table, without empty ones."""
    columns: list[Column] = [("rank", [str(rank.rank) for rank in ranks], True)]
    if len(view.axes) > 1:
        columns.append(("point", [", ".join(f"{axis}={at}" for axis, at in rank.point) for rank in ranks], False))
    if len({rank.host for rank in view.ranks}) > 1:
        columns.append(("host", [rank.host for rank in ranks], False))
    columns += [
        ("state", [f"{_SIGNS[rank.state]} {rank.state}" for rank in ranks], False),
        ("activity", [_activity(rank) for rank in ranks], False),
        ("device", [rank.device for rank in ranks], False),
        ("memory", [format_nbytes(rank.rss_nbytes) if rank.rss_nbytes else "" for rank in ranks], True),
        ("gpu memory", [_gpu_memory(rank) for rank in ranks], True),
        ("gpu", [f"{rank.gpu_percent:.0f} %" if rank.gpu_total_nbytes else "" for rank in ranks], True),
        ("in", [_rate(rank.in_bytes_per_s) for rank in ranks], True),
        ("out", [_rate(rank.out_bytes_per_s) for rank in ranks], True),
        ("late", [late_text(rank) for rank in ranks], True),
        ("restarts", [str(rank.restarts or "") for rank in ranks], True),
        ("last error", [_one_line(_error(rank), _MAX_ERROR[output_format]) for rank in ranks], False),
    ]
    return [column for column in columns if any(column[1]) or column[0] in ("rank", "state")]


def _error(rank: RankView) -> str:
    """Return the last error of a rank; a rank that runs has had it before."""
    return f"earlier: {rank.last_error}" if rank.last_error and rank.state == "running" else rank.last_error


def late_text(rank: RankView) -> str:
    """How late a rank arrives at collectives: ``24 ms, last in 55 of 60``; empty if that is not known."""
    if not rank.collectives:
        return ""
    ms = 1000 * rank.late_s
    late = format_seconds(rank.late_s) if ms >= 999.5 else f"{ms:.0f} ms" if ms >= 9.95 else f"{ms:.1f} ms"
    return f"{late}, last in {rank.last} of {rank.collectives}"


def _latest(ranks: Sequence[RankView]) -> str:
    """The rank that is the last one in most collectives, and how late it is."""
    latest = max(ranks, key=lambda rank: rank.last / max(1, rank.collectives), default=None)
    return f"[{latest.rank}] {text}" if latest is not None and (text := late_text(latest)) else ""


def _rate(bytes_per_s: float) -> str:
    return f"{format_nbytes(bytes_per_s)}/s" if bytes_per_s else ""


def _gpu_memory(rank: RankView) -> str:
    if not rank.gpu_total_nbytes:
        return ""
    return f"{format_nbytes(rank.gpu_nbytes)} of {format_nbytes(rank.gpu_total_nbytes)}"


def _activity(rank: RankView) -> str:
    if not rank.activity:
        return ""
    activity = _one_line(rank.activity, 60)
    return f"{activity} for {format_seconds(rank.running_s)}" if rank.state == "running" else activity


def _caption(view: MeshView) -> str:
    n_ranks = len(view.ranks)
    ranks = plural(n_ranks, "rank")
    states = f" ({_states(view.ranks)})" if view.ranks else ""
    axes = f"{_axes(view)}, " if view.axes else ""
    age = _age(view)
    return f"{view.name}: {axes}{ranks}{states}, {view.where}{f', up for {age}' if age else ''}"


def _age(view: MeshView) -> str:
    """Format for how long a mesh has been up; empty if a rank has not been up yet, or all were stopped."""
    is_stopped = bool(view.ranks) and all(rank.state == "stopped" for rank in view.ranks)
    return "" if is_stopped or not view.is_up else format_seconds(view.age_s)


def _axes(view: MeshView) -> str:
    return " ".join(f"{axis}={size}" for axis, size in view.axes)


def _states(ranks: Sequence[RankView]) -> str:
    counts = Counter(rank.state for rank in ranks)
    return ", ".join(f"{counts[state]:,} {state}" for state in _SIGNS if counts[state])


def _ranks_to_show(view: MeshView) -> tuple[Sequence[RankView], str]:
    """Choose the ranks to list, and summarise the others in a sentence."""
    if len(view.ranks) <= _MAX_RANKS:
        return view.ranks, ""
    broken = [rank for rank in view.ranks if rank.state in ("dead", "failed")]
    running = [rank for rank in view.ranks if rank.state == "running"]
    longest = sorted(running, key=lambda rank: (-rank.running_s, rank.rank))[:_MAX_LONGEST]
    # Dead ranks take precedence over failed ones if not all fit.
    noted = sorted(broken, key=lambda rank: (rank.state != "dead", rank.rank))[: _MAX_NOTED - len(longest)]
    listed = {rank.rank for rank in noted + longest}
    shown = [rank for rank in view.ranks if rank.rank in listed]
    others = [rank for rank in view.ranks if rank.rank not in listed]
    hidden = [rank.rank for rank in broken if rank.rank not in listed]
    rest = f"and {len(others):,} more: {_states(others)}"
    if hidden:
        rest += f"; dead or failed: {format_ranks(hidden)}"
    return shown, rest


def _lost_hosts(view: MeshView) -> list[str]:
    """Format a line for each lost host, with the reason, up to a limit."""
    lost = view.lost_hosts
    n_more = len(lost) - _MAX_LOST
    named = [f"host {host.name or host.number} is lost: {_one_line(host.why, 160)}" for host in lost[:_MAX_LOST]]
    more = [f"and {plural(n_more, 'more host')} {'is' if n_more == 1 else 'are'} lost"] if n_more > 0 else []
    remedy = (
        [f"%mesh heal {view.name} requests {'a replacement' if len(lost) == 1 else 'replacements'}"] if lost else []
    )
    return [*named, *more, *remedy]


def _refused_connections(view: MeshView) -> list[str]:
    """Format a line that says where connections without the session's keys were refused."""
    total = sum(count for _, count in view.refused_connections)
    if not total:
        return []
    most = sorted(view.refused_connections, key=lambda each: -each[1])
    named = [f"{count:,} {f'at {name}' if name else 'here'}" for name, count in most[:_MAX_LOST]]
    more = [f"others at {plural(len(most) - _MAX_LOST, 'more host')}"] if len(most) > _MAX_LOST else []
    return [f"refused {plural(total, 'connection')} without the keys of this session: {', '.join([*named, *more])}"]


def _one_line(text: str, max_length: int) -> str:
    """Return the first line of ``text``, shortened and safe to print in a table."""
    first = plain(text).strip().split("\n")[0].replace("\t", " ").rstrip()
    return first if len(first) <= max_length else first[: max_length - 1] + "…"
