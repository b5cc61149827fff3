"""Describes the outcome of an interrupt: which ranks stopped, had finished or did not stop, where, and what to do next."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from monarch_kernel.base.text import plain
from monarch_kernel.errors import format_ranks

__all__ = ["InterruptOutcome", "interrupt_text", "restart_text", "selector_of"]


_THEY_STOP = "They stop when they return to Python, unless they catch KeyboardInterrupt"


@dataclass
class InterruptOutcome:
    """The result of an interrupt on each rank of a mesh.

    Attributes:
        mesh: name of the mesh.
        why: first word of the text, such as ``interrupted``.
        stopped: ranks that stopped and keep their state.
        finished: ranks that had finished before the interrupt.
        completed: ranks that have finished since.
        released: ranks that had been released from a wait before the interrupt, because a rank in it died or failed.
        dropped: ranks that still run something else; they never start the interrupted work.
        failed: any other outcome -> ranks.
        stuck: ranks that did not stop.
        asks_abort: whether the ranks were asked to abort their process groups.
        aborted: ranks that have reported that they did.
        silent: ranks that have not reported what they do.
        halted: ranks whose processes run nothing, as after SIGSTOP.
        n_ranks: number of ranks of the mesh.
        axes: number of axes of the mesh.
        waited_s: how long the caller waited for the ranks to stop, in seconds.
        doing: lines that say what stuck and dropped ranks do.
        waits: lines about waits in collectives, from before the interrupt.
    """

    mesh: str
    why: str = "interrupted"
    stopped: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    failed: dict[str, list[int]] = field(default_factory=dict)
    stuck: list[int] = field(default_factory=list)
    asks_abort: bool = False
    aborted: Sequence[int] = ()
    silent: Sequence[int] = ()
    halted: Sequence[int] = ()
    n_ranks: int = 0
    axes: int = 1
    waited_s: float = 0.0
    doing: Sequence[str] = ()
    waits: Sequence[str] = ()


def interrupt_text(outcome: InterruptOutcome) -> str:
    """Format an outcome for the user: one line if all ranks stopped, else also where ranks are and what to do."""
    if not (outcome.stopped or outcome.dropped or outcome.stuck or outcome.failed):
        return f"{outcome.why}, but all ranks ran to their end"
    parts = [outcome.why]
    if outcome.stopped:
        whose = "its" if len(outcome.stopped) == 1 else "their"
        parts = [f"{outcome.why} on {format_ranks(outcome.stopped)}; {whose} state is kept"]
    if outcome.finished:
        parts.append(f"{format_ranks(outcome.finished)} had finished")
    if outcome.completed:
        whose = "its" if len(outcome.completed) == 1 else "their"
        parts.append(f"{format_ranks(outcome.completed)} ran to {whose} end")
    parts += [f"{format_ranks(ranks)} {plain(what)}" for what, ranks in outcome.failed.items()]
    if outcome.released:
        others = format_ranks(sorted(itertools.chain.from_iterable(outcome.failed.values()))) or "other ranks"
        were = "was" if len(outcome.released) == 1 else "were"
        parts.append(f"{format_ranks(outcome.released)} waited for {others} and {were} released")
    if outcome.dropped:
        verb = "runs" if len(outcome.dropped) == 1 else "run"
        parts.append(f"{format_ranks(outcome.dropped)} had not started it and still {verb} earlier work")
    if outcome.stuck:
        parts.append(f"{format_ranks(outcome.stuck)} did not stop within {outcome.waited_s:.1f} s")
    lines = ["; ".join(parts), *(f"  {line}" for line in (*outcome.waits, *outcome.doing))]
    busy = sorted({*outcome.stuck, *outcome.dropped})
    if busy:
        lines += _advice(outcome, busy)
    return "\n".join(lines)


def _advice(outcome: InterruptOutcome, busy: Sequence[int]) -> list[str]:
    name = outcome.mesh
    selector = selector_of(name, busy, outcome.axes, outcome.n_ranks)
    is_one = len(busy) == 1
    whose = "its" if is_one else "their"
    lines = []
    runs = [rank for rank in busy if rank not in outcome.halted]
    if not outcome.asks_abort and runs:
        lines.append(f"%mesh interrupt {selector} --abort also aborts {whose} process groups; all other state is kept")
    elif outcome.aborted:
        of = "" if set(busy) <= set(outcome.aborted) else f" of {format_ranks(outcome.aborted)}"
        groups = f"the process groups{of}" if of else f"{whose} process groups"
        lines.append(f"{groups} were aborted; the mesh forms its group again before the next cell")
    if outcome.asks_abort and (silent := [rank for rank in busy if rank in outcome.silent]):
        groups = "its process groups" if len(silent) == 1 else "their process groups"
        lines.append(f"{format_ranks(silent)} can't say whether {groups} were aborted")
    if outcome.asks_abort and (none := [rank for rank in busy if rank not in {*outcome.aborted, *outcome.silent}]):
        lines.append(f"{format_ranks(none)} had no process group to abort")
    stacks = f"%mesh stacks {name} shows what {'it does' if is_one else 'they do'} now; "
    lines.append(stacks + restart_text(name, busy, outcome.axes, outcome.n_ranks))
    if runs:
        stops = "It stops when it returns to Python, unless it catches KeyboardInterrupt" if is_one else _THEY_STOP
    else:
        stops = "It stops when its process runs again" if is_one else "They stop when their processes run again"
    return [
        f"{stops}; cells on {selector} wait until then.",
        *(f"{line[0].upper() if line[0] != '%' else '%'}{line[1:]}." for line in lines),
    ]


def restart_text(name: str, ranks: Sequence[int], axes: int, n_ranks: int) -> str:
    """Name the command that ends processes and starts new ones, for ranks that nothing else stops."""
    others = "" if len(ranks) == n_ranks else "; the other ranks keep theirs"
    them = "it, and its state is lost" if len(ranks) == 1 else "them, and their state is lost"
    return f"%mesh restart {selector_of(name, ranks, axes, n_ranks)} replaces {them}{others}"


def selector_of(name: str, ranks: Sequence[int], axes: int, n_ranks: int = 0) -> str:
    """Format ranks as a selector: ``t`` for all ``n_ranks``, ``t[1]``, ``t[0:4]``, or ``t[[0, 2]]`` else."""
    if len(ranks) == n_ranks:
        return name
    first, last = ranks[0], ranks[-1]
    if axes == 1 and len(ranks) == 1:
        return f"{name}[{first}]"
    if axes == 1 and last - first + 1 == len(ranks):
        return f"{name}[{first}:{last + 1}]"
    return f"{name}[{list(ranks)}]"
