"""What an interrupt came to, as text: who stopped, who had finished, who did not stop, where, and what can be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from monarch_kernel.base.text import plain
from monarch_kernel.errors import format_ranks

__all__ = ["InterruptOutcome", "interrupt_text"]


@dataclass
class InterruptOutcome:
    """What became of a piece of work on every rank after it was interrupted.

    Attributes:
        mesh: name of the mesh.
        why: begins the text, such as ``interrupted``.
        stopped: ranks that stopped, with their state kept.
        finished: ranks that had finished.
        dropped: ranks that had not begun, because they run something else still; they will not begin.
        failed: what else happened -> ranks.
        stuck: ranks that go on.
        aborted: whether the process groups of those that did not stop were aborted.
        n_ranks: how many ranks the mesh has.
        axes: how many axes the mesh has.
        waited_s: for how long the interrupt was waited for.
        doing: what stuck ranks, and those that run something else, do, as lines.
    """

    mesh: str
    why: str = "interrupted"
    stopped: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    failed: dict[str, list[int]] = field(default_factory=dict)
    stuck: list[int] = field(default_factory=list)
    aborted: bool = False
    n_ranks: int = 0
    axes: int = 1
    waited_s: float = 0.0
    doing: Sequence[str] = ()


def interrupt_text(outcome: InterruptOutcome) -> str:
    """Write it for the user: one line if all went well, else also where ranks are and what can be done about it."""
    if not (outcome.stopped or outcome.dropped or outcome.stuck or outcome.failed):
        return f"{outcome.why}, but all ranks ran to their end"
    parts = [outcome.why]
    if outcome.stopped:
        parts = [f"{outcome.why} on {format_ranks(outcome.stopped)}; their state is kept"]
    if outcome.finished:
        parts.append(f"{format_ranks(outcome.finished)} had finished")
    parts += [f"{format_ranks(ranks)} {plain(what)}" for what, ranks in outcome.failed.items()]
    if outcome.dropped:
        verb = "runs" if len(outcome.dropped) == 1 else "run"
        parts.append(f"{format_ranks(outcome.dropped)} had not begun it, and {verb} something earlier still")
    if outcome.stuck:
        parts.append(f"{format_ranks(outcome.stuck)} did not stop within {outcome.waited_s:.1f} s")
    lines = ["; ".join(parts), *(f"  {line}" for line in outcome.doing)]
    busy = sorted({*outcome.stuck, *outcome.dropped})
    if busy:
        lines += _advice(outcome, busy)
    return "\n".join(lines)


def _advice(outcome: InterruptOutcome, busy: Sequence[int]) -> list[str]:
    name = outcome.mesh
    who = name if len(busy) == outcome.n_ranks else _selector(name, busy, outcome.axes)
    lines = []
    if outcome.aborted:
        lines.append("their process groups were aborted; the mesh forms its group anew before the next cell")
    else:
        lines.append(f"%mesh interrupt {who} --abort aborts their process groups, too; state outside of them is kept")
    lines.append(f"%mesh stacks {name} says what they do now; %mesh down {name} ends them, and with them their state")
    return [
        f"They stop when they come back to Python, unless they catch KeyboardInterrupt; cells on {who} wait until then.",
        *(f"{line[0].upper() if line[0] != '%' else '%'}{line[1:]}." for line in lines),
    ]


def _selector(name: str, ranks: Sequence[int], axes: int) -> str:
    """Write ranks as a selector: ``t[1]``, ``t[0:4]``, and where that is no slice of one axis ``t[[0, 2]]``."""
    first, last = ranks[0], ranks[-1]
    if axes == 1 and len(ranks) == 1:
        return f"{name}[{first}]"
    if axes == 1 and last - first + 1 == len(ranks):
        return f"{name}[{first}:{last + 1}]"
    return f"{name}[{list(ranks)}]"
