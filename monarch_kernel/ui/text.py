"""Meshes and their ranks as text and as static HTML: for terminals, saved notebooks and screen readers.

States are told by a sign and a word; colour is only added. The HTML takes its colours from JupyterLab's theme where
there is one, and else from the page, so it fits light and dark.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html import escape

from monarch_kernel.errors import format_ranks
from monarch_kernel.events import DetachedView, MeshView, RankState, RankView

__all__ = [
    "detached_text",
    "format_nbytes",
    "format_seconds",
    "mesh_html",
    "mesh_text",
    "meshes_text",
    "plain",
]

NO_MESH = "No mesh is up. Bring one up with: %mesh up NAME -n 4"
DETACHED = "Not in this kernel (%mesh attach NAME takes one up, %mesh down NAME ends it):"

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
_MAX_RANKS = 32  # above this only ranks that need attention are listed
_MAX_NOTED = 16
_MAX_LONGEST = 4
_MAX_LOST = 4
_MAX_ERROR = {"text": 80, "html": 200}
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")

_TABLE_STYLE = (
    "border-collapse:collapse;font-variant-numeric:tabular-nums;"
    "color:var(--jp-ui-font-color1, inherit);background:transparent;margin:0.25em 0"
)
_CAPTION_STYLE = (
    "caption-side:top;text-align:left;white-space:nowrap;padding:0.25em 0;color:var(--jp-ui-font-color1, inherit)"
)
_CELL_STYLE = (
    "padding:0.2em 1em 0.2em 0;text-align:{align};vertical-align:top;white-space:{wrap};background:transparent"
)
_RULE = "border-bottom:1px solid var(--jp-border-color2, rgba(128, 128, 128, 0.4))"


def format_nbytes(nbytes: float) -> str:
    """Write a number of bytes in binary units: ``512 B``, ``1.5 KiB``, ``12 MiB``."""
    if nbytes < 1023.5:
        return f"{nbytes:.0f} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if value < 9.95:
            return f"{value:.1f} {unit}"
        if value < 1023.5:
            return f"{value:.0f} {unit}"
    return f"{value:,.0f} PiB"


def format_seconds(seconds: float) -> str:
    """Write a duration with two figures that matter: ``0.3 s``, ``12 s``, ``4 min 05 s``, ``2 h 03 min``."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def plain(text: str) -> str:
    """Text without colours and other terminal controls; newlines and tabs stay."""
    return _CONTROL.sub("", text)


def mesh_text(view: MeshView) -> str:
    """One mesh and its ranks, as a table with aligned columns."""
    shown, rest = _ranks_to_show(view)
    lines = [_caption(view)]
    if shown:
        columns = _columns(view, shown, "text")
        lines += _aligned(columns)
    if rest:
        lines.append(rest)
    return "\n".join([*lines, *_lost_hosts(view), *_strangers(view)])


def mesh_html(view: MeshView) -> str:
    """One mesh and its ranks, as an HTML table that needs neither script nor style sheet."""
    shown, rest = _ranks_to_show(view)
    caption = escape(_caption(view))
    name, colon, more = caption.partition(":")
    rows: list[str] = []
    if shown:
        (titles, *body), right = _transposed(_columns(view, shown, "html"))
        head = "".join(
            f'<th scope="col" style="{_cell_style(is_right)};{_RULE}">{escape(title)}</th>'
            for title, is_right in zip(titles, right, strict=True)
        )
        rows.append(f"<thead><tr>{head}</tr></thead>")
        rows.append("<tbody>")
        for rank, row in zip(shown, body, strict=True):
            rows.append(_html_row(rank, row, titles, right))
        rows.append("</tbody>")
        below = [*([rest] if rest else []), *_lost_hosts(view), *_strangers(view)]
        if below:
            span = f'colspan="{len(titles)}" style="{_cell_style(False, wrap=True)}"'
            feet = "".join(f"<tr><td {span}>{escape(line)}</td></tr>" for line in below)
            rows.append(f"<tfoot>{feet}</tfoot>")
    return (
        f'<table style="{_TABLE_STYLE}"><caption style="{_CAPTION_STYLE}">'
        f"<strong>{name}</strong>{colon}{more}</caption>{''.join(rows)}</table>"
    )


