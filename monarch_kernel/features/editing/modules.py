"""Reloads edited modules of this process, and the modules that import them.

Theory of operation
===================

An edited module runs again in its own dictionary, as with `importlib.reload`: references to the module see the new functions
and variables, and variables that the module does not set again stay. Then every module of the user that imports one of these
runs again, each after the modules that it imports. Functions and classes stay the same objects and take over the code and
members of the new ones (`features.editing.patch`), so that instances, and names that other modules have imported, are up to
date. Functions and classes that the source no longer has are removed.

`prepare` runs the modules and collects objections. Then `conclude` updates the classes, or `undo` gives all modules their
previous variables back.
"""

from __future__ import annotations

import ast
import os
import sys
import time
from collections.abc import Container, Iterator, Mapping, MutableMapping, MutableSet, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakSet

import psutil

from monarch_kernel.features.editing.class_mapping import ClassMapping
from monarch_kernel.features.editing.import_hook import SourceLoader
from monarch_kernel.features.editing.patch import all_classes, update_function
from monarch_kernel.features.editing.sources import digest, find_source, is_users
from monarch_kernel.net.wire.messages import ModuleSource

__all__ = ["LocalModules", "ModuleEdit", "imported_by", "in_order"]


@dataclass(frozen=True)
class _Before:
    """The state of a module before the edit."""

    names: dict[str, Any]
    digest: str | None


class ModuleEdit:
    """An edit of modules of this process.

    Args:
        sources: the current sources.
        loaded: name -> `digest` of the source that the module was loaded from; updated here.
        superseded: classes that an edit replaced or gave up, which must not be taken for existing ones; updated here.

    Attributes:
        edited: imported modules whose source differs.
        dependents: modules that import them.
        unchanged: imported modules whose source is the same.
        absent: modules that are not imported.
        classes: the changes to existing classes.
    """

    def __init__(
        self, sources: Sequence[ModuleSource], loaded: MutableMapping[str, str], superseded: MutableSet[type]
    ) -> None:
        self._loaded = loaded
        self._superseded = superseded
        self._texts = {source.name: source for source in sources}
        here = {name for name in self._texts if isinstance(sys.modules.get(name), ModuleType)}
        self.absent = tuple(sorted(self._texts.keys() - here))
        self.unchanged = tuple(sorted(one for one in here if loaded.get(one) == digest(self._texts[one].text)))
        self.edited = tuple(sorted(here.difference(self.unchanged)))
        modules = self._user_modules() if self.edited else {}
        imports = {name: imported_by(source, sys.modules) for name, source in modules.items()}
        self._order = in_order(self.edited, imports)
        self.dependents = tuple(name for name in self._order if name not in self.edited)
        self._before: dict[str, _Before] = {}
        self._new: set[type] = set()
        self.classes = ClassMapping()

    def _user_modules(self) -> dict[str, ModuleSource]:
        found: dict[str, ModuleSource] = {}
        for name, module in sys.modules.copy().items():
            if name in self._texts:
                found[name] = self._texts[name]
                continue
            loader = getattr(module, "__loader__", None)
            if isinstance(loader, SourceLoader):
                found[name] = loader.source
            elif name not in ("__main__", "__mp_main__") and is_users(getattr(module, "__file__", None)):
                source = find_source(name)
                if source is not None:
                    found[name] = source
        self._texts = {**found, **self._texts}
        return found

    def prepare(self) -> list[str]:
        """Run the modules, and return the objections to the edit.

        Raises:
            BaseException: a module raised it; then the edit is undone.
        """
        names = set(self._order)
        old = _classes_of(names, self._superseded)
        try:
            for name in self._order:
                self._run(name)
        except BaseException:
            self.undo()
            raise
        return self._pair(old, {cls for classes in _classes_of(names, ()).values() for cls in classes})

    def _run(self, name: str) -> None:
        module, source = sys.modules[name], self._texts[name]
        loader = SourceLoader(source)
        code = loader.get_code(name)
        self._before[name] = _Before(dict(vars(module)), self._loaded.get(name))
        spec = loader.spec()
        if spec.submodule_search_locations is not None and hasattr(module, "__path__"):
            spec.submodule_search_locations = list(module.__path__)
        module.__spec__, module.__loader__ = spec, loader
        loader.keep_lines()
        self._loaded[name] = digest(source.text)
        exec(code, vars(module))

    def _pair(self, old: Mapping[tuple[str, str], list[type]], now: set[type]) -> list[str]:
        known = {cls for classes in old.values() for cls in classes}
        self._new = now.difference(known, self._superseded)
        self._superseded |= self._new  # unless this is concluded
        for new in self._new:
            living = old.get((new.__module__, new.__qualname__), [])
            if living:
                self.classes.add(new, living, self._as_it_was(new, living))
        return [
            f"{cls.__module__}.{cls.__qualname__}, which has instances: {why}"
            for cls, why in self.classes.objections().items()
        ]

    def _as_it_was(self, new: type, living: Sequence[type]) -> type:
        """The class that the module had, of several classes with one name."""
        first, *rest = new.__qualname__.split(".")
        found: Any = self._before[new.__module__].names.get(first)
        for name in rest:
            found = getattr(found, name, None)
        return found if any(found is cls for cls in living) else living[-1]

    def conclude(self) -> None:
        """Remove what modules no longer define, and update existing functions. Called before classes change."""
        self._superseded -= self._new.difference(self.classes.pairs)
        self._superseded |= self.classes.aliases.keys()
        for name, before in self._before.items():
            variables = vars(sys.modules[name])
            for key, value in before.names.items():
                if getattr(value, "__module__", None) != name:
                    continue
                new = variables.get(key)
                if new is value:  # it was not set again
                    if isinstance(value, (FunctionType, type)) and value.__name__ == key:
                        del variables[key]
                elif isinstance(value, FunctionType) and isinstance(new, FunctionType) and update_function(value, new):
                    variables[key] = value

    def undo(self) -> None:
        """Give all modules their previous variables back."""
        for name, before in reversed(self._before.items()):
            variables = vars(sys.modules[name])
            for key in variables.keys() - before.names.keys():
                del variables[key]
            variables.update(before.names)
            if before.digest is None:
                self._loaded.pop(name, None)
            else:
                self._loaded[name] = before.digest
        self._before.clear()


