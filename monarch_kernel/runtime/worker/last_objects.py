"""Drops the user's objects when a rank ends, so that their ``__del__`` runs.

A rank ends without Python's finalization, which waits for threads and destroys modules that others still use. So it drops
what the user's code holds, as Python would: actors, the variables of the user's modules, of cells, of ``__main__`` and of
functions that came by value, and then the attributes of the user's classes.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from monarch_kernel.runtime.diagnostics.failures import is_machinery, is_user_file

__all__ = ["drop_objects"]


_USED_BY_FINALIZERS = (types.ModuleType, types.FunctionType, type, str, bytes, int, float, type(None))
"""Types of variables that a ``__del__`` may use. Their objects have no ``__del__`` themselves."""


class Holder(Protocol):
    """The part of a rank that holds the user's objects."""

    hosted: Any

    @property
    def namespace(self) -> tuple[dict[str, Any], frozenset[str]]:
        """The namespace of cells, and the names in it that are not the user's."""
        ...


def drop_objects(rank: Holder) -> None:
    """Drop the actors and the variables of the user's code."""
    for host in list(rank.hosted.values()):
        host.drop()
    variables, hidden = rank.namespace
    namespaces = [variables, *_namespaces()]
    for namespace in namespaces:
        kept = hidden if namespace is variables else frozenset()
        for is_private in (True, False):  # in this order, as Python does
            for name, value in list(namespace.items()):
                is_theirs = name.startswith("_") == is_private and not name.startswith("__") and name not in kept
                if is_theirs and not isinstance(value, _USED_BY_FINALIZERS):
                    namespace[name] = None
                del value
    gc.collect()
    modules = {"__main__", *(found for each in namespaces if isinstance(found := each.get("__name__"), str))}
    if sum(_drop_attributes(cls) for cls in _classes(modules)):  # any() would end at the first
        gc.collect()


def _drop_attributes(cls: type) -> bool:
    """Drop the objects that a class holds, and say whether there were some."""
    dropped = False
    for name, value in list(vars(cls).items()):
        if not (name.startswith("__") or isinstance(value, _USED_BY_FINALIZERS) or hasattr(type(value), "__get__")):
            with contextlib.suppress(TypeError):  # as for classes in C
                type.__setattr__(cls, name, None)
                dropped = True
        del value
    return dropped


def _classes(modules: set[str]) -> Iterator[type]:
    """Yield the classes of these modules. The collector does not list classes that it has frozen, so this looks for them."""
    left: list[type] = [object]
    seen = {id(object)}
    while left:
        found = left.pop()
        name = type.__getattribute__(found, "__dict__").get("__module__")
        if isinstance(name, str) and name in modules:
            yield found
        subclasses: list[type] = type.__subclasses__(found)
        for each in subclasses:
            if id(each) not in seen:
                seen.add(id(each))
                left.append(each)


def _namespaces() -> Iterator[dict[str, Any]]:
    """Yield the variables of ``__main__``, of the user's modules, and of functions whose module is not here."""
    known: set[int] = set()
    for module in list(sys.modules.values()):
        variables = getattr(module, "__dict__", None)
        if isinstance(variables, dict):
            known.add(id(variables))
            if module is sys.modules.get("__main__") or _is_of_user(variables):
                yield variables
    for function in gc.get_objects():
        if type(function) is types.FunctionType and id(function.__globals__) not in known:
            known.add(id(function.__globals__))
            name = function.__globals__.get("__name__")
            if name == "__main__" or (name not in sys.modules and is_user_file(function.__code__.co_filename)):
                yield function.__globals__


def _is_of_user(variables: Mapping[str, Any]) -> bool:
    name, file = variables.get("__name__"), variables.get("__file__")
    return isinstance(file, str) and name != "__main__" and is_user_file(file) and not is_machinery(file)
