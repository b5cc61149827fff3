"""Gives processes that a cell starts by ``spawn`` or ``forkserver`` the definitions of the cells.

Theory of operation. ``multiprocessing`` sends functions and classes by their names, and a process that it starts by ``spawn``
or ``forkserver`` imports the file of ``__main__`` to find them. The ``__main__`` of a rank has no file, so workers ended with
``Can't get attribute 'square' on <module '__main__'>``, and a ``Pool`` replaced them without end.

So on a rank the data with which such a process prepares itself has a copy of the rank's ``__main__``, and names a module that
fills the ``__main__`` of the process with it (`spawned_main`). After that all names are found, in both directions. The copy is
made when the process starts. It has functions and classes, by value, without the variables that they use; modules, by name; and
small values. Functions find variables by name in the new ``__main__``. Tensors on a device, large values, process groups
and what can't be pickled are left out.

A script that runs in a rank (`monarch_kernel.runtime.worker.script`) has a file. The processes that it starts import that, as
they do elsewhere.

A name that the new ``__main__`` does not have resolves to a class that raises an error where it is called. If it raised at
once, the worker would end before it takes the task, and the pool would start the next worker, without end.
"""

from __future__ import annotations

import functools
import io
import multiprocessing.spawn
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from monarch_kernel.net.wire.shared_classes import ByValuePickler
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["Missing", "fill", "give_definitions", "missing", "namespace_of_main"]

MAIN = "monarch_kernel.runtime.worker.spawned_main"
ATTRIBUTE = "_monarch_kernel_definitions"
"""The attribute of `multiprocessing.process` that has the definitions in the process that was started."""

_MAX_VALUE_NBYTES = 64 * 1024
_LEFT_OUT = ("monarch_kernel", "IPython", "torch.distributed")  # their objects belong to this process

_USES = ("__getattr__", "__call__", "__getitem__", "__len__", "__iter__", "__next__", "__enter__")
"""The uses of an object that a placeholder refuses with its own error; other uses fail with a TypeError that has its class."""

_main: dict[str, Any] = {}


def namespace_of_main() -> dict[str, Any]:
    """The variables of functions that have arrived by `fill`."""
    return _main


class _Main(dict[str, Any]):
    """Stands in a pickle for the variables of ``__main__``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return namespace_of_main, ()


class _Bounded(io.BytesIO):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > self._limit:
            raise pickle.PicklingError("it is too large")
        return super().write(data)


class _Pickler(ByValuePickler):
    def __init__(self, file: io.BytesIO, namespace: dict[str, Any]) -> None:
        super().__init__(file, 5)
        self._namespace = namespace
        self.globals_ref[id(namespace)] = _Main()

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is _Main:
            return NotImplemented
        if isinstance(obj, types.FunctionType) and obj.__globals__ is self._namespace:
            reduced = super().reducer_override(obj)
            if type(reduced) is tuple:
                reduced[2][1]["__globals__"] = {}  # they are in the ``__main__`` of the process
            return reduced
        if f"{kind.__module__}.".startswith(tuple(f"{name}." for name in _LEFT_OUT)):
            raise pickle.PicklingError(f"a {kind.__name__} belongs to this process")
        torch: Any = sys.modules.get("torch")
        if (
            torch is not None
            and isinstance(obj, torch.Tensor)
            and (obj.device.type != "cpu" or obj.untyped_storage().nbytes() > _MAX_VALUE_NBYTES)
        ):
            raise pickle.PicklingError("it is a tensor on a device, or a large one")
        return super().reducer_override(obj)


def _definitions(namespace: dict[str, Any]) -> bytes:
    """Pickle a copy of ``__main__``: the pickle of each variable that can be sent, and why the others can't."""
    sent: dict[str, bytes] = {}
    absent: dict[str, str] = {}
    for name, value in list(namespace.items()):
        if name.startswith("__") and name.endswith("__"):
            continue
        is_definition = isinstance(value, (types.FunctionType, type))
        file = _Bounded(float("inf") if is_definition else _MAX_VALUE_NBYTES)
        try:
            _Pickler(file, namespace).dump(value)
        except Exception as error:  # pickling runs code of the user's classes, which may raise anything
            absent[name] = f"{type(error).__name__}: {error}"
        else:
            sent[name] = file.getvalue()
    return pickle.dumps((sent, absent), 5)


class _Carried:
    """Sets the definitions as an attribute when it is unpickled: before the process has the path to import this package."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        code = f"import multiprocessing.process as process; process.{ATTRIBUTE} = data"
        return exec, (code, {"data": self._data})


def give_definitions(namespace: Callable[[], dict[str, Any]]) -> None:
    """Give processes that this one starts by ``spawn`` or ``forkserver`` a copy of the variables of ``__main__``.

    Args:
        namespace: returns these variables; none as long as no cell has run.
    """
    prepare: Callable[[str], dict[str, Any]] = multiprocessing.spawn.get_preparation_data
    original = getattr(prepare, "__wrapped__", prepare)

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = original(name)
        names = namespace()
        if not names or vars(sys.modules["__main__"]) is not names:  # no cell has run, or a script is the program
            return data
        data.pop("init_main_from_path", None)
        return data | {"init_main_from_name": MAIN, ATTRIBUTE: _Carried(_definitions(names))}

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def fill(data: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Load the definitions as the variables of ``__main__``; returns these, and why the others are missing."""
    sent, absent = pickle.loads(data)
    _main["__name__"] = "__main__"
    for name, pickled in sent.items():
        try:
            _main[name] = pickle.loads(pickled)
        except Exception as error:  # such as a module that only the rank can import
            absent[name] = f"{type(error).__name__}: {error}"
    return _main, absent


class Missing(type):
    """The class of placeholders for what a process does not have: they can be unpickled, also as a class, but not called."""

    reason = ""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise AttributeError(cls.reason)


def missing(name: str, absent: Mapping[str, str]) -> type:
    """Return a placeholder for a name that ``__main__`` does not have; dunder names raise AttributeError as usual.

    Raises:
        AttributeError: the name is one of Python's, such as ``__file__``.
    """
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(f"module '__main__' has no attribute {name!r}")
    why = f"it can't be sent to it ({absent[name]})" if name in absent else "it was defined after that process started"
    reason = (
        f"this process, which was started by spawn or forkserver, does not have {name!r} of a cell: {why}. Define it before "
        "the workers start, put it into a module and run %mesh sync, or start the workers by fork"
    )

    def refuse(self: object, *args: object) -> NoReturn:
        raise AttributeError(reason)

    def set_state(self: object, state: object) -> None:
        """Take any state, so that an instance can be unpickled."""

    members = {"reason": reason, "__setstate__": set_state, "__module__": "__main__"}
    return Missing(name, (), members | dict.fromkeys(_USES, refuse))


@register
def _install(rank: Rank) -> None:
    give_definitions(lambda: rank.namespace[0])
