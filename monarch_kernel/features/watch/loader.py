"""Time in which threads of this process wait for a batch of a DataLoader, and the rows of the last batch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from monarch_kernel.base.after_import import after_import
from monarch_kernel.runtime.worker.executor import working
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["install", "on_batch", "rows_read", "time_loaders", "waited_s"]

_LOADERS = {
    "torch.utils.data.dataloader": "_BaseDataLoaderIter",
    "torchdata.stateful_dataloader.stateful_dataloader": "_BaseDataLoaderIter",
}
"""Module -> the class of its iterators."""

_QUEUE = "_monarch_rows"
"""Attribute of an iterator: the rows of the batches that it has asked for and not returned yet."""

on_batch: list[Callable[[Any, Any], None]] = []
"""Functions that get each iterator of a DataLoader, and the batch that it returns."""

_waited_s: dict[int, float] = {}
_rows: dict[int, tuple[int, Any]] = {}  # thread -> the request that it executed, and the rows of its last batch


def waited_s() -> float:
    """Return for how long the calling thread has waited for batches so far, in seconds."""
    return _waited_s.get(threading.get_ident(), 0.0)


def rows_read() -> Any:
    """Return the rows of the last batch that the calling thread has received: a list of numbers; None if unknown.

    Batches of earlier requests, such as other cells, do not count.
    """
    request, rows = _rows.get(threading.get_ident(), (0, None))
    return rows if request == _request() else None


def _request() -> int:
    """The request that this thread executes; 0 if none."""
    executor = working.get()
    return 0 if executor is None else executor.current


def time_loaders(iterator: Any) -> None:
    """Make a class of iterators sum the time that ``next`` takes, and note the rows of each batch.

    Args:
        iterator: the class; it is changed.
    """
    original: Callable[[Any], Any] = iterator.__next__

    @wraps(original)
    def timed(self: Any) -> Any:
        began = time.perf_counter()
        is_batch = True  # or an error in place of one
        try:
            batch = original(self)
            for look in on_batch:
                look(self, batch)
            return batch
        except StopIteration:
            is_batch = False
            raise
        finally:
            thread = threading.get_ident()
            _waited_s[thread] = _waited_s.get(thread, 0.0) + time.perf_counter() - began
            asked = self.__dict__.get(_QUEUE)
            rows = asked.popleft() if is_batch and asked and getattr(self, "_in_order", True) else None
            _rows[thread] = _request(), rows

    iterator.__next__ = timed
    if hasattr(iterator, "_next_index") and hasattr(iterator, "_reset"):
        _note_rows(iterator)
    if hasattr(iterator, "next"):
        iterator.next = timed


def _note_rows(iterator: Any) -> None:
    """Make iterators keep the rows of the batches that they ask for, which arrive in this order."""
    next_index, reset = iterator._next_index, iterator._reset

    @wraps(next_index)
    def noted(self: Any) -> Any:
        rows = next_index(self)
        self.__dict__.setdefault(_QUEUE, deque()).append(rows)
        return rows

    @wraps(reset)
    def renewed(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.pop(_QUEUE, None)
        return reset(self, *args, **kwargs)

    iterator._next_index, iterator._reset = noted, renewed


@register
def install(rank: Rank) -> None:
    """Time the loaders of a rank."""
    for name, class_name in _LOADERS.items():

        def time_one(module: ModuleType, class_name: str = class_name) -> None:
            iterator = getattr(module, class_name, None)
            if iterator is not None:
                time_loaders(iterator)

        after_import(name, time_one)
