"""What others have left, and one session that is begun and ended: an agent, a rank, a cell."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from monarch_kernel.base.text import format_nbytes, format_seconds
from monarch_kernel.doctor.children import ask_python
from monarch_kernel.doctor.report import Finding, Sign
from monarch_kernel.runtime.controller.stale_sessions import left

__all__ = ["RANK_S", "leftovers", "rank"]

RANK_S = 60.0
"""How long a rank may take to come up and to end: torch may have to be read by way of a network."""


def leftovers() -> Iterator[Finding]:
    """Directories of sessions whose kernel and agent were killed; and meshes that were to outlive theirs."""
    from monarch_kernel.errors import AttachError
    from monarch_kernel.runtime.detached.registry import default_root, find

    detached = []
    for home in find(default_root(os.environ, tempfile.gettempdir())):
        try:
            detached.append(f"{home.name} (of a kernel that has ended)" if home.look() and home.since() else home.name)
        except (AttachError, OSError):
            continue
    meshes = f"; detached meshes: {', '.join(detached)}" if detached else ""
    directories = left()
    if not directories:
        yield Finding("leftovers", Sign.OK, f"none of sessions that were killed{meshes}")
        return
    found = f"{len(directories)} of sessions that were killed: {', '.join(directories)}{meshes}"
    yield Finding("leftovers", Sign.WARNING, found, "nothing: the next kernel or script of yours removes them")


def rank() -> Iterator[Finding]:
    """Whether a rank comes up, runs a cell, and ends with all that is of its session."""
    begun = time.monotonic()
    said = ask_python("from monarch_kernel.doctor.trial import main; main()", RANK_S)
    told: dict[str, Any] = {}  # the last step, and what it came to
    for line in said.out.splitlines():
        if line.startswith("{"):  # and not what a library prints
            told.update(json.loads(line))
    if "result" not in told:
        doing = told.get("step", "the program was being started")
        why = told.get("error") or said.trouble
        remedy = "what is above may be the cause; else docs/troubleshooting.md, 'A mesh does not come up'"
        yield Finding("a rank", Sign.PROBLEM, f"it failed while {doing}: {why}", remedy)
        return
    result = told["result"]
    found = (
        f"came up in {format_seconds(result['up_s'])}, ran a cell with torch (in {format_nbytes(result['rss_nbytes'])}), "
        f"and ended in {format_seconds(result['down_s'])}; {format_seconds(time.monotonic() - begun)} altogether"
    )
    if result["left"]:
        remedy = f"kill -9 {' '.join(map(str, result['left']))}; and report it, with this list"
        yield Finding("a rank", Sign.PROBLEM, f"{found}; its processes have not ended", remedy)
    else:
        yield Finding("a rank", Sign.OK, found)
