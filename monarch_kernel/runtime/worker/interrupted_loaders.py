"""Interrupts the workers of a DataLoader when an interrupt has ended the loop over it.

Ctrl-C in a terminal reaches the workers, too, and so does Kernel > Interrupt in other kernels. Here it reaches only the rank.
When torch then discards the iterator, it waits up to five seconds for each worker that is busy, for example with a read from a
slow file system. The next cell of the rank waited for that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from types import ModuleType
from typing import Any, Protocol

from monarch_kernel.base.after_import import after_import
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["interrupt_workers"]

_OWNER = "_monarch_owner"


class Owner(Protocol):
    """The part of an executor that this module uses.

    Attributes:
        thread_id: The thread that runs its requests.
        current: The id of the request that it runs; 0 if none.
        interrupted: The id of the request that was interrupted last; 0 if none.
    """

    thread_id: int
    current: int
    interrupted: int


def interrupt_workers(module: ModuleType, owners: Callable[[], Iterable[Owner]]) -> None:
    """Make iterators interrupt their workers at their end if the request that made them was interrupted.

    Args:
        module: ``torch.utils.data.dataloader``.
        owners: Returns the executors of this process.
    """
    kind: Any = getattr(module, "_MultiProcessingDataLoaderIter", None)
    if kind is None or not hasattr(kind, "_shutdown_workers") or hasattr(kind, _OWNER):
        return
    begin, end = kind.__init__, kind._shutdown_workers

    @wraps(begin)
    def __init__(iterator: Any, *args: Any, **kwargs: Any) -> None:
        thread = threading.get_ident()
        found = ((owner, owner.current) for owner in owners() if owner.thread_id == thread and owner.current)
        setattr(iterator, _OWNER, next(found, None))
        begin(iterator, *args, **kwargs)

    @wraps(end)
    def _shutdown_workers(iterator: Any) -> None:
        owner, request = getattr(iterator, _OWNER) or (None, 0)
        if owner is not None and owner.interrupted == request and not iterator._shutdown:
            iterator._workers_done_event.set()  # so that a worker does not wait until its results are read
            for worker in iterator._workers:
                with contextlib.suppress(ProcessLookupError):
                    if worker.is_alive():
                        os.kill(worker.pid, signal.SIGINT)
        end(iterator)

    setattr(kind, _OWNER, None)
    kind.__init__, kind._shutdown_workers = __init__, _shutdown_workers


@register
def _install(rank: Rank) -> None:
    after_import("torch.utils.data.dataloader", lambda module: interrupt_workers(module, rank.executors))
