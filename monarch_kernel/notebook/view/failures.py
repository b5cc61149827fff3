"""Formats failures that no actor handled as text: what failed, on which ranks, and why. Pure."""

from __future__ import annotations

from monarch_kernel.base.mesh import Extent, Point
from monarch_kernel.errors import MeshFailure, SupervisionError, format_ranks
from monarch_kernel.notebook.view.errors import error_block

__all__ = ["failure_block", "failure_line"]

_MAX_CAUSES = 4


def failure_block(failure: MeshFailure, *, color: bool) -> list[str]:
    """Format a failure that no actor handled as the lines of a message.

    Args:
        failure: the failure, as its last supervisor received it.
        color: whether to use ANSI colours.

    Returns:
        Lines without newlines.
    """
    name = failure.mesh_name
    if not failure.actor:  # ranks, which need not have actors
        until = "it is" if len(failure.reports) == 1 else "they are"
        lines = _block(failure, f"{name}{format_ranks(failure.reports)} died", color)
        return [
            *lines,
            "",
            f"Cells and calls that need {name}{format_ranks(failure.reports)} fail until {until} replaced.",
        ]
    lines = _block(failure, f"{name}{format_ranks(failure.reports)} failed, and no actor handled the failure", color)
    found, below = 1, failure.cause
    while below is not None and found < _MAX_CAUSES:
        cause = _block(below, f"{below.mesh_name}{format_ranks(below.reports)} failed", color)
        lines += ["", f"caused by: {cause[0].partition(': ')[2]}", *cause[1:]]
        found, below = found + 1, below.cause
    return [
        *lines,
        "",
        f"Calls that need {name}{format_ranks(failure.reports)} raise SupervisionError; other actors continue.",
    ]


def failure_line(failure: MeshFailure, *, color: bool) -> str:
    """Format in one line a failure that has the same cause as a failure that was shown before."""
    what = f"{failure.mesh_name}{format_ranks(failure.reports)} "
    what += (
        "failed for the same reason, and no actor handled the failure" if failure.actor else "died for the same reason"
    )
    return _block(failure, f"{what}: {failure.primary.headline().split(';')[0]}", color)[0]


def _block(failure: MeshFailure, what: str, color: bool) -> list[str]:
    places = Extent({"ranks": max(failure.reports) + 1})
    error = SupervisionError(what, {Point(rank, places): report for rank, report in failure.reports.items()})
    lines = error_block(error, color=color)
    return [lines[0].replace(SupervisionError.__name__, MeshFailure.__name__, 1), *lines[1:]]
