"""Shows the samples of a mesh: as a table in saved notebooks, and as a message for browsers."""

from __future__ import annotations

import math
from typing import Any

from monarch_kernel.base.events import MeshView, TrajectoryView
from monarch_kernel.base.text import Column, html_table, one_line, plain, plural

__all__ = ["trajectories_html", "trajectories_message"]

_ROWS = 5
_CHARACTERS = 200
"""Characters of a text in the table."""


def trajectories_html(view: MeshView) -> str:
    """Return a table of the last few samples, the newest first, as HTML without script or style sheet; empty without any."""
    samples = view.trajectories[: -_ROWS - 1 : -1]
    if not samples:
        return ""
    columns: list[Column] = [
        ("rank", [str(each.rank) for each in samples], True),
        ("version", ["" if each.version is None else str(each.version) for each in samples], True),
        ("reward", ["" if each.reward is None else f"{each.reward:.4g}" for each in samples], True),
        ("prompt", [_brief(each.prompt) for each in samples], False),
        ("completion", [_brief(each.completion) for each in samples], False),
    ]
    shown = [column for column in columns if any(column[1]) or column[0] in ("rank", "prompt", "completion")]
    caption = f"trajectories: the last {len(samples)} of {plural(view.trajectory_count, 'sample')}"
    return html_table(caption, shown, wraps=("prompt", "completion"))


def trajectories_message(view: MeshView) -> dict[str, Any]:
    """Make the ``trajectories`` message of a mesh."""
    return {
        "kind": "trajectories",
        "mesh": view.name,
        "count": view.trajectory_count,
        "samples": [_row(each) for each in reversed(view.trajectories)],
    }


def _row(sample: TrajectoryView) -> list[Any]:
    reward = sample.reward
    is_known = reward is not None and math.isfinite(reward)
    return [
        sample.rank,
        sample.version,
        float(f"{reward:.6g}") if is_known else None if reward is None else str(reward),
        plain(sample.prompt),
        plain(sample.completion),
    ]


def _brief(text: str) -> str:
    line = one_line(text.strip())
    return line if len(line) <= _CHARACTERS else f"{line[: _CHARACTERS - 1]}…"