class LocalModules:
    """The user's modules in a process without import hooks."""

    def __init__(self) -> None:
        self._loaded: dict[str, str] = {}
        self._superseded: WeakSet[type] = WeakSet()

    def edit(self, sources: Sequence[ModuleSource]) -> ModuleEdit:
        """An edit of this process's modules. Files that were last written before the process started count as unchanged."""
        started_s = psutil.Process().create_time()
        for source in sources:
            if source.name not in self._loaded and source.file and _written_s(source.file) < started_s:
                self._loaded[source.name] = digest(source.text)
        return ModuleEdit(sources, self._loaded, self._superseded)


def _written_s(file: str) -> float:
    """When a file was last written, in seconds since 1970; the current time if it was removed since it was read."""
    try:
        return os.stat(file).st_mtime
    except FileNotFoundError:
        return time.time()


def _classes_of(modules: set[str], but: Container[type]) -> dict[tuple[str, str], list[type]]:
    found: dict[tuple[str, str], list[type]] = {}
    for cls in all_classes():
        module = type.__getattribute__(cls, "__module__")
        if module in modules and cls not in but:
            found.setdefault((module, cls.__qualname__), []).append(cls)
    return found


def imported_by(source: ModuleSource, known: Mapping[str, object]) -> set[str]:
    """Names of modules that a module imports when it runs.

    Args:
        source: source of the module.
        known: existing modules: ``from a import b`` imports ``a.b`` if that is one of them.
    """
    package = source.name if source.is_package else source.name.rpartition(".")[0]
    found: set[str] = set()
    for each in _imports_in(source):
        if each.level is None:
            found.update(each.names)
            continue
        base = each.base
        if each.level:
            above = package.split(".")
            above = above[: len(above) - each.level + 1]
            base = ".".join([*above, base] if base else above)
        modules = {name for alias in each.names if (name := f"{base}.{alias}") in known}
        found |= modules
        if len(modules) < len(each.names):
            found.add(base)
    return found - {source.name, ""}


class _Import(NamedTuple):
    """An import statement: ``from base import names``, or ``import names`` without a level (its number of dots)."""

    level: int | None
    base: str
    names: tuple[str, ...]


_parsed: dict[str, tuple[str, tuple[_Import, ...]]] = {}
"""Name of a module -> `digest` of the source that was parsed last, and its imports: each edit asks about all modules."""


def _imports_in(source: ModuleSource) -> tuple[_Import, ...]:
    """The import statements that run with a module."""
    key = digest(source.text)
    before = _parsed.get(source.name)
    if before is not None and before[0] == key:
        return before[1]
    try:
        tree = ast.parse(source.text)
    except (SyntaxError, ValueError):
        return ()
    found: list[_Import] = []
    for node in _run_nodes(tree):
        if isinstance(node, ast.Import):
            found.append(_Import(None, "", tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.ImportFrom):
            found.append(_Import(node.level, node.module or "", tuple(alias.name for alias in node.names)))
    _parsed[source.name] = key, tuple(found)
    return tuple(found)


def _run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run with the module: all but those in functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from _run_nodes(node)


def in_order(edited: Sequence[str], imports: Mapping[str, set[str]]) -> list[str]:
    """Order edited modules, and all modules that import them directly or indirectly, each after those that it imports.

    Args:
        edited: names of modules.
        imports: name -> the modules that it imports.
    """
    concerned = set(edited)
    grows = True
    while grows:
        more = {name for name, needs in imports.items() if name not in concerned and not needs.isdisjoint(concerned)}
        concerned |= more
        grows = bool(more)
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen:
            return  # also in an import cycle, where one module has to come first
        seen.add(name)
        for needed in sorted(imports.get(name, set()) & concerned):
            visit(needed)
        order.append(name)

    for name in sorted(concerned):
        visit(name)
    return order