def detached_text(views: Sequence[DetachedView]) -> str:
    """Meshes that this kernel has not, one a line."""
    lines = _aligned(
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
    """All meshes, one a line: what ``%mesh`` prints."""
    if not views:
        return NO_MESH
    return "\n".join(
        _aligned(
            [
                ("name", [view.name for view in views], False),
                ("axes", [_axes(view) for view in views], False),
                ("ranks", [_states(view.ranks) for view in views], False),
                ("where", [view.where for view in views], False),
                ("up for", [format_seconds(view.age_s) for view in views], True),
            ]
        )
    )


# A column: its title, its cells, and whether it is aligned to the right.
_Column = tuple[str, list[str], bool]


def _columns(view: MeshView, ranks: Sequence[RankView], face: str) -> list[_Column]:
    """The columns of the rank table; those that would be empty are left out."""
    columns: list[_Column] = [("rank", [str(rank.rank) for rank in ranks], True)]
    if len(view.axes) > 1:
        columns.append(("point", [", ".join(f"{axis}={at}" for axis, at in rank.point) for rank in ranks], False))
    if len({rank.host for rank in view.ranks}) > 1:
        columns.append(("host", [rank.host for rank in ranks], False))
    columns += [
        ("state", [f"{_SIGNS[rank.state]} {rank.state}" for rank in ranks], False),
        ("activity", [_activity(rank) for rank in ranks], False),
        ("device", [rank.device for rank in ranks], False),
        ("memory", [format_nbytes(rank.rss_nbytes) if rank.rss_nbytes else "" for rank in ranks], True),
        ("restarts", [str(rank.restarts or "") for rank in ranks], True),
        ("last error", [_one_line(rank.last_error, _MAX_ERROR[face]) for rank in ranks], False),
    ]
    return [column for column in columns if any(column[1]) or column[0] in ("rank", "state")]


def _activity(rank: RankView) -> str:
    if not rank.activity:
        return ""
    activity = _one_line(rank.activity, 60)
    return f"{activity} for {format_seconds(rank.running_s)}" if rank.state == "running" else activity


def _caption(view: MeshView) -> str:
    n_ranks = len(view.ranks)
    ranks = f"{n_ranks:,} rank{'' if n_ranks == 1 else 's'}"
    states = f" ({_states(view.ranks)})" if view.ranks else ""
    axes = f"{_axes(view)}, " if view.axes else ""
    return f"{view.name}: {axes}{ranks}{states}, {view.where}, up for {format_seconds(view.age_s)}"


def _axes(view: MeshView) -> str:
    return " ".join(f"{axis}={size}" for axis, size in view.axes)


def _states(ranks: Sequence[RankView]) -> str:
    counts = Counter(rank.state for rank in ranks)
    return ", ".join(f"{counts[state]:,} {state}" for state in _SIGNS if counts[state])


def _ranks_to_show(view: MeshView) -> tuple[Sequence[RankView], str]:
    """The ranks to list, and a sentence about the others."""
    if len(view.ranks) <= _MAX_RANKS:
        return view.ranks, ""
    broken = [rank for rank in view.ranks if rank.state in ("dead", "failed")]
    running = [rank for rank in view.ranks if rank.state == "running"]
    longest = sorted(running, key=lambda rank: (-rank.running_s, rank.rank))[:_MAX_LONGEST]
    # The dead come before the failed if there is no room for all.
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
    """A line for each host that is lost, and why; of many, for some."""
    lost = view.lost_hosts
    named = [f"host {host.name or host.number} is lost: {_one_line(host.why, 160)}" for host in lost[:_MAX_LOST]]
    more = [f"and {len(lost) - _MAX_LOST} more hosts are lost"] if len(lost) > _MAX_LOST else []
    remedy = [f"%mesh heal {view.name} asks for {'another' if len(lost) == 1 else 'others'}"] if lost else []
    return [*named, *more, *remedy]


def _strangers(view: MeshView) -> list[str]:
    """A line that says where strangers have knocked."""
    total = sum(count for _, count in view.strangers)
    if not total:
        return []
    most = sorted(view.strangers, key=lambda each: -each[1])
    named = [f"{count:,} {f'at {name}' if name else 'here'}" for name, count in most[:_MAX_LOST]]
    more = [f"others at {len(most) - _MAX_LOST} more hosts"] if len(most) > _MAX_LOST else []
    what = "1 connection" if total == 1 else f"{total:,} connections"
    return [f"{what} of strangers, without the keys of this session, refused: {', '.join([*named, *more])}"]


def _one_line(text: str, max_length: int) -> str:
    """The first line of ``text``, shortened, safe to print in a table."""
    first = plain(text).strip().split("\n")[0].replace("\t", " ").rstrip()
    return first if len(first) <= max_length else first[: max_length - 1] + "…"


def _aligned(columns: Sequence[_Column]) -> list[str]:
    padded = []
    for title, cells, is_right in columns:
        width = max(len(cell) for cell in (title, *cells))
        padded.append([cell.rjust(width) if is_right else cell.ljust(width) for cell in (title, *cells)])
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def _transposed(columns: Sequence[_Column]) -> tuple[list[tuple[str, ...]], list[bool]]:
    """Rows, the titles first, and which columns are aligned to the right."""
    return list(zip(*((title, *cells) for title, cells, _ in columns), strict=True)), [right for _, _, right in columns]


def _html_row(rank: RankView, row: Sequence[str], titles: Sequence[str], right: Sequence[bool]) -> str:
    cells = []
    for text, title, is_right in zip(row, titles, right, strict=True):
        content = escape(text)
        if title == "state":
            sign, word = content.split(" ", 1)
            color = f"color:{_COLORS[rank.state]}" if rank.state in _COLORS else ""
            # The word says the same: a screen reader need not try to name the sign.
            content = f'<span aria-hidden="true" style="{color}">{sign}</span> {word}'
        style = _cell_style(is_right, wrap=title == "last error")
        if title == "rank":
            cells.append(f'<th scope="row" style="{style};font-weight:inherit">{content}</th>')
        else:
            cells.append(f'<td style="{style}">{content}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _cell_style(is_right: bool, wrap: bool = False) -> str:
    return _CELL_STYLE.format(align="right" if is_right else "left", wrap="normal" if wrap else "nowrap")
