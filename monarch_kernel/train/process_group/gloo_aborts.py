"""Aborts sends and receives of gloo, through methods that torch offers to C++ only.

Theory of operation
===================

``SendWork`` and ``RecvWork`` of torch have a method ``abort``. After it, the wait for the message returns False: now, or when
it begins. torch offers the method to C++ only. So this module finds it in torch's library by its name there, and calls it with
the object of C++ that the object of Python contains. It first compares the class of that object. Where torch has another
layout, or no such method, nothing is called, and the message goes on.

gloo keeps the abort for the next wait if no thread waits yet, and forgets it when a wait has returned. ``dist.send`` and
``dist.recv`` ignore what the wait returns. So the wait raises an error here, and so does each later one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

from monarch_kernel.base.failure_reports import GROUP_HAS_ENDED

__all__ = ["TEXT", "abort", "install"]

TEXT = f"the message was aborted: {GROUP_HAS_ENDED}"
"""Of the error that waits for messages raise after an abort."""

_CLASSES = ("N4c10d16ProcessGroupGloo8SendWork", "N4c10d16ProcessGroupGloo8RecvWork")
_METHODS_AT = 2 * ctypes.sizeof(ctypes.c_void_p)
"""Where the methods begin in the table of a class of C++, to which each of its objects points."""


class _Methods(NamedTuple):
    """The methods of C++ that abort a message.

    Attributes:
        kind: the class in Python of torch's objects.
        aborts: abort a message, given the address of its object of C++; by the address to which each object of a class points.
    """

    kind: type
    aborts: dict[int, Callable[[int], None]]


def install(dist: Any) -> None:
    """Let waits for messages that were aborted raise an error."""
    original = dist.Work.wait

    @wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(work, *args, **kwargs)
        if result is False and abort(work):
            raise RuntimeError(TEXT)
        return result

    dist.Work.wait = wait


def abort(work: Any) -> bool:
    """Make the wait for a message of gloo return False, now or when it begins; a message that has arrived, too.

    Args:
        work: any object; nothing happens if it is no send or receive of gloo.

    Returns:
        Whether it is one.
    """
    methods = _methods()
    if methods is None or type(work) is not methods.kind:
        return False
    address = _word(id(work) + object.__basicsize__)  # pybind11 has the pointer after what each object of Python has
    method = methods.aborts.get(_word(address)) if address else None
    if method is None:
        return False
    method(address)
    return True


@cache
def _methods() -> _Methods | None:
    """Find the methods; None in another build or version of torch."""
    import torch
    from torch.distributed import Work

    if type(Work).__name__ != "pybind11_type":
        return None
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    aborts: dict[int, Callable[[int], None]] = {}
    try:
        library = ctypes.PyDLL(str(path), os.RTLD_NOW | os.RTLD_NOLOAD)  # it keeps the GIL, and so the object
        for each in _CLASSES:
            method = library[f"_Z{each}5abortEv"]
            method.argtypes, method.restype = [ctypes.c_void_p], None
            aborts[ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{each}E")) + _METHODS_AT] = method
    except (OSError, AttributeError, ValueError):
        return None
    return _Methods(Work, aborts)


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value
