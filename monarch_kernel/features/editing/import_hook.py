"""Imports on a rank: the user's modules come from the controller where the rank has no such files, or has other ones.

Theory of operation
===================

Three finders stand on ``sys.meta_path``. The first answers for modules that were edited since this process began
(`Imports.edited`): their text comes from the controller, whatever is on disk here. The second, before Python's own for files,
asks that, and notes what text the user's modules were loaded from, so that it can be told later whether they were edited. The
last one asks the controller for what nothing else has found.

An import waits for the answer, on whatever thread it is made, as for any other file. The controller gives only modules of the
user's, in files of Python's; what is installed must be installed here, too. A process that was forked from this one has no
connection, and imports what is on disk.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from types import CodeType, ModuleType

from monarch_kernel.features.editing.sources import digest, is_users, read_source
from monarch_kernel.net.wire.messages import ModuleSource

__all__ = ["Imports", "SourceLoader"]


class SourceLoader(InspectLoader):
    """Loads a module from a text."""

    def __init__(self, source: ModuleSource) -> None:
        self.source = source

    def get_source(self, fullname: str) -> str:
        """The text, also for tracebacks."""
        return self.source.text

    def is_package(self, fullname: str) -> bool:
        return self.source.is_package

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source.text, self.source.file or "<namespace package>", "exec", dont_inherit=True)

    def get_filename(self, fullname: str) -> str:
        """Where the file is on the controller's machine."""
        return self.source.file

    def spec(self) -> ModuleSpec:
        """What an import goes by."""
        source = self.source
        spec = spec_from_loader(source.name, self, origin=source.file or None, is_package=source.is_package)
        assert spec is not None
        spec.has_location = bool(source.file)
        if source.is_package and source.file:
            spec.submodule_search_locations = [os.path.dirname(source.file)]
        return spec

    def keep_lines(self) -> None:
        """Let tracebacks show the text, which may be in no file here, or in one that differs."""
        text, file = self.source.text, self.source.file
        if file:
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


class _Edited(MetaPathFinder):
    def __init__(self, imports: Imports) -> None:
        self._imports = imports

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return self._imports.fetch(fullname) if fullname in self._imports.edited else None


class _OnDisk(MetaPathFinder):
    def __init__(self, imports: Imports) -> None:
        self._imports = imports

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and is_users(spec.origin):
            with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError):  # the import itself will say so
                self._imports.loaded[fullname] = digest(read_source(fullname, spec.origin, False).text)
        return spec

    def invalidate_caches(self) -> None:
        PathFinder.invalidate_caches()


class _Elsewhere(MetaPathFinder):
    def __init__(self, imports: Imports) -> None:
        self._imports = imports

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = fullname.rpartition(".")[0]
        if parent:
            package = sys.modules.get(parent)
            file = getattr(package, "__file__", None)
            if file is not None and not is_users(file):
                return None  # what is not in an installed package is nowhere
        return self._imports.fetch(fullname)


class Imports:
    """What this process knows of the user's modules.

    Args:
        ask: the controller.

    Attributes:
        loaded: name of a module -> `digest` of the text that it was loaded from.
        edited: names of modules that were edited since this process began.
    """

    def __init__(self, ask: Callable[[str], ModuleSource | None]) -> None:
        self.loaded: dict[str, str] = {}
        self.edited: set[str] = set()
        self._ask = ask
        self._pid = os.getpid()

    def install(self) -> None:
        """Stand on ``sys.meta_path``, for the life of the process."""
        at = next((i for i, finder in enumerate(sys.meta_path) if finder is PathFinder), len(sys.meta_path))
        sys.meta_path.insert(at, _OnDisk(self))
        sys.meta_path.insert(0, _Edited(self))
        sys.meta_path.append(_Elsewhere(self))

    def fetch(self, name: str) -> ModuleSpec | None:
        """Have a module's text sent by the controller; None if that has none, either."""
        if os.getpid() != self._pid:
            return None
        source = self._ask(name)
        if source is None:
            return None
        loader = SourceLoader(source)
        loader.keep_lines()
        self.loaded[name] = digest(source.text)
        return loader.spec()
