"""Names the part of a value that torch (a collective of objects, ``torch.save``) or ``multiprocessing`` could not pickle.

What a worker process gets, as a loader's dataset, is named as the parameter of the function that the process runs.
"""

from __future__ import annotations

import contextlib
import copyreg
import inspect
import pickle
from collections.abc import Iterator
from multiprocessing import context
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import FrameType, FunctionType, TracebackType
from typing import Any

from monarch_kernel.net.wire.unpicklable import Culprit, Trace, find_culprit, traced

__all__ = ["pickle_notes"]

# Function -> its file, and the local variable that it pickles.
_PICKLERS = {
    "broadcast_object_list": ("torch/distributed/distributed_c10d.py", "object_list"),
    "send_object_list": ("torch/distributed/distributed_c10d.py", "object_list"),
    "all_gather_object": ("torch/distributed/distributed_c10d.py", "obj"),
    "gather_object": ("torch/distributed/distributed_c10d.py", "obj"),
    "scatter_object_list": ("torch/distributed/distributed_c10d.py", "scatter_object_input_list"),
    "save": ("torch/serialization.py", "obj"),
    "dump": ("multiprocessing/reduction.py", "obj"),
    "dumps": ("multiprocessing/reduction.py", "obj"),
}
_ERRORS = (pickle.PicklingError, TypeError, AttributeError)


def pickle_notes(error: BaseException) -> tuple[str, ...]:
    """Return a line with the path to what could not be pickled; empty if the error is of another kind."""
    if not isinstance(error, _ERRORS) or "pickle" not in str(error).lower():
        return ()
    for frame in _frames(error.__traceback__):
        file, name = _PICKLERS.get(frame.f_code.co_name, ("", ""))
        if file and frame.f_code.co_filename.replace("\\", "/").endswith(file) and name in frame.f_locals:
            value: Any = frame.f_locals[name]
            if isinstance(value, BaseProcess):
                culprit = _culprit_of_process(value)
            else:
                is_sent = file.startswith("multiprocessing")
                culprit = find_culprit({name: value}, traced(_Forking if is_sent else pickle.Pickler))
            if culprit is None:
                return ()
            return (f"{culprit.path} (a {type(culprit.value).__name__}) can't be pickled{_advice(culprit, file)}",)
    return ()


def _culprit_of_process(process: BaseProcess) -> Culprit | None:
    """Find what can't be sent to a process that is started by spawn or forkserver."""
    target, args, kwargs = (getattr(process, f"_{name}", None) for name in ("target", "args", "kwargs"))
    roots: dict[str, Any] = {"target": target}
    try:
        roots |= inspect.signature(target).bind(*args, **kwargs).arguments  # type: ignore[arg-type, misc]
    except (TypeError, ValueError):  # a subclass with another run(), or no signature
        roots |= {"args": args, "kwargs": kwargs}
    return find_culprit(roots | {"process": process}, _trace_for_child)


def _trace_for_child(value: Any) -> tuple[Exception | None, list[Any]]:
    """Pickle a value as for a process that starts: locks and queues of ``multiprocessing`` can be sent only then."""
    trace: Trace = traced(_Forking)
    with _starting_process():
        return trace(value)


@contextlib.contextmanager
def _starting_process() -> Iterator[None]:
    before = context.get_spawning_popen()
    context.set_spawning_popen(_Starting())  # type: ignore[arg-type]
    try:
        yield
    finally:
        context.set_spawning_popen(before)


class _Starting:
    """Stands for a process that is being started; nothing is given to it."""

    DupFd = int

    def duplicate_for_child(self, fd: int) -> int:
        return fd


class _Forking(pickle.Pickler):
    """Pickles what ``multiprocessing`` can send; tensors by value, because torch's way moves them to shared memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reducers: dict[Any, Any] = getattr(ForkingPickler, "_extra_reducers", {})
        self.dispatch_table = copyreg.dispatch_table | {
            kind: reduce for kind, reduce in reducers.items() if not _is_of_torch(reduce)
        }


def _is_of_torch(reduce: Any) -> bool:
    return str(getattr(reduce, "__module__", "")).partition(".")[0] == "torch"


def _advice(culprit: Culprit, file: str) -> str:
    """Say what to do about a function or class without a name that a worker process could look up."""
    is_local = isinstance(culprit.value, (FunctionType, type)) and "<" in culprit.value.__qualname__
    if not is_local or not file.startswith("multiprocessing"):
        return ""
    return ": define it by its own statement in a cell, outside of functions, or start the process by fork"


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
