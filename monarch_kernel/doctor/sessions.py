"""Checks of sessions: what killed ones left behind, errors of this one, and a test session with an agent, a rank and a cell."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

from monarch_kernel.base.directories import temporary_directory
from monarch_kernel.base.own_log import ForwardingHandler
from monarch_kernel.base.text import format_nbytes, format_seconds, one_line
from monarch_kernel.doctor.children import ask_python
from monarch_kernel.doctor.report import Finding, Sign
from monarch_kernel.runtime.controller.stale_sessions import left

__all__ = ["RANK_S", "background", "leftovers", "rank"]

RANK_S = 60.0
"""How long a rank may take to start and to end: torch may have to be loaded over a network."""


def leftovers() -> Iterator[Finding]:
    """List directories of sessions whose kernel and agent were killed, and detached meshes."""
    from monarch_kernel.errors import AttachError
    from monarch_kernel.runtime.detached.registry import default_root, find

    detached = []
    for home in find(default_root(os.environ, temporary_directory())):
        try:
            detached.append(f"{home.name} (its kernel has ended)" if home.look() and home.since() else home.name)
        except (AttachError, OSError):
            continue
    meshes = f"; detached meshes: {', '.join(detached)}" if detached else ""
    directories = left()
    if not directories:
        yield Finding("leftovers", Sign.OK, f"no directories of killed sessions{meshes}")
        return
    found = f"{len(directories)} of killed sessions: {', '.join(directories)}{meshes}"
    yield Finding("leftovers", Sign.WARNING, found, "nothing to do: your next kernel or script removes them")


def background() -> Iterator[Finding]:
    """Count the errors of background work in this kernel, which no cell shows."""
    errors = ForwardingHandler.errors
    if errors.number:
        at = time.strftime("%H:%M:%S", time.localtime(errors.at))
        found = (
            f"{errors.number:,} error{'s' * (errors.number != 1)} in the log, the last at {at}: {one_line(errors.last)}"
        )
        remedy = "the log of the Jupyter server has the tracebacks; report them, with this list"
        yield Finding("background work", Sign.WARNING, found, remedy)


def rank() -> Iterator[Finding]:
    """Check that a rank starts, runs a cell, and ends together with its session."""
    started = time.monotonic()
    said = ask_python("from monarch_kernel.doctor.trial_rank import main; main()", RANK_S)
    report: dict[str, Any] = {}  # the last step, and its result or error
    for line in said.out.splitlines():
        if line.startswith("{"):  # skips what a library prints
            report.update(json.loads(line))
    if "result" not in report:
        doing = report.get("step", "starting the program")
        why = report.get("error") or said.trouble
        remedy = "a problem above may be the cause; else see docs/troubleshooting.md, 'A mesh does not come up'"
        yield Finding("test rank", Sign.PROBLEM, f"failed while {doing}: {why}", remedy)
        return
    result = report["result"]
    found = (
        f"started in {format_seconds(result['up_s'])}, ran a cell with torch (using {format_nbytes(result['rss_nbytes'])}), "
        f"and ended in {format_seconds(result['down_s'])}; {format_seconds(time.monotonic() - started)} in total"
    )
    if result["left"]:
        remedy = f"kill -9 {' '.join(map(str, result['left']))}; and report it, with this list"
        yield Finding("test rank", Sign.PROBLEM, f"{found}; its processes have not ended", remedy)
    else:
        yield Finding("test rank", Sign.OK, found)
