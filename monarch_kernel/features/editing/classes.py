"""Pickles classes of a notebook for processes that have older versions of them.

cloudpickle gives each class that it pickles by value a unique number, so that the class stays one class wherever it goes: when
a class arrives again, cloudpickle does not create it again, but sets its members on the existing class. For an edit this is
too early, because nothing has been checked yet, and it does not remove members. So this module pickles classes without their
numbers, so that they arrive as new classes. The numbers travel beside them, and `identify` assigns them to the existing classes
once these have taken over the new members. From then on instances that travel in either direction have the existing class.
"""

from __future__ import annotations

import importlib
import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import cloudpickle
from cloudpickle import cloudpickle as tracker  # its table of classes has no public name

from monarch_kernel.features.editing.patch import all_classes

__all__ = [
    "Arrived",
    "Key",
    "classes_of_notebook",
    "dump_classes",
    "identify",
    "is_numbered",
    "key_of",
    "living_classes",
    "load_classes",
    "mro_after",
    "pickle_class",
    "travels_by_value",
]

Key = tuple[str, str]
"""Module and qualified name of a class, by which the user knows it."""


def key_of(cls: type) -> Key:
    """The key of a class."""
    return cls.__module__, cls.__qualname__


def travels_by_value(cls: type) -> bool:
    """Whether other processes can't import a class, because it belongs to a notebook, a function, or a registered module."""
    if cls.__module__ == "__main__" or cls.__module__.partition(".")[0] in _registered_roots():
        return True
    try:
        found: Any = importlib.import_module(cls.__module__)
        for name in cls.__qualname__.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return True
    return found is not cls


def _registered_roots() -> set[str]:
    return {name.partition(".")[0] for name in cloudpickle.list_registry_pickle_by_value()}


@dataclass(frozen=True)
class Arrived:
    """A class that arrived by value.

    Attributes:
        cls: the new class in this process.
        key: its key.
        number: its cloudpickle number in the process that sent it.
        as_key: key of the existing classes that it updates; None if it came only because another class refers to it.
    """

    cls: type
    key: Key
    number: str
    as_key: Key | None = None


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], object] | None) -> None:
        super().__init__(file, 5, buffer_callback=buffer_callback)
        self.classes: dict[type, str] = {}
        self.files: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and isinstance(reduced, tuple):  # by value, not by its name
            self.files.add(obj.__code__.co_filename)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2:
            number = tracker._get_or_create_tracker_id(obj)
            self.classes[obj] = number
            return (reduced[0], tuple(None if item == number else item for item in reduced[1]), *reduced[2:])
        return reduced


def dump_classes(classes: Sequence[tuple[type, Key | None]]) -> tuple[bytes, dict[str, str]]:
    """Pickle classes, each with the key of the classes that it updates, and the classes of the notebook that they refer to.

    A class without a key is treated like a class that others refer to.

    Returns:
        The pickle, and the source of the code in it that is in no file: name of the cell -> text.

    Raises:
        Exception: a member can't be pickled.
    """
    roots = tuple(classes)
    first = _Pickler(io.BytesIO(), None)
    first.dump(roots)
    found = [(cls, key_of(cls), number) for cls, number in first.classes.items()]
    file = io.BytesIO()
    _Pickler(file, None).dump((roots, found))
    texts = {name: "".join(linecache.getlines(name)) for name in first.files if not os.path.exists(name)}
    return file.getvalue(), {name: text for name, text in texts.items() if text}


def pickle_class(cls: type) -> bytes:
    """Pickle the current version of a class like an argument; empty if it can't be pickled."""
    try:
        return cast(bytes, cloudpickle.dumps(cls, 5))
    except Exception:  # from a member that was added since
        return b""


def load_classes(data: bytes) -> list[Arrived]:
    """Load the pickle of `dump_classes` as new classes, without changing existing ones."""
    roots, found = pickle.loads(data)
    wanted: dict[type, Key | None] = dict(roots)
    for cls, (_, qualname), _ in found:
        cls.__qualname__ = qualname  # cloudpickle drops it
    return [Arrived(cls, key, number, wanted.get(cls)) for cls, key, number in found]


def living_classes(arrived: Sequence[Arrived], but: Collection[type]) -> dict[type, list[type]]:
    """Find the existing classes with the names of those that arrived, except ``but``: new class -> existing classes."""
    by_key: dict[Key, list[type]] = {}
    for each in arrived:
        by_key |= {key: [] for key in _spellings(each.as_key or each.key)}
    for cls in all_classes():
        name = type.__getattribute__(cls, "__module__"), type.__getattribute__(cls, "__qualname__")
        if (known := by_key.get(name)) is not None and cls not in but:
            known.append(cls)
    found: dict[type, list[type]] = {}
    for each in arrived:
        found[each.cls] = next(filter(None, (by_key[key] for key in _spellings(each.as_key or each.key))), [])
    return found


def _spellings(key: Key) -> list[Key]:
    """The keys that a class may have where it arrived: cloudpickle keeps only the last part of a qualified name."""
    module, qualname = key
    return [key, (module, qualname.rpartition(".")[2])]


def mro_after(cls: type, becomes: Mapping[type, type]) -> list[type]:
    """The MRO of ``cls`` once classes have become others."""
    if cls in becomes:
        return list(becomes[cls].__mro__)
    found: list[type] = []
    for base in cls.__mro__:
        found += [each for each in mro_after(base, becomes) if each not in found] if base in becomes else [base]
    return found


def classes_of_notebook() -> list[type]:
    """The classes that cells have defined, and that can be pickled."""
    variables = vars(sys.modules["__main__"])
    found = []
    for name, value in list(variables.items()):
        if (
            isinstance(value, type)
            and value.__module__ == "__main__"
            and value.__name__ == name
            and pickle_class(value)
        ):
            found.append(value)
    return found


def is_numbered(cls: type, number: str) -> bool:
    """Whether a class of this process is known to cloudpickle by a number."""
    return tracker._DYNAMIC_CLASS_TRACKER_BY_ID.get(number) is cls


def identify(cls: type, number: str) -> None:
    """Register a class of this process with cloudpickle under a number; does nothing if the number is empty."""
    if not number:
        return
    with tracker._DYNAMIC_CLASS_TRACKER_LOCK:
        tracker._DYNAMIC_CLASS_TRACKER_BY_ID[number] = cls
        tracker._DYNAMIC_CLASS_TRACKER_BY_CLASS[cls] = number
