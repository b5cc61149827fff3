"""The picture of a sharded tensor: which rank has which part. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

__all__ = ["Picture", "boxes_of"]

Box = tuple[tuple[int, int], ...]
"""For each dimension, the first index and the one after the last."""

_MAX_CELLS = 64
"""Number of parts that are drawn."""

_MOST_HUES = 360


def boxes_of(shape: Sequence[int], placements: Sequence[str], sizes: Sequence[int]) -> list[Box]:
    """Return the part of each rank, in the order of the ranks: an axis cuts what the axes before it have left, as torch does.

    Args:
        shape: The shape of the whole.
        placements: Along each axis, as text.
        sizes: The sizes of the axes.
    """
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    for text, count in zip(placements, sizes):
        boxes = [_cut(box, text, place, count) for box in boxes for place in range(count)]
    return boxes


def _cut(box: Box, text: str, place: int, count: int) -> Box:
    match = re.fullmatch(r"S\((\d+)\)", text)
    if match is None:
        return box
    dim = int(match[1])
    start, end = box[dim]
    chunk = -(-(end - start) // count)
    cut = min(start + chunk * place, end), min(start + chunk * (place + 1), end)
    return (*box[:dim], cut, *box[dim + 1 :])


class Picture(NamedTuple):
    """A sharded tensor as a grid of its parts.

    Attributes:
        shape: The shape of the whole.
        placements: Along each axis, as text.
        axes: The axes of the mesh, with their sizes.
        ranks: The ranks, in the order of the axes.
    """

    shape: tuple[int, ...]
    placements: tuple[str, ...]
    axes: Mapping[str, int]
    ranks: tuple[int, ...]

    @property
    def cells(self) -> dict[Box, str]:
        """Part -> the ranks that have it: ``0,2`` have the same, and ``0+1 (sum)`` make it up by the sum of theirs."""
        groups: dict[Box, dict[tuple[int, ...], list[int]]] = {}
        partial = [at for at, text in enumerate(self.placements) if text.startswith("P")]
        sizes = list(self.axes.values())
        for place, box in enumerate(boxes_of(self.shape, self.placements, sizes)):
            indexes = [place // _product(sizes[at + 1 :]) % size for at, size in enumerate(sizes)]
            others = tuple(index for at, index in enumerate(indexes) if at not in partial)
            groups.setdefault(box, {}).setdefault(others, []).append(self.ranks[place])
        how = ", ".join(dict.fromkeys(self.placements[at][2:-1] for at in partial))
        suffix = f" ({how})" if partial else ""
        return {
            box: ",".join("+".join(map(str, ranks)) for ranks in found.values()) + suffix
            for box, found in groups.items()
        }

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        hues: dict[str, int] = {}
        for text in self.cells.values():
            hues.setdefault(text, len(hues))
        lines = []
        for row in self._rows():
            cells = []
            for at, cell in enumerate(row):
                text = cell.removeprefix("ranks ").removeprefix("rank ")
                if at and text in hues:
                    hue = hues[text] * _MOST_HUES // len(hues)
                    cells.append(
                        f'<td style="background:hsla({hue},70%,50%,0.25);padding:0.4em 1em">{escape(cell)}</td>'
                    )
                else:
                    cells.append(f'<th style="text-align:left;font-weight:normal">{escape(cell)}</th>')
            lines.append(f"<tr>{''.join(cells)}</tr>")
        return f"<table>{''.join(lines)}</table>"

    def _rows(self) -> list[list[str]]:
        cells = self.cells
        cut = [dim for dim in range(len(self.shape)) if len({box[dim] for box in cells}) > 1]
        if not cut:
            return [["all of it", _ranks(next(iter(cells.values())))]]
        if len(cut) > 2 or len(cells) > _MAX_CELLS:
            shown = [[_span(box), _ranks(text)] for box, text in list(cells.items())[:_MAX_CELLS]]
            more = len(cells) - _MAX_CELLS
            return [["part", "ranks"], *shown, *([[f"and {more} more", ""]] if more > 0 else [])]
        down = sorted({box[cut[0]] for box in cells})
        names = ("rows", "columns") if len(self.shape) == 2 else [f"dim {dim}" for dim in range(len(self.shape))]
        if len(cut) == 1:
            by_cut = {box[cut[0]]: text for box, text in cells.items()}
            return [[f"{names[cut[0]]} {_range(each)}", _ranks(by_cut[each])] for each in down]
        across = sorted({box[cut[1]] for box in cells})
        grid = {(box[cut[0]], box[cut[1]]): text for box, text in cells.items()}
        head = ["", *[f"{names[cut[1]]} {_range(each)}" for each in across]]
        return [
            head,
            *[
                [f"{names[cut[0]]} {_range(row)}", *[_ranks(grid.get((row, each), "")) for each in across]]
                for row in down
            ],
        ]


def _product(numbers: Sequence[int]) -> int:
    made = 1
    for number in numbers:
        made *= number
    return made


def _ranks(text: str) -> str:
    return f"{'rank' if text.isdigit() else 'ranks'} {text}" if text else "nothing"


def _range(ends: tuple[int, int]) -> str:
    start, end = ends
    return f"{start}-{end - 1}" if end - start > 1 else f"{start}" if end > start else "none"


def _span(box: Box) -> str:
    return f"[{', '.join(f'{start}:{end}' for start, end in box)}]"
