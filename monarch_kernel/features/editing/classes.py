"""Classes of a notebook on their way to processes where older ones of the same names live.

cloudpickle gives each class that travels by value a number of its own, so that it is one class wherever it goes: a class that
arrives again is not made again, its members are set once more on the one that is there. For an edit that is too early,
since nothing has been checked yet, and it does not take members away. So here classes travel without their numbers, and are
new ones where they arrive; the numbers go beside them, and are given to the living classes when these have become the new
ones (`identify`). From then on instances that travel either way are of the living class.
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
"""Module and qualified name of a class: what it is known by to the user."""


def key_of(cls: type) -> Key:
    """What a class is known by."""
    return cls.__module__, cls.__qualname__


def travels_by_value(cls: type) -> bool:
    """Whether processes elsewhere can't import a class: it belongs to a notebook, a function, or a registered module."""
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
    """A class that has travelled by value.

    Attributes:
        cls: as a new class of this process.
        key: what it is known by.
        number: that cloudpickle has given it where it comes from.
        as_key: what living classes are known by that are to become this one; None where it only came along.
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
    """Pickle classes, each with the key of those that are to become it, and the classes of the notebook they refer to.

    Without a key a class only comes along, as the others do.

    Returns:
        The pickle, and the text of the code in it that is in no file: name of the cell -> text.

    Raises:
        Exception: whatever comes of a member that can't be pickled.
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
    """Pickle a class as it is now, as arguments are; empty if that can't be."""
    try:
        return cast(bytes, cloudpickle.dumps(cls, 5))
    except Exception:  # of a member that was added since
        return b""


def load_classes(data: bytes) -> list[Arrived]:
    """Make new classes of what `dump_classes` gave; nothing that lives has changed then."""
    roots, found = pickle.loads(data)
    wanted: dict[type, Key | None] = dict(roots)
    for cls, (_, qualname), _ in found:
        cls.__qualname__ = qualname  # cloudpickle does not keep it
    return [Arrived(cls, key, number, wanted.get(cls)) for cls, key, number in found]


def living_classes(arrived: Sequence[Arrived], but: Collection[type]) -> dict[type, list[type]]:
    """The classes of this process, ``but`` some, that have the names of those that arrived: new class -> living ones."""
    by_key: dict[Key, list[type]] = {}
    for each in arrived:
        by_key |= {key: [] for key in _spellings(each.as_key or each.key)}
    for cls in all_classes():
        if cls not in but and (known := by_key.get((cls.__module__, cls.__qualname__))) is not None:
            known.append(cls)
    found: dict[type, list[type]] = {}
    for each in arrived:
        found[each.cls] = next(filter(None, (by_key[key] for key in _spellings(each.as_key or each.key))), [])
    return found


def _spellings(key: Key) -> list[Key]:
    """What a class may be called where it has arrived: cloudpickle keeps only the last part of a qualified name."""
    module, qualname = key
    return [key, (module, qualname.rpartition(".")[2])]


def mro_after(cls: type, becomes: Mapping[type, type]) -> list[type]:
    """The classes that Python asks for members of ``cls``, once some of them have become others."""
    if cls in becomes:
        return list(becomes[cls].__mro__)
    found: list[type] = []
    for base in cls.__mro__:
        found += [each for each in mro_after(base, becomes) if each not in found] if base in becomes else [base]
    return found


def classes_of_notebook() -> list[type]:
    """The classes that cells have defined, and that can travel."""
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
    """Whether a class of this process is the one that has a number elsewhere."""
    return tracker._DYNAMIC_CLASS_TRACKER_BY_ID.get(number) is cls


def identify(cls: type, number: str) -> None:
    """From now on a class of this process is the one that has this number elsewhere; without a number nothing changes."""
    if not number:
        return
    with tracker._DYNAMIC_CLASS_TRACKER_LOCK:
        tracker._DYNAMIC_CLASS_TRACKER_BY_ID[number] = cls
        tracker._DYNAMIC_CLASS_TRACKER_BY_CLASS[cls] = number
