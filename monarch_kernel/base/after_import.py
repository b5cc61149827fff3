"""Calls a function when a module has been imported, without importing it.

A library that the user may import needs a change in this process, such as a registration. Importing it first would cost time
and memory in processes that never use it. A finder on ``sys.meta_path`` waits for its import instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["after_import"]

Call = Callable[[ModuleType], object]


class _Loader(Loader):
    """Loads a module by another loader, which may load other modules, too, and calls functions at the end."""

    def __init__(self, loader: Any, calls: Sequence[Call]) -> None:
        self._loader = loader
        self._calls = calls

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for call in list(self._calls):
            call(module)


class _Finder(MetaPathFinder):
    """Finds modules by the other finders, and adds calls to the end of their execution."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Call]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.calls:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self.calls[fullname])
                return spec
        return None


def after_import(name: str, call: Call) -> None:
    """Call a function with a module: now if it is imported, else at the end of its import; again after a reload.

    Args:
        name: full name of the module.
        call: gets the module. An error that it raises is one of the import.
    """
    finder = next((each for each in sys.meta_path if isinstance(each, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.calls.setdefault(name, []).append(call)
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):  # else its import is in progress
        call(module)
