"""Ends receives of gloo from any rank.

Theory of operation
===================

A receive from one rank ends with the connection to it (`gloo_waits`). A receive from any rank belongs to no connection: it
ends with a message, or at the timeout of its group. gloo can abort it, and its wait then returns False. But torch offers the
method for that, ``RecvWork::abort``, to C++ only. This module finds it in torch's library by its name there, and calls it with
the object of C++ that the object of Python contains. It first compares the class of that object. Where torch has another
layout, or no such method, nothing is called, and the receive goes on.

gloo keeps the abort for the next wait if no thread waits yet. ``dist.recv`` ignores what the wait returns, so the wait raises
an error here. gloo accepts a receive from any rank also when all connections of the group are closed, and it would never end.
So an ended group refuses further ones.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

from monarch_kernel.base.failure_reports import GROUP_HAS_ENDED

__all__ = ["AnySource"]

_CLASS = "N4c10d16ProcessGroupGloo8RecvWork"
_METHODS_AT = 2 * ctypes.sizeof(ctypes.c_void_p)
"""Where the methods begin in the table of a class of C++, to which each of its objects points."""

_TEXT = f"the receive from any rank was aborted: {GROUP_HAS_ENDED}"


class AnySource:
    """The receives from any rank of this process, once it is installed; any thread may end them."""

    def __init__(self) -> None:
        self._groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by receive
        self._ended: WeakSet[Any] = WeakSet()  # groups

    def install(self, dist: Any) -> None:
        """Wrap the method that starts receives, and the one that waits for them."""
        dist.ProcessGroup.recv_anysource = self._starting(dist.ProcessGroup.recv_anysource)
        dist.Work.wait = self._waiting(dist.Work.wait)

    def refuse(self, dist: Any, dead: int | None) -> None:
        """Let no further receive begin in groups that are ended now: those of a rank that has died, or all groups."""
        world = dist.distributed_c10d._world
        for group in (*list(world.pg_map), *self._in_use()):
            if dead is None or dead in world.pg_group_ranks.get(group, (dead,)):  # a destroyed group ends, too
                self._ended.add(group)

    def end(self) -> None:
        """Make receives in ended groups raise an error."""
        for of in self._groups.keyrefs():
            if (work := of()) is not None and self._groups[work]() in self._ended:
                _abort(work)

    def _in_use(self) -> list[Any]:
        works = [work for of in self._groups.keyrefs() if (work := of()) is not None]
        return [group for work in works if (group := self._groups[work]()) is not None]

    def _starting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def recv_anysource(group: Any, *args: Any, **kwargs: Any) -> Any:
            if group in self._ended:
                raise RuntimeError(_TEXT)
            work = original(group, *args, **kwargs)
            self._groups[work] = ref(group)
            if group in self._ended:  # since then
                _abort(work)
            return work

        return recv_anysource

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        groups = self._groups

        @wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            if result is False and work in groups:
                _abort(work)  # the next wait would never end
                raise RuntimeError(_TEXT)
            return result

        return wait


class _Methods(NamedTuple):
    """The method of C++ that aborts a receive.

    Attributes:
        kind: the class in Python of torch's objects.
        abort: aborts a receive, given the address of its object of C++.
        table: the address to which each such object points, and no object of another class.
    """

    kind: type
    abort: Callable[[int], None]
    table: int


def _abort(work: Any) -> None:
    """Make the wait for a receive of gloo return False, now or when it begins."""
    methods = _methods()
    if methods is None or type(work) is not methods.kind:
        return
    address = _word(id(work) + object.__basicsize__)  # pybind11 has the pointer after what each object of Python has
    if address and _word(address) == methods.table:
        methods.abort(address)


@cache
def _methods() -> _Methods | None:
    """Find the method; None in another build or version of torch."""
    import torch
    from torch.distributed import Work

    if type(Work).__name__ != "pybind11_type":
        return None
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.PyDLL(str(path), os.RTLD_NOW | os.RTLD_NOLOAD)  # it keeps the GIL, and so the object
        abort = library[f"_Z{_CLASS}5abortEv"]
        table = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{_CLASS}E")) + _METHODS_AT
    except (OSError, AttributeError, ValueError):
        return None
    abort.argtypes, abort.restype = [ctypes.c_void_p], None
    return _Methods(Work, abort, table)


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value
