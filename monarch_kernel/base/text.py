"""Tables as text and as static HTML, for terminals, saved notebooks and screen readers; and the format of figures in them.

The HTML takes its colours from JupyterLab's theme, or else from the page, so it fits light and dark themes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from html import escape

__all__ = [
    "Column",
    "aligned",
    "format_nbytes",
    "format_ranks",
    "format_seconds",
    "html_table",
    "last_line",
    "logs_command",
    "one_line",
    "plain",
    "plural",
    "printable",
    "readable",
    "were",
]

Column = tuple[str, list[str], bool]
"""Title, cells, and whether the column is aligned to the right."""

_SEQUENCE = r"(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)|[\]PX^_]|[ -/]*[0-~])?"
"""What may follow ESC in a control sequence: parameters, a text up to its end on the same line, or one character."""

_CONTROL = re.compile(rf"\x1b{_SEQUENCE}|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All controls of terminals, and those that change the order of characters, so that a name looks like another."""

_EXECUTED = re.compile(rf"\x1b(?!\[[0-9;:]*m){_SEQUENCE}|[\x01-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")
"""Controls of terminals that do more than choose colours. A terminal ignores NUL."""

_REORDERS = re.compile("[\u202a-\u202e\u2066-\u2069]")
"""Characters that change the order of others."""

_MAX_LINE = 200
_LOOKED_AT = 8192

# As a block, a table scrolls where it is wider than the page, and its caption has the width of the page: as the caption of a
# box of columns it could only move the columns apart, or be cut.
_TABLE_STYLE = (
    "display:block;max-width:100%;overflow-x:auto;border-collapse:collapse;font-variant-numeric:tabular-nums;"
    "color:var(--jp-ui-font-color1, inherit);background:transparent;margin:0.25em 0"
)
_CAPTION_STYLE = (
    "display:block;text-align:left;white-space:normal;overflow-wrap:anywhere;padding:0.25em 0;"
    "color:var(--jp-ui-font-color1, inherit)"
)
_CELL_STYLE = (
    "padding:0.2em 1em 0.2em 0;text-align:{align};vertical-align:top;white-space:{wrap};background:transparent"
)
_LINE_STYLE = "color:var(--jp-ui-font-color1, inherit);font-size:var(--jp-ui-font-size1, inherit);padding:0.2em 0"
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


def logs_command(command: str, n_lines: int) -> str:
    """Return a ``%mesh logs`` command that shows at least so many of the last lines of each rank."""
    return f"{command} --lines {-(-n_lines // 1000) * 1000}"


def plural(count: int, what: str, several: str = "") -> str:
    """Format a count with its noun: ``1 host``, ``2 hosts``, ``1,024 hosts``.

    Args:
        count: the number.
        what: the noun, in the singular.
        several: the plural, where it is not the singular and an s.
    """
    return f"{count:,} {what if count == 1 else several or f'{what}s'}"


def were(count: int) -> str:
    """Return the verb after a count: ``1 rank was asked for``, ``2 ranks were asked for``."""
    return "was" if count == 1 else "were"


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as compressed ranges in brackets: ``[0-3,6]``."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return "[" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) + "]"


def format_seconds(seconds: float) -> str:
    """Write a duration with two significant figures: ``0.3 s``, ``12 s``, ``4 min 05 s``, ``2 h 03 min``."""
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
    """Remove colours and other terminal controls from a text; newlines and tabs stay."""
    return _CONTROL.sub("", text)


def one_line(text: str) -> str:
    """Return a text without terminal controls, as one line, for a place in a table or sentence."""
    return " ".join(plain(text).split("\n"))


def printable(text: str) -> str:
    """Remove terminal controls that are not colours.

    A terminal executes them: they can change its title and its clipboard, move over other lines, or make it send input.
    """
    return _EXECUTED.sub("", text)


def readable(text: str) -> str:
    """Remove terminal controls that are not colours, and characters that change the order of others, as in an error."""
    return _REORDERS.sub("", printable(text))


def last_line(text: str) -> str:
    """Return the last non-empty line, as a terminal would show it; of a progress bar its last state.

    It is cut after 200 characters, and only the end of a long text is searched.
    """
    for line in reversed(re.split(r"[\r\n]", text[-_LOOKED_AT:])):
        if shown := plain(line).strip():
            return shown[:_MAX_LINE]
    return ""


def aligned(columns: Sequence[Column]) -> list[str]:
    """Return the lines of a table, titles first."""
    padded = []
    for title, texts, is_right in columns:
        cells = [one_line(text) for text in texts]
        width = max(len(cell) for cell in (title, *cells))
        padded.append([cell.rjust(width) if is_right else cell.ljust(width) for cell in (title, *cells)])
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def html_table(
    caption: str,
    columns: Sequence[Column] = (),
    below: Sequence[str] = (),
    *,
    mark: Callable[[int, str, str], str] = lambda row, title, content: content,
    wraps: Collection[str] = (),
) -> str:
    """Return a table as HTML that needs neither script nor style sheet.

    Args:
        caption: the text before its first colon is bold.
        columns: of equal length; the first column has the names of the rows.
        below: lines below the table.
        mark: returns the HTML of a cell, given its row, the title of its column, and its escaped content.
        wraps: titles of the columns whose text may wrap.
    """
    name, colon, more = escape(one_line(caption)).partition(":")
    rows: list[str] = []
    if columns:
        head = "".join(
            f'<th scope="col" style="{_cell_style(is_right)};{_RULE}">{escape(title)}</th>'
            for title, _, is_right in columns
        )
        rows += [f"<thead><tr>{head}</tr></thead>", "<tbody>"]
        for i in range(len(columns[0][1])):
            cells = []
            for column, (title, texts, is_right) in enumerate(columns):
                content = mark(i, title, escape(plain(texts[i])))
                style = _cell_style(is_right, wrap=title in wraps)
                if column:
                    cells.append(f'<td style="{style}">{content}</td>')
                else:
                    cells.append(f'<th scope="row" style="{style};font-weight:inherit">{content}</th>')
            rows.append(f"<tr>{''.join(cells)}</tr>")
        rows.append("</tbody>")
    # In a row of the table, a long line would move the columns apart.
    lines = "".join(f'<div style="{_LINE_STYLE}">{escape(plain(line))}</div>' for line in below)
    return (
        f'<table style="{_TABLE_STYLE}"><caption style="{_CAPTION_STYLE}">'
        f"<strong>{name}</strong>{colon}{more}</caption>{''.join(rows)}</table>{lines}"
    )


def _cell_style(is_right: bool, wrap: bool = False) -> str:
    return _CELL_STYLE.format(align="right" if is_right else "left", wrap="normal" if wrap else "nowrap")
