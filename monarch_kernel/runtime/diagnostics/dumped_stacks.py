"""Reads what an agent says of a process whose threads can't run Python code: their stacks by faulthandler, or its state."""

from __future__ import annotations

import re

from monarch_kernel.errors import Frame
from monarch_kernel.runtime.diagnostics.failures import is_machinery, is_user_file
from monarch_kernel.runtime.diagnostics.stacks import Activity, Doing

__all__ = ["HELD", "doing_of"]

HELD = "it does not answer: native code that holds the GIL, or a busy machine"
_STATE = re.compile(r"state: ([TtD]) (\d+) (\d+)\n")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def doing_of(text: str, rank: int) -> Doing | None:
    """Return what a rank does by the stacks of its threads, without threads that run no code of the user's; None if all do.

    Args:
        text: the output of faulthandler, or the state of the process in one line, as `runtime.host.silent_stacks` writes it.
        rank: the flat rank.
    """
    if state := _STATE.fullmatch(text):
        return Doing(unknown=HELD, rank=rank, is_silent=True, halted=_halted(*state.groups()))
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


def _halted(letter: str, pid: str, tracer: str) -> str:
    if letter == "T":
        return f"stopped by a signal, such as SIGSTOP (kill -CONT {pid} lets it go on)"
    if letter == "t":
        return f"stopped by a debugger or tracer, process {tracer}"
    return f"in a wait of the kernel that nothing interrupts (process {pid}), as for a disk or a network file system"
