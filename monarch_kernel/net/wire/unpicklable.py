"""Finds the part of a value that can't be pickled, and its path: ``cfg.opt['a'][1]['lock']``.

Theory of operation. A pickler shows each object to ``persistent_id`` just before it pickles it, so the last object that it
showed is the one that failed. A breadth-first walk over the value, which calls no code of the user, finds the shortest path to
it. If the failed object is not there, because a ``__reduce__`` or ``__getstate__`` has just made it, the path leads to the last
object before it that is there and can't be pickled by itself.
"""

from __future__ import annotations

import io
import itertools
import pickle
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

__all__ = ["Culprit", "Trace", "find_culprit", "traced"]

Trace = Callable[[Any], tuple[Exception | None, list[Any]]]
"""Pickles a value; returns the error, and the last objects that the pickler came to."""

_MAX_OBJECTS = 200_000
_MAX_TRIALS = 30
_MAX_NAME = 60
_MAX_PATH = 300
_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), types.ModuleType)
_OF_MODULES = ("_modules", "_parameters", "_buffers")


class Culprit(NamedTuple):
    """The part of a value that can't be pickled.

    Attributes:
        path: how to reach it, in Python; a variable of a function is followed by a description of where it is from.
        value: the part.
        error: what its pickler raised.
        is_root: whether it is the whole value.
    """

    path: str
    value: Any
    error: Exception
    is_root: bool


class _Discarded(io.RawIOBase):
    def write(self, data: Any, /) -> int:
        return len(data)


def traced(kind: type[pickle.Pickler]) -> Trace:
    """Make a function that pickles a value without keeping the bytes, and returns the error and the last objects."""

    class Tracer(kind):  # type: ignore[valid-type, misc]
        def persistent_id(self, obj: Any) -> None:
            seen.append(obj)

    seen: deque[Any] = deque(maxlen=_MAX_TRIALS)

    def trace(value: Any) -> tuple[Exception | None, list[Any]]:
        seen.clear()
        try:
            Tracer(_Discarded(), 5, buffer_callback=lambda buffer: None).dump(value)
        except Exception as error:
            return error, list(seen)
        finally:
            found = list(seen)
            seen.clear()  # it would keep the value alive
        return None, found

    return trace


def find_culprit(roots: Mapping[str, Any], trace: Trace) -> Culprit | None:
    """Find the part that can't be pickled; None if all can, or if it is not known which.

    Args:
        roots: values with the names by which the user knows them.
        trace: as `traced` makes it.
    """
    for name, value in roots.items():
        error, seen = trace(value)
        if error is not None:
            return _culprit_in(name, value, error, seen, trace)
    return None


def _culprit_in(name: str, value: Any, error: Exception, seen: list[Any], trace: Trace) -> Culprit | None:
    is_too_large = any(
        isinstance(each, (RecursionError, MemoryError)) for each in (error, error.__cause__, error.__context__)
    )
    if not seen or is_too_large:
        return None  # each part by itself may be small enough
    paths = _Paths(name, value)
    failed = seen[-1]
    if not isinstance(failed, _ATOMS) and (path := paths.path_to(failed)) is not None:
        return Culprit(path, failed, error, failed is value)
    for candidate in reversed(seen):
        if isinstance(candidate, _ATOMS) or (path := paths.path_to(candidate)) is None:
            continue
        if candidate is value or trace(candidate)[0] is not None:
            return Culprit(path, candidate, error, candidate is value)
    return Culprit(name, value, error, True)


class _Step(NamedTuple):
    """How an object is reached: from the object with the id ``parent``, by ``text``; ``restarts`` marks a new name."""

    parent: int
    text: str
    restarts: str = ""


