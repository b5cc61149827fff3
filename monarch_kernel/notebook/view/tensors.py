"""Describes the distributed tensors on a mesh as text: how much memory they have, and which lines made them."""

from __future__ import annotations

from monarch_kernel.base.events import TensorsView
from monarch_kernel.base.text import format_nbytes, plural
from monarch_kernel.errors import format_ranks

__all__ = ["tensors_text"]

_LINES = 4


def tensors_text(tensors: TensorsView, n_ranks: int) -> list[str]:
    """Describe the tensors in a line, and the lines of the program that made those with the most memory."""
    waiting = f"; {plural(tensors.outstanding, 'operation')} outstanding" if tensors.outstanding else ""
    head = f"{plural(tensors.tensors, 'distributed tensor')}, {format_nbytes(tensors.nbytes)} a rank{waiting}"
    lines = [
        f"  {format_nbytes(each.nbytes)} in {plural(each.tensors, 'tensor')}"
        f"{'' if len(each.ranks) == n_ranks else f' on {format_ranks(each.ranks)}'}: {each.line or 'an earlier line'}"
        for each in tensors.lines[:_LINES]
    ]
    rest = tensors.lines[_LINES:]
    if rest:
        nbytes = format_nbytes(sum(each.nbytes for each in rest))
        lines.append(f"  {nbytes} by {plural(len(rest), 'other line')}")
    return [head, *lines]
