"""Time in which threads wait for a batch of a DataLoader, what the worker does then, and the rows of the last batch."""

from __future__ import annotations

import linecache
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from types import ModuleType
from typing import Any

from monarch_kernel.base.after_import import after_import
from monarch_kernel.runtime.diagnostics.dumped_stacks import doing_of
from monarch_kernel.runtime.diagnostics.source_names import describe_line
from monarch_kernel.runtime.diagnostics.stacks import awaited_by
from monarch_kernel.runtime.host.silent_stacks import stacks_of_child
from monarch_kernel.runtime.worker.executor import working
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["install", "on_batch", "rows_read", "time_loaders", "waited_s"]

_log = logging.getLogger(__name__)

_LONG_S = 2.0
"""Only of a wait that is longer than this, it is said what the worker does."""

_KNOWN_S = 5.0
"""For so long the text about a worker stays, because a signal interrupts it."""

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
_waiting: dict[int, tuple[Any, float]] = {}  # thread -> the iterator whose batch it waits for, and since when
_said: dict[int, tuple[float, str]] = {}  # pid of a worker -> the time of the last look, and the text
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
        _waiting[threading.get_ident()] = self, began
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
            _waiting.pop(thread, None)
            _waited_s[thread] = _waited_s.get(thread, 0.0) + time.perf_counter() - began
            asked = self.__dict__.get(_QUEUE)
            rows = asked.popleft() if is_batch and asked and getattr(self, "_in_order", True) else None
            _rows[thread] = _request(), rows

    iterator.__next__ = timed
    if hasattr(iterator, "_next_index") and hasattr(iterator, "_reset"):
        _note_rows(iterator)
    if hasattr(iterator, "next"):
        iterator.next = timed


def awaited_worker(thread: int) -> str:
    """Say which worker of a DataLoader a thread has waited for, and what the worker does; empty if there is no long wait."""
    iterator, since = _waiting.get(thread, (None, 0.0))
    now = time.perf_counter()
    if iterator is None or now < since + _LONG_S:
        return ""
    try:
        number = iterator._task_info[iterator._rcvd_idx][0]
        pid = iterator._workers[number].pid
    except (AttributeError, LookupError):  # without workers, or of another version
        return ""
    at, text = _said.get(pid, (0.0, ""))
    if not text or now > at + _KNOWN_S:
        text = f"worker {number} of a DataLoader" + _place_in(pid)  # without its pid, so that texts of ranks fold
        _said.clear()
        _said[pid] = now, text
    return text


def _place_in(pid: int) -> str:
    """Name the line of the user's code that a worker runs; empty if it is not known."""
    try:
        doing = doing_of(stacks_of_child(pid), -1)
    except Exception:  # the place of the rank is worth more
        _log.exception("can't read the stack of a worker")
        return ""
    frame = None if doing is None else doing.activities[0].user_frame
    if frame is None:
        return ""
    source = (linecache.getline(frame.file, frame.line),)
    return f", which is at {describe_line(replace(frame, source=source, first_line=frame.line))}"


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
    awaited_by.append(awaited_worker)
    for name, class_name in _LOADERS.items():

        def time_one(module: ModuleType, class_name: str = class_name) -> None:
            iterator = getattr(module, class_name, None)
            if iterator is not None:
                time_loaders(iterator)

        after_import(name, time_one)