class _Paths:
    """The shortest paths to the objects of a value."""

    def __init__(self, name: str, root: Any) -> None:
        self._name, self._root = name, root
        self._steps: dict[int, _Step] = {id(root): _Step(0, name)}
        self._kept: list[Any] = []  # objects that the walk made, such as bound methods: their ids must stay theirs
        self._pending: deque[Any] = deque([root])

    def path_to(self, wanted: Any) -> str | None:
        """Return the path to an object, which is compared by identity; None if it is not found."""
        while id(wanted) not in self._steps and self._pending and len(self._steps) < _MAX_OBJECTS:
            holder = self._pending.popleft()
            try:
                for step, part in _parts(holder):
                    self._add(holder, step, part)
            except Exception:  # an odd class must not hide the rest
                continue
        return self._text(id(wanted)) if id(wanted) in self._steps else None

    def _add(self, holder: Any, step: tuple[str, str], part: Any) -> None:
        if isinstance(part, _ATOMS) or id(part) in self._steps:
            return
        self._steps[id(part)] = _Step(id(holder), *step)
        self._kept.append(part)
        self._pending.append(part)

    def _text(self, number: int) -> str:
        text = self._whole_text(number)
        n_half = _MAX_PATH // 2
        return text if len(text) <= _MAX_PATH else f"{text[:n_half]}…{text[-n_half:]}"

    def _whole_text(self, number: int) -> str:
        texts: list[str] = []
        while True:
            step = self._steps[number]
            texts.append(step.text)
            if step.restarts:
                return (
                    "".join(reversed(texts)) + f", where {step.text} is {step.restarts} {self._whole_text(step.parent)}"
                )
            if not step.parent:
                return "".join(reversed(texts))
            number = step.parent


def _parts(value: Any) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield what a pickler would find in a value, with the text of the step to it."""
    if isinstance(value, dict):
        for key, part in list(dict.items(value)):
            yield (f"[{_short(key)}]", ""), part
            if not isinstance(key, _ATOMS):
                yield (".keys()", ""), key
    elif isinstance(value, (list, tuple, deque)):
        names = getattr(type(value), "_fields", ()) if isinstance(value, tuple) else ()
        for i, part in enumerate(value):
            yield (f".{names[i]}" if i < len(names) else f"[{i}]", ""), part
    elif isinstance(value, (set, frozenset)):
        for part in value:
            yield (".pop()", ""), part
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        if not isinstance(value.__self__, types.ModuleType):
            yield (".__self__", ""), value.__self__
        if isinstance(value, types.MethodType):
            yield (".__func__", ""), value.__func__
    elif isinstance(value, partial):
        yield (".func", ""), value.func
        yield from (((f".args[{i}]", ""), part) for i, part in enumerate(value.args))
        yield from (((f".keywords[{key!r}]", ""), part) for key, part in value.keywords.items())
    elif isinstance(value, (staticmethod, classmethod)):
        yield (".__func__", ""), value.__func__
    elif isinstance(value, property):
        yield from (((f".{name}", ""), getattr(value, name)) for name in ("fget", "fset", "fdel"))
    elif isinstance(value, type):
        if _is_by_value(value):
            yield from (((f".{name}", ""), part) for name, part in list(vars(value).items()))
        return
    yield from _attributes(value)
    if _is_by_value(type(value)):
        yield (".__class__", ""), type(value)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[tuple[str, str], Any]]:
    if not _is_by_value(function):
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield (name, "in the closure of"), cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in dict.fromkeys(_global_names(code)):
        if name in function.__globals__:
            yield (name, "a global of"), function.__globals__[name]
    yield from (((f".__defaults__[{i}]", ""), part) for i, part in enumerate(function.__defaults__ or ()))
    yield from (((f".__kwdefaults__[{key!r}]", ""), part) for key, part in (function.__kwdefaults__ or {}).items())


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _is_by_value(thing: Any) -> bool:
    """Whether cloudpickle sends a function or class itself, and not its name."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    return module in (None, "__main__", "__mp_main__") or "<" in name


def _attributes(value: Any) -> Iterator[tuple[tuple[str, str], Any]]:
    try:
        stored = object.__getattribute__(value, "__dict__")
    except AttributeError:
        stored = {}
    if type(stored) is dict:
        for name, part in list(stored.items()):
            if name in _OF_MODULES and isinstance(
                part, dict
            ):  # of a module of torch, whose attributes these seem to be
                yield from (((f".{key}", ""), inner) for key, inner in list(part.items()))
            elif isinstance(name, str):
                yield (f".{name}" if name.isidentifier() else f".__dict__[{name!r}]", ""), part
    slots = itertools.chain.from_iterable(_slots(base) for base in type(value).__mro__)
    for name in slots:
        try:
            yield (f".{name}", ""), object.__getattribute__(value, name)
        except AttributeError:
            continue


def _slots(base: type) -> Iterator[str]:
    names = vars(base).get("__slots__", ())
    for name in (names,) if isinstance(names, str) else tuple(names):
        if name not in ("__dict__", "__weakref__"):
            yield f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


def _short(key: Any) -> str:
    text = repr(key) if isinstance(key, _ATOMS) else f"<{type(key).__name__}>"
    return text if len(text) <= _MAX_NAME else text[: _MAX_NAME - 1] + "…"
