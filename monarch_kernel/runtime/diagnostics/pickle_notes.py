"""Names the part of a value that torch (a collective of objects, ``torch.save``) or ``multiprocessing`` could not pickle."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from monarch_kernel.net.wire.unpicklable import find_culprit, traced

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
            culprit = find_culprit({name: value}, traced(pickle.Pickler))
            if culprit is None:
                return ()
            return (f"{culprit.path} (a {type(culprit.value).__name__}) can't be pickled",)
    return ()


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
