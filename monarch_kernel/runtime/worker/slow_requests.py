"""Shows which ranks have not answered, and what they do: in waits that last long, and after an interrupt."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from monarch_kernel.errors import Failure, format_ranks
from monarch_kernel.net.wire.codec import load, pack
from monarch_kernel.net.wire.messages import GetStacks
from monarch_kernel.runtime.diagnostics.source_names import code_of, describe_line, short_cell
from monarch_kernel.runtime.diagnostics.stacks import IN_POOL, Activity, Doing
from monarch_kernel.runtime.diagnostics.waits import stalls
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.waits import PendingFuture, Wait

__all__ = [
    "PLACES",
    "Places",
    "ask_doing",
    "by_rank",
    "collective_waits",
    "goes_on_text",
    "left_in_pools",
    "slow_text",
    "warn_if_slow",
]

LOOK_S = 1.0
COLLECTIVES_AFTER_S = 10.0
"""Ranks that wait for others in a collective are shown after this time, before a call that only lasts long, in seconds."""

_MAX_LINES = 8
_MAX_WAITS = 4


class Places:
    """How places in code are named; ranks do not know the numbers and the source of the notebook's own cells.

    Attributes:
        located: adds the names and the source that this process knows to what a rank does.
    """

    def __init__(self) -> None:
        self.located: Callable[[Doing], Doing] = lambda doing: doing


PLACES = Places()
"""Set by a notebook while its magics are loaded."""


def warn_if_slow(client: Client, wait: Wait) -> float | None:
    """Show a wait that lasts once, when that is due. Returns when to report the wait again, in seconds."""
    after_s = wait.warn_after_s  # another thread sets it to None when it has shown the wait
    if after_s is None or not wait.future.description:
        return None
    if not wait.future.id:  # no request, so that no process knows of it
        if wait.lasts_s < after_s:
            return after_s - wait.lasts_s
        wait.warn_after_s = None
        wait.tell(f"{wait.future.description}: it has not ended for {wait.lasts_s:.2g} s")
        return None
    if wait.lasts_s >= after_s:
        wait.warn_after_s = None
        client.submit(lambda: _ask(client, wait))
        return None
    if not wait.has_looked and wait.lasts_s >= COLLECTIVES_AFTER_S:
        wait.has_looked = True
        client.submit(lambda: _ask(client, wait, only_collectives=True))
    return (after_s if wait.has_looked else min(after_s, COLLECTIVES_AFTER_S)) - wait.lasts_s


def _ask(client: Client, wait: Wait, *, only_collectives: bool = False) -> None:
    """Ask the processes what they do, and show it, or only if some wait in a collective; on the I/O thread."""
    future = wait.future
    owing = set(client.waiting_for(future.id))
    if wait.over or not owing:
        return
    procs = list(dict.fromkeys(future.procs))
    looking = ask_doing(client, procs)
    timer = threading.Timer(LOOK_S, looking.cancel)  # native code that holds the GIL keeps a process from answering
    timer.daemon = True

    def show() -> None:
        timer.cancel()
        answers = dict(zip(procs, looking.get(0), strict=True))
        waits = collective_waits(answers, owing, COLLECTIVES_AFTER_S - LOOK_S if only_collectives else 0.0)
        if not (waits or not only_collectives) or wait.over:
            return
        wait.warn_after_s = None
        late = [proc for proc in procs if proc in owing]
        text = slow_text(future, wait.lasts_s, by_rank(future, late, [answers[proc] for proc in late]))
        wait.tell("\n".join([text, *waits]))

    timer.start()
    looking.add_done_callback(show)


def collective_waits(
    answers: Mapping[int, Doing | Failure], owing: Collection[int], min_age_s: float, *, is_over: bool = False
) -> list[str]:
    """Describe the waits in collectives of the ranks of a call, as lines.

    Args:
        answers: what each process of the call does.
        owing: the processes that have not answered the call.
        min_age_s: the least age of a wait, in seconds.
        is_over: whether to describe the waits in the past tense.
    """
    known = {proc: each for proc, each in answers.items() if isinstance(each, Doing) and each.rank >= 0}
    ranks = {each.rank: each for each in known.values()}
    if len(ranks) < len(answers):  # which rank the others are is not known, or they are ranks of several meshes
        return []
    finished = [each.rank for proc, each in known.items() if proc not in owing]
    found = stalls(None, ranks, finished, min_age_s, what="the call", is_over=is_over)
    return [f"  {stall.text}" for stall in found[:_MAX_WAITS]]


def ask_doing(client: Client, procs: Sequence[int]) -> Future[list[Doing | Failure]]:
    """Ask processes what they do."""
    return client.ask(procs, lambda id: pack(GetStacks(id)), lambda answers: [_read(answer) for answer in answers])


def by_rank(
    future: PendingFuture, procs: Sequence[int], doing: Sequence[Doing | Failure]
) -> dict[int, Doing | Failure]:
    """Assign what processes of a future do to its ranks."""
    ranks = {proc: place if future.rank is None else future.rank for place, proc in enumerate(future.procs)}
    return {ranks[proc]: one for proc, one in zip(procs, doing, strict=True)}


def _read(answer: Answer) -> Doing | Failure:
    if not isinstance(answer, Value):
        return answer
    doing: Doing = load(answer.payload, answer.frames)
    return PLACES.located(doing)


def slow_text(future: PendingFuture, lasts_s: float, doing: Mapping[int, Doing | Failure]) -> str:
    """Describe which ranks have not answered, and what they do.

    Args:
        future: The future that is waited for.
        lasts_s: How long the wait has lasted, in seconds.
        doing: The activities of the ranks that have not answered.
    """
    many = f" of {len(future.procs)}" if len(future.procs) > 1 else ""
    lines = [f"{future.description}: no answer for {lasts_s:.2g} s from {format_ranks(doing)}{many}"]
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
            return "did not answer what it does"
        return doing.message
    mine, one = _activities(future, doing)
    if one is None:
        return "runs no code for it at this moment"
    frame = one.user_frame or next(iter(one.frames), None)  # an actor of a library has no frame of the user
    where = describe_line(frame) if frame is not None else "code without a Python frame outside of this package"
    return where if mine else f"waits its turn: the actor is at {where}"


def _activities(future: PendingFuture, doing: Doing) -> tuple[Activity | None, Activity | None]:
    """Return what a rank runs for a future, and what it or the actor that the future is of runs."""
    mine = next((each for each in doing.activities if each.request == future.id), None)
    actor = f"actor {future.description.rpartition('.')[0]}"
    return mine, mine or next((each for each in doing.activities if each.executor == actor), None)


def goes_on_text(future: PendingFuture, doing: Mapping[int, Doing | Failure]) -> str:
    """Describe what an interrupt has not stopped: ``[0] goes on with a.block until time.sleep(s) returns (cell [2], line 9)``.

    Args:
        future: the future whose ranks were interrupted.
        doing: what the ranks do that have not answered.
    """
    same: dict[str, list[int]] = {}
    for rank, one in doing.items():
        same.setdefault(_goes_on(future, one), []).append(rank)
    what = f" with {future.description}" if future.description else ""
    parts = [
        f"{format_ranks(ranks)} {'goes' if len(ranks) == 1 else 'go'} on{what}{until}"
        for until, ranks in list(same.items())[:_MAX_LINES]
    ]
    return "; ".join(parts)


def _call_in(line: str) -> str:
    """Return the call that a line of source consists of, such as that of an assignment; empty if it is something else."""
    try:
        (statement,) = ast.parse(line).body
    except (SyntaxError, ValueError):  # the head of a block, or a part of a statement
        return ""
    value = getattr(statement, "value", None)
    while isinstance(value, (ast.Await, ast.YieldFrom)):
        value = value.value
    return (ast.get_source_segment(line, value) or "") if isinstance(value, ast.Call) else ""


def left_in_pools(future: PendingFuture, doing: Mapping[int, Doing | Failure]) -> str:
    """Describe what a call that has ended has left in thread pools, as `goes_on_text` does; empty if nothing.

    A rank may still be about to leave the code of the call, which has answered.
    """
    left: dict[int, Doing | Failure] = {}
    for rank, one in doing.items():
        if isinstance(one, Doing):
            works = [each for each in one.activities if each.request == future.id and each.executor.endswith(IN_POOL)]
            if works:
                left[rank] = Doing(tuple(works))
    return goes_on_text(future, left)


def _goes_on(future: PendingFuture, doing: Doing | Failure) -> str:
    if isinstance(doing, Failure):
        return f", and {_what(future, doing)}"
    mine, one = _activities(future, doing)
    if mine is None:
        return f", and {_what(future, doing)}" if one is not None else ""
    where = mine.user_frame
    if where is None:
        return ""
    place = f"{short_cell(where.file)}, line {where.line}{IN_POOL if mine.executor.endswith(IN_POOL) else ''}"
    call = mine.call if mine.frames[-1].user else _call_in(code_of(where))
    if call.endswith(")"):
        then = " and its code awaits something or ends" if mine.is_coroutine else ""
        return f" until {call} returns{then} ({place})"
    return f" at {place}"
