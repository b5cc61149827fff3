"""Keeps a class that one cell defines in several processes one class when its instances travel between them.

Theory of operation. The ranks of a mesh, and with ``%%remote --local`` the notebook, too, each run the same cell. So each has
its own class ``Config``. cloudpickle sends a class of ``__main__`` by value, and the receiver would create one more class:
there ``isinstance`` would be false, and equal dataclasses and members of an Enum would differ.

So each process gives the classes that a cell has defined an id, which it derives from the number and text of the cell and the
name of the class: the id is the same in all processes, without a message. `ByValuePickler` sends this id beside the definition.
A receiver that knows the id uses its own class, unchanged: its methods keep the variables of its process, such as ``rank``. A
receiver that does not know the id creates the class from the definition, and keeps it under the id for the next instance.

The ids have their own tables, beside cloudpickle's. For a class that is in those, cloudpickle sets all members that arrive on
the existing class, so its methods would lose the variables of their process.

A cell that runs again defines a new class with another id, as in Python. Classes derived from this package's, such as actors,
have no ids: a mesh of actors gets the definition that the program has when it spawns them.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as tracker  # its table of classes has no public name

__all__ = ["ByValuePickler", "CellClasses", "adopt"]

_PACKAGE = __name__.partition(".")[0]

_by_id: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_id_of: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_own: weakref.WeakSet[type] = weakref.WeakSet()  # defined by cells of this process; the others have arrived
_running: list[CellClasses] = []


class CellClasses:
    """Gives ids to the classes that a cell defines in this process; a context manager around the run of the cell.

    An instance that is sent while the cell runs already has its class's id.

    Args:
        number: the number of the cell; 0 for code that is no cell, whose classes get no ids.
        code: the text of the cell, the same in all processes that run it.
        namespace: the variables that the cell sees and defines.
    """

    def __init__(self, number: int, code: str, namespace: Mapping[str, Any]) -> None:
        self._scope = hashlib.blake2b(f"{number}\n{code}".encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
        self._is_cell = number > 0
        self._namespace = namespace
        self._before: dict[int, type] = {}

    def __enter__(self) -> CellClasses:
        if self._is_cell:
            self._before = {id(cls): cls for _, cls in _classes_in(self._namespace)}
            _running.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in _running:
            self.collect()
            _running.remove(self)
            self._before = {}

    def collect(self) -> None:
        """Give ids to the classes that the cell has defined so far."""
        seen: set[int] = set()
        # Of several names of a class, the one in its definition gives the id, so that all processes choose the same.
        found = [(name != cls.__qualname__, name, cls) for name, cls in _classes_in(self._namespace)]
        for _, name, cls in sorted(found, key=lambda each: each[:2]):
            for path, each in self._parts(name, cls, seen):
                self._identify(each, f"{self._scope} {path}")

    def _parts(self, path: str, cls: type, seen: set[int]) -> Iterator[tuple[str, type]]:
        """List a new class with the new classes that it contains or is derived from, each with its path."""
        if id(cls) in self._before or not _is_of_cell(cls):
            return
        yield path, cls
        if id(cls) in seen:
            return
        seen.add(id(cls))
        for name, inner in _classes_in(vars(cls)):
            yield from self._parts(f"{path}.{name}", inner, seen)
        for base in cls.__bases__:
            yield from self._parts(f"{path}({base.__name__})", base, seen)

    def _identify(self, cls: type, known_as: str) -> None:
        try:
            known = _id_of.get(cls)
            if known is None:
                if cls in tracker._DYNAMIC_CLASS_TRACKER_BY_CLASS:  # it has arrived from another process
                    return
                _id_of[cls] = known_as
                _own.add(cls)
            elif known.partition(" ")[0] != self._scope:  # defined by an earlier cell, and bound to one more name
                return
            _by_id[known_as] = cls
        except TypeError:  # a metaclass without hash
            return


def _classes_in(variables: Mapping[str, Any]) -> list[tuple[str, type]]:
    # Not isinstance(): it reads `__class__`, for which lazy objects load themselves.
    return [(name, value) for name, value in list(variables.items()) if issubclass(type(value), type)]


def _is_of_cell(cls: type) -> bool:
    return cls.__module__ == "__main__" and not any(
        base.__module__.partition(".")[0] == _PACKAGE for base in cls.__mro__
    )


def adopt(former: type, successor: type) -> None:
    """Let a class take over the ids of another, whose instances have become instances of it."""
    for known_as, cls in list(_by_id.items()):
        if cls is former:
            _by_id[known_as] = successor
    if (known := _id_of.get(former)) is not None:
        _id_of[successor] = known
        if former in _own:
            _own.add(successor)


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes of ``__main__`` by value; a receiver with the class from the same cell uses its own."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce functions and classes by value, and leave other objects to the pickler."""
        is_class = issubclass(type(obj), type)
        if is_class:  # first, because cloudpickle notes each class that it reduces, as it does one that has arrived
            for cell in _running:
                cell.collect()
        reduced = super().reducer_override(obj)
        if not is_class or type(reduced) is not tuple or len(reduced) != 6:
            return reduced
        known_as = _id_of.get(obj)
        if known_as is None:
            return reduced
        make, args, state, _, _, set_state = reduced
        return _find_or_make, (known_as, make, args), (set_state, state), None, None, _set_state


def _find_or_make(known_as: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    for cell in _running:
        cell.collect()
    cls = _by_id.get(known_as)
    if cls is None:
        cls = make(*args)
        _by_id[known_as] = cls
        _id_of.setdefault(cls, known_as)
    return cls


def _set_state(cls: type, state: tuple[Callable[[type, Any], object], Any]) -> None:
    if cls not in _own:
        set_members, members = state
        set_members(cls, members)
