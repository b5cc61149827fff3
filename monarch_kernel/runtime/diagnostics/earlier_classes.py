"""Finds instances of classes that a later cell has defined again: ``isinstance`` with the new class is False for them.

It reads namespaces and frames, and calls no code of the user.
"""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

__all__ = [
    "classes_named",
    "classes_to_be_redefined",
    "instances_of",
    "instances_text",
    "notes_about_instances",
    "text_about",
]

_MAX_NAMES = 4
_MAX_LOOKED_AT = 10_000
_CONTAINERS = frozenset((list, tuple, deque, dict, defaultdict, OrderedDict, set, frozenset))


def classes_to_be_redefined(units: Iterable[CodeType], namespace: Mapping[str, Any]) -> dict[str, type]:
    """Return the classes that the code of a cell may define again, by name.

    Args:
        units: the compiled statements of the cell.
        namespace: the variables before it runs.
    """
    names = {const.co_name for unit in units for const in unit.co_consts if isinstance(const, CodeType)}
    return classes_named(names, namespace)


def classes_named(names: Iterable[str], namespace: Mapping[str, Any]) -> dict[str, type]:
    """Return those of some variables that are classes which cells have defined."""
    known = ((name, namespace.get(name)) for name in names)
    return {name: kind for name, kind in known if isinstance(kind, type) and _is_of_cell(kind)}


def instances_of(earlier: Iterable[type], namespace: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the instances of some classes among variables and in their lists, tuples, sets and dicts, at any depth.

    Returns:
        By the name of the class: the instances, by how code refers to them, such as ``cfg`` and ``cfgs['a'][0]``.
    """
    ids = {id(kind) for kind in earlier}
    found: dict[str, dict[str, Any]] = {}
    if ids and len(namespace) <= _MAX_LOOKED_AT:
        for text, value in itertools.islice(_values(namespace), _MAX_LOOKED_AT):
            if id(type(value)) in ids:
                found.setdefault(type(value).__name__, {})[text] = value
    return found


def _values(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield variables, then the elements of those that are containers, then the elements of these, and so on."""
    variables = [(name, value) for name, value in list(namespace.items()) if not name.startswith("_")]
    yield from variables
    containers = deque((name, value) for name, value in variables if type(value) in _CONTAINERS)
    seen = {id(value) for _, value in containers}
    while containers:
        for name, value in _elements(*containers.popleft()):
            yield name, value
            if type(value) in _CONTAINERS and id(value) not in seen and not name.startswith(("a ", "an ")):
                seen.add(id(value))
                containers.append((name, value))


def _elements(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the elements of a container of exactly one of Python's own types."""
    kind = type(value)
    if len(value) > _MAX_LOOKED_AT:
        return
    if kind in (list, tuple, deque):
        yield from ((f"{name}[{index}]", each) for index, each in enumerate(tuple(value)))
    elif kind in (set, frozenset):
        yield from ((f"an element of {name}", each) for each in tuple(value))
    else:
        for key, each in list(value.items()):
            yield f"a key of {name}", key
            yield (f"{name}[{key!r}]" if type(key) in (str, int) else f"a value of {name}"), each


def instances_text(before: Mapping[str, type], namespace: Mapping[str, Any]) -> str:
    """Describe the variables that are instances of classes that a cell has defined again; empty if there are none.

    Args:
        before: the result of `classes_to_be_redefined`.
        namespace: the variables after the cell has run.
    """
    lines = []
    for name, earlier in before.items():
        new = namespace.get(name)
        if new is earlier or not issubclass(type(new), type):
            continue
        lines += [text_about([*found], name) for found in instances_of([earlier], namespace).values()]
    return "\n".join(lines)


def notes_about_instances(frames: Iterable[FrameType]) -> tuple[str, ...]:
    """Describe the variables of frames that are instances of classes that have been defined again since."""
    found: dict[str, list[str]] = {}
    for key, value in _variables(frames):
        kind = type(value)
        if (
            _is_of_cell(kind)
            and not _is_of_package(kind)
            and "." not in kind.__qualname__
            and key not in found.get(kind.__qualname__, ())
        ):
            new = vars(sys.modules.get("__main__", sys)).get(kind.__qualname__)
            if new is not kind and issubclass(type(new), type):
                found.setdefault(kind.__qualname__, []).append(key)
    return tuple(text_about(names, kind) for kind, names in found.items())


def _variables(frames: Iterable[FrameType]) -> Iterator[tuple[str, Any]]:
    """Yield the variables that the code of frames names, and that exist."""
    for frame in frames:
        local, outer = frame.f_locals, frame.f_globals
        for name in (*frame.f_code.co_varnames, *frame.f_code.co_freevars, *frame.f_code.co_names):
            if name in local:
                yield name, local[name]
            elif name in outer:
                yield name, outer[name]


def _is_of_cell(kind: Any) -> bool:
    return bool(type.__getattribute__(kind, "__module__") == "__main__")


def _is_of_package(kind: type) -> bool:
    """Whether a class is derived from this package's, as those of actors are: ranks get them from the program."""
    package = __name__.partition(".")[0]
    return any(each.__module__.partition(".")[0] == package for each in kind.__mro__)


def text_about(names: list[str], kind: str) -> str:
    """Say that variables are instances of an earlier class, what follows from it, and what to do."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    shown = ", ".join(names[:_MAX_NAMES]) + more
    are = f"{shown} is an instance" if len(names) == 1 else f"{shown} are instances"
    them = "it" if len(names) == 1 else "them"
    first = "it" if names[0].startswith(("a ", "an ")) else names[0]
    is_false = f"isinstance({first}, {kind}) is False"
    return f"{are} of an earlier class {kind}, which a cell has defined again: {is_false}; make {them} again"
