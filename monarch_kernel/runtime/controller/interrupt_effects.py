"""Interrupts what ranks run for a wait; describes which collectives it waited in, and what goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain

from monarch_kernel.errors import Failure, MeshDownError
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.diagnostics.waits import LEAST_WAIT_S
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.waits import MAY_GO_ON, PendingFuture
from monarch_kernel.runtime.worker.slow_requests import (
    ask_doing,
    by_rank,
    collective_waits,
    goes_on_text,
    left_in_pools,
)

__all__ = ["interrupt_work"]

STOP_S = 0.6
"""How long ranks have to stop after an interrupt, and to say what they do, in seconds."""

_MAX_EFFECTS = 4

_UNTIL_POOLS_STOP_S = (0.05, 0.1, 0.15)
"""Pauses between the questions whether work in thread pools has stopped, in seconds."""

WaitingFor = Callable[[PendingFuture], Sequence[int]]


class _Before:
    """What the processes of some futures do before they are interrupted.

    Args:
        client: sends the questions to the processes.
        futures: the futures.
        waiting_for: returns the processes that have not answered a request.
    """

    def __init__(self, client: Client, futures: Sequence[PendingFuture], waiting_for: WaitingFor) -> None:
        self._owing = {proc for future in futures if future.description for proc in waiting_for(future)}
        self._procs = list(dict.fromkeys(chain.from_iterable(future.procs for future in futures)))
        self._until = time.monotonic() + STOP_S
        self._looking: Future[list[Doing | Failure]] | None = None
        if self._owing:
            self._looking = ask_doing(client, self._procs)

    def waits(self) -> list[str]:
        """Describe the waits in collectives that the interrupt has ended, as lines. A process has `STOP_S` to answer."""
        if self._looking is None:
            return []
        if not self._looking.wait(max(0.0, self._until - time.monotonic())):  # native code holds the GIL
            self._looking.cancel()
        answers = dict(zip(self._procs, self._looking.get(), strict=True))
        return collective_waits(answers, self._owing, LEAST_WAIT_S, is_over=True)


def interrupt_work(
    client: Client, futures: Sequence[PendingFuture], waiting_for: WaitingFor, interrupt: Callable[[], object]
) -> str:
    """Interrupt ranks, wait a moment for them to stop, and describe what they waited in, and those that go on.

    Args:
        client: sends the questions to the ranks.
        futures: what was waited for.
        waiting_for: returns the processes that have not answered a request.
        interrupt: interrupts the ranks of the futures.

    Returns:
        The text; empty if it is not known what the interrupt did.
    """
    try:
        try:
            before = _Before(client, futures, waiting_for)  # ranks answer in the order of the messages
        finally:
            interrupt()
        effect = _effect(client, futures, waiting_for)
        return "\n".join([effect, *before.waits()])
    except (KeyboardInterrupt, MeshDownError):  # the user does not wait any longer
        return ""


def _effect(client: Client, futures: Sequence[PendingFuture], waiting_for: WaitingFor) -> str:
    """Wait a moment for ranks that were interrupted to stop, and describe those that go on."""
    deadline = time.monotonic() + STOP_S
    for future in futures:
        waiter = Waiter()
        future.add_done_callback(waiter.set)
        client.wait(waiter, max(0.0, deadline - time.monotonic()))
    head = f"the wait{_for(futures)} was interrupted"
    parts = [_goes_on(client, future, waiting_for) for future in futures if not future.done()]
    if all(future.done() for future in futures):  # some perhaps while their ranks were asked
        in_pools = _left_in_pools(client, futures)
        for pause_s in _UNTIL_POOLS_STOP_S:  # an abort of process groups ends a collective in a pool after the call
            if not in_pools:
                break
            client.wait(Waiter(), pause_s)
            in_pools = _left_in_pools(client, futures)
        return "; ".join([head, *in_pools]) if in_pools else f"{head}, and so is what the ranks run for it"
    parts = list(filter(None, parts))
    return "; ".join([head, *parts[:_MAX_EFFECTS]]) if parts else MAY_GO_ON


def _for(futures: Sequence[PendingFuture]) -> str:
    """Name the calls that were waited for: `` for trainer.step``; empty if they have no name."""
    descriptions = list(dict.fromkeys(future.description for future in futures if future.description))
    if not descriptions:
        return ""
    more = f" and {len(descriptions) - _MAX_EFFECTS} more" if len(descriptions) > _MAX_EFFECTS else ""
    return f" for {', '.join(descriptions[:_MAX_EFFECTS])}{more}"


def _goes_on(client: Client, future: PendingFuture, waiting_for: WaitingFor) -> str:
    """Describe what goes on; ranks that stop while they are asked have nothing that does."""
    procs = waiting_for(future)
    answers = dict(zip(procs, _ask(client, procs), strict=True)) if procs else {}
    still = [proc for proc in waiting_for(future) if proc in answers]
    return goes_on_text(future, by_rank(future, still, [answers[proc] for proc in still]))


def _left_in_pools(client: Client, futures: Sequence[PendingFuture]) -> list[str]:
    """Describe what calls that have ended have left in thread pools."""
    named = [future for future in futures[:_MAX_EFFECTS] if future.id and future.description]
    left = (left_in_pools(each, by_rank(each, each.procs, _ask(client, each.procs))) for each in named)
    return list(filter(None, left))


def _ask(client: Client, procs: Sequence[int]) -> list[Doing | Failure]:
    looking = ask_doing(client, procs)
    if not looking.wait(STOP_S):
        looking.cancel()
    return looking.get()
