"""Formats the frames of meshes for a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_kernel.base.text import aligned, format_nbytes, format_ranks, format_seconds, one_line
from monarch_kernel.notebook.clients.kernels import no_kernel

__all__ = ["list_text", "mesh_text"]


def list_text(kernels: Sequence[Mapping[str, Any]]) -> str:
    """Format the meshes of kernels as a table.

    Args:
        kernels: for each kernel what ``mesh list --json`` prints.
    """
    rows = [(kernel, mesh) for kernel in kernels for mesh in kernel["meshes"] or [{}]]
    if not rows:
        return no_kernel()
    return "\n".join(
        aligned(
            [
                ("mesh", [mesh.get("name", "-") for _, mesh in rows], False),
                ("axes", [_axes(mesh) for _, mesh in rows], False),
                ("ranks", [_counts(mesh) for _, mesh in rows], False),
                ("where", [mesh.get("where", "") for _, mesh in rows], False),
                ("kernel", [kernel["id"] for kernel, _ in rows], False),
                ("notebook", [kernel["notebook"] for kernel, _ in rows], False),
            ]
        )
    )


def mesh_text(mesh: Mapping[str, Any], at: float | None = None) -> str:
    """Format a mesh: its ranks as a table, and below it the loops, the waits and the errors.

    Args:
        mesh: its frame, or that of some of its ranks.
        at: the current time.
    """
    now = time.time() if at is None else at
    part = format_ranks(mesh["selected"]) if "selected" in mesh else ""
    age = f", up for {_since(mesh, now)}" if mesh["since"] else ""
    lines = [f"{mesh['name']}{part}: {_axes(mesh)}, {_counts(mesh)}, {mesh['where']}{age}"]
    ranks = mesh.get("ranks", ())
    columns = [
        ("rank", [str(rank["rank"]) for rank in ranks], True),
        ("state", [rank["state"] for rank in ranks], False),
        ("activity", [_activity(rank, now) for rank in ranks], False),
        ("pid", [str(rank.get("pid", "")) for rank in ranks], True),
        ("host", [rank.get("host", "") for rank in ranks], False),
        ("device", [rank.get("device", "") for rank in ranks], False),
        ("memory", [format_nbytes(rank["rss"]) if "rss" in rank else "" for rank in ranks], True),
        ("late", [rank.get("late", "") for rank in ranks], False),
        ("error", [rank.get("error", "") for rank in ranks], False),
    ]
    if ranks:
        lines += aligned([column for column in columns if any(column[1])])
    if "states" in mesh:
        lines.append(f"of {len(mesh['states']):,} ranks, these need attention most")
    lines += [_loop(loop) for loop in mesh.get("loops", ())]
    lines += [wait["text"] for wait in mesh.get("waits", ())]
    lines += [f"{error['ranks']} {error['text']}" for error in mesh.get("errors", ()) if "states" in mesh]
    lines += mesh.get("notes", ())
    return "\n".join(map(one_line, lines))


def _axes(mesh: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={size}" for name, size in mesh.get("axes", ()))


def _counts(mesh: Mapping[str, Any]) -> str:
    return ", ".join(f"{count:,} {state}" for state, count in mesh.get("counts", {}).items())


def _since(part: Mapping[str, Any], now: float) -> str:
    return format_seconds(max(0.0, now - part["since"]))


def _activity(rank: Mapping[str, Any], now: float) -> str:
    what = rank.get("line") or rank.get("activity", "")
    waits = f", in {rank['waits']}" if rank.get("waits") else ""
    return f"{what}{waits} for {_since(rank, now)}" if what and "since" in rank else what


def _loop(loop: Mapping[str, Any]) -> str:
    steps = f" of {loop['steps']:,}" if loop.get("steps") is not None else ""
    parts = [f"loop in {loop['where']}: {loop['state']}, step {loop.get('step', 0):,}{steps}"]
    parts += [f"{name} {'not finite' if value is None else f'{value:.5g}'}" for name, value in loop.get("metrics", ())]
    parts += [f"{knob['name']}={knob['value']!r}" for knob in loop.get("knobs", ())]
    parts += [loop["loader"]] if loop.get("loader") else []
    return "; ".join(parts)
