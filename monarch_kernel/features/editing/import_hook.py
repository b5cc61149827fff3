"""Import hooks of a rank: load the user's modules from the controller if the rank lacks their files, or has other versions.

Theory of operation
===================

`Imports` installs three finders on ``sys.meta_path``. The first finds modules that were edited since this process started
(`Imports.edited`): it loads their source from the controller, whatever is on disk here. The second comes before Python's own
finder for files and calls it, and records from which source a module of the user was loaded, so that later edits can be
detected. The last one asks the controller for modules that no other finder has found.

An import waits for the answer on the thread that imports, as for any other file. The controller sends only modules of the user
in Python files; installed packages must be installed here, too. A process that was forked from this one has no connection, and
imports what is on disk.
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
    """Loads a module from its source text."""

    def __init__(self, source: ModuleSource) -> None:
        self.source = source

    def get_source(self, fullname: str) -> str:
        """The source, also for tracebacks."""
        return self.source.text

    def is_package(self, fullname: str) -> bool:
        return self.source.is_package

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source.text, self.source.file or "<namespace package>", "exec", dont_inherit=True)

    def get_filename(self, fullname: str) -> str:
        """The path of the file on the controller's machine."""
        return self.source.file

    def spec(self) -> ModuleSpec:
        """The import spec of the module."""
        source = self.source
        spec = spec_from_loader(source.name, self, origin=source.file or None, is_package=source.is_package)
        assert spec is not None
        spec.has_location = bool(source.file)
        if source.is_package and source.file:
            spec.submodule_search_locations = [os.path.dirname(source.file)]
        return spec

    def keep_lines(self) -> None:
        """Let tracebacks show this source, because the file may be missing here, or differ."""
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
            with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError):  # the import itself reports it
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
                return None  # an installed package is complete on this machine
        return self._imports.fetch(fullname)


class Imports:
    """The import hooks of this process, and what they know about the user's modules.

    Args:
        ask: requests the source of a module from the controller.

    Attributes:
        loaded: name of a module -> `digest` of the source that it was loaded from.
        edited: names of modules that were edited since this process started.
    """

    def __init__(self, ask: Callable[[str], ModuleSource | None]) -> None:
        self.loaded: dict[str, str] = {}
        self.edited: set[str] = set()
        self._ask = ask
        self._pid = os.getpid()

    def install(self) -> None:
        """Install the finders on ``sys.meta_path``, for the life of the process."""
        at = next((i for i, finder in enumerate(sys.meta_path) if finder is PathFinder), len(sys.meta_path))
        sys.meta_path.insert(at, _OnDisk(self))
        sys.meta_path.insert(0, _Edited(self))
        sys.meta_path.append(_Elsewhere(self))

    def fetch(self, name: str) -> ModuleSpec | None:
        """Fetch a module from the controller; None if the controller does not have it either."""
        if os.getpid() != self._pid:
            return None
        source = self._ask(name)
        if source is None:
            return None
        loader = SourceLoader(source)
        loader.keep_lines()
        self.loaded[name] = digest(source.text)
        return loader.spec()
