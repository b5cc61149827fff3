"""Reads the stacks that faulthandler writes for a process whose threads can't run Python code."""

from __future__ import annotations

import re

from monarch_kernel.errors import Frame
from monarch_kernel.runtime.diagnostics.failures import is_machinery, is_user_file
from monarch_kernel.runtime.diagnostics.stacks import Activity, Doing

__all__ = ["HELD", "doing_of"]

HELD = "it does not answer: native code that holds the GIL, or a busy machine"
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def doing_of(text: str, rank: int) -> Doing | None:
    """Return what a rank does by the stacks of its threads, without threads that run no code of the user's; None if all do.

    Args:
        text: the output of faulthandler.
        rank: the flat rank.
    """
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if (found := _FRAME.fullmatch(line)) is None:
            if line.endswith("(most recent call first):"):
                threads.append([])
        elif threads and not is_machinery(found[1]):
            file = found[1]
            threads[-1].append(Frame(file, int(found[2]), found[3], user=is_user_file(file)))
    activities = tuple(
        Activity(0, "main", tuple(reversed(frames))) for frames in threads if any(frame.user for frame in frames)
    )
    return Doing(activities, unknown=HELD, rank=rank, is_silent=True) if activities else None
