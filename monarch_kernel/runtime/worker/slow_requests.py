"""Shows, in waits that last long, which ranks have not answered, and what they do."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from monarch_kernel.errors import Failure, format_ranks
from monarch_kernel.net.wire.codec import load, pack
from monarch_kernel.net.wire.messages import GetStacks
from monarch_kernel.runtime.diagnostics.source_names import describe_line
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.waits import PendingFuture, Wait

__all__ = ["slow_text", "warn_if_slow"]

LOOK_S = 1.0
_MAX_LINES = 8


def warn_if_slow(client: Client, wait: Wait) -> float | None:
    """Show a wait that lasts once, when that is due. Returns when to report the wait again, in seconds."""
    if wait.warn_after_s is None or not wait.future.note:
        return None
    if wait.lasts_s < wait.warn_after_s:
        return wait.warn_after_s - wait.lasts_s
    wait.warn_after_s = None
    client.submit(lambda: _ask(client, wait))
    return None


def _ask(client: Client, wait: Wait) -> None:
    """Ask the processes that have not answered what they do; on the I/O thread."""
    future = wait.future
    owing = list(client.waiting_for(future.id))
    if wait.over or not owing:
        return
    looking = client.ask(owing, lambda id: pack(GetStacks(id)), lambda answers: [_read(answer) for answer in answers])

    timer = threading.Timer(LOOK_S, looking.cancel)  # native code that holds the GIL keeps a process from answering
    timer.daemon = True

    def show() -> None:
        timer.cancel()
        ranks = {proc: place if future.rank is None else future.rank for place, proc in enumerate(future.procs)}
        doing = {ranks[proc]: one for proc, one in zip(owing, looking.get(0))}
        wait.tell(slow_text(future, wait.lasts_s, doing))

    timer.start()
    looking.add_done_callback(show)


def _read(answer: Answer) -> Doing | Failure:
    if not isinstance(answer, Value):
        return answer
    doing: Doing = load(answer.payload, answer.frames)
    return doing


def slow_text(future: PendingFuture, lasts_s: float, doing: Mapping[int, Doing | Failure]) -> str:
    """Describe which ranks have not answered, and what they do.

    Args:
        future: The future that is waited for.
        lasts_s: How long the wait has lasted, in seconds.
        doing: The activities of the ranks that have not answered.
    """
    many = f" of {len(future.procs)}" if len(future.procs) > 1 else ""
    lines = [f"{future.note}: no answer for {lasts_s:.2g} s from {format_ranks(doing)}{many}"]
    same: dict[str, list[int]] = {}
    for rank, one in doing.items():
        same.setdefault(_what(future, one), []).append(rank)
    lines += [f"  {format_ranks(ranks)} {what}" for what, ranks in list(same.items())[:_MAX_LINES]]
    if len(same) > _MAX_LINES:
        lines.append(f"  and {len(same) - _MAX_LINES} more")
    return "\n".join(lines)


def _what(future: PendingFuture, doing: Doing | Failure) -> str:
    """Describe what a rank does instead of answering."""
    if isinstance(doing, Failure):
        if doing.etype == "CancelledError":
            return "can't say what it does: native code holds the GIL, or the process is stopped"
        return doing.message
    mine = next((each for each in doing.activities if each.request == future.id), None)
    actor = f"actor {future.note.rpartition('.')[0]}"
    one = mine or next((each for each in doing.activities if each.executor == actor), None)
    if one is None:
        return "runs no code for it at this moment"
    where = describe_line(one.user_frame) if one.user_frame is not None else "code that is not yours"
    return where if mine else f"waits its turn: the actor is at {where}"
