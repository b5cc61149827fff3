"""What the interrupt of a wait has stopped on ranks, and what goes on there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from monarch_kernel.errors import MeshDownError
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.waits import PendingFuture
from monarch_kernel.runtime.worker.slow_requests import ask_doing, by_rank, goes_on_text

__all__ = ["interrupt_effect"]

STOP_S = 0.6
"""How long ranks have to stop after an interrupt, and to say what they do, in seconds."""

_MAX_EFFECTS = 4


def interrupt_effect(
    client: Client, futures: Sequence[PendingFuture], waiting_for: Callable[[PendingFuture], Sequence[int]]
) -> str:
    """Wait a moment for ranks that were interrupted to stop, and describe those that go on.

    Args:
        client: sends the questions to the ranks.
        futures: what was waited for.
        waiting_for: returns the processes that have not answered a request.

    Returns:
        The text; empty if it is not known what the interrupt did.
    """
    deadline = time.monotonic() + STOP_S
    try:
        for future in futures:
            waiter = Waiter()
            future.add_done_callback(waiter.set)
            client.wait(waiter, max(0.0, deadline - time.monotonic()))
        left = [future for future in futures if not future.done()]
        if not left:
            return "the wait was interrupted, and so is what the ranks run for it"
        parts = [_goes_on(client, future, procs) for future in left if (procs := waiting_for(future))]
    except (KeyboardInterrupt, MeshDownError):  # the user does not wait any longer
        return ""
    return "; ".join(["the wait was interrupted", *parts[:_MAX_EFFECTS]]) if parts else ""


def _goes_on(client: Client, future: PendingFuture, procs: Sequence[int]) -> str:
    looking = ask_doing(client, procs)
    if not looking.wait(STOP_S):
        looking.cancel()
    return goes_on_text(future, by_rank(future, procs, looking.get()))
