"""Finds and reads the source files of the user's own modules."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tokenize
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from monarch_kernel.base.location import PACKAGE
from monarch_kernel.net.wire.messages import ModuleSource
from monarch_kernel.runtime.diagnostics.failures import is_user_file

__all__ = ["check_syntax", "digest", "find_source", "is_users", "read_source", "sources_for"]

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})


def digest(text: str) -> str:
    """Hash a source text."""
    return hashlib.sha1(text.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()


def is_users(file: str | None) -> bool:
    """Whether a Python file is the user's own: not of Python, of an installed package, or of this package."""
    if not file or not file.endswith(".py"):
        return False
    return is_user_file(file) and not os.path.abspath(file).startswith(PACKAGE)


def find_source(name: str) -> ModuleSource | None:
    """Find the source of a module of the user without importing it; None if it is not a module of the user."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None) if module is not None else _find_spec(name)
    if not isinstance(spec, ModuleSpec):
        return None
    if spec.origin is None or not spec.has_location:
        is_space = spec.loader is None or type(spec.loader).__name__ == "NamespaceLoader"
        places = list(spec.submodule_search_locations or ())
        if is_space and places and all(is_user_file(os.path.join(place, "")) for place in places):
            return ModuleSource(name, "", "", True)
        return None
    if not is_users(spec.origin):
        return None
    try:
        return read_source(name, spec.origin, spec.submodule_search_locations is not None)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _find_spec(name: str) -> ModuleSpec | None:
    _forget_listings()
    path: Iterable[str] | None = None
    spec = None
    parts = name.split(".")
    for i in range(len(parts)):
        try:
            spec = PathFinder.find_spec(".".join(parts[: i + 1]), list(path) if path is not None else None)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and i < len(parts) - 1:
            return None
    return spec


def _forget_listings() -> None:
    """Make the next lookup read directories again, like `PathFinder.invalidate_caches`, but thread-safe.

    `PathFinder.invalidate_caches` deletes cache entries, and fails if another thread has deleted them first. This function
    deletes none.
    """
    # Not list(...items()): it makes tuples, so a collection can run, and let another thread change the dictionary meanwhile.
    for place, finder in sys.path_importer_cache.copy().items():
        if finder is None:  # it was not a directory
            for hook in sys.path_hooks:
                with contextlib.suppress(ImportError):
                    sys.path_importer_cache[place] = hook(place)
                    break
        elif hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()


def read_source(name: str, file: str, is_package: bool) -> ModuleSource:
    """Read a module's file.

    Raises:
        OSError: the file can't be read.
        SyntaxError: the encoding of the file is unknown.
    """
    with tokenize.open(file) as stream:
        return ModuleSource(name, os.path.abspath(file), stream.read(), is_package)


def check_syntax(sources: Iterable[ModuleSource]) -> None:
    """Check that sources can be compiled.

    Raises:
        SyntaxError: a source can't be compiled.
    """
    for source in sources:
        compile(source.text, source.file, "exec", dont_inherit=True)


def sources_for(what: ModuleType | str | os.PathLike[str]) -> list[ModuleSource]:
    """The modules that a user refers to by a module, a module name, or the path of a file or folder.

    A package stands for all modules in it, a folder for all modules that can be imported from there.

    Raises:
        ValueError: ``what`` refers to no module of the user.
        TypeError: ``what`` has another type.
    """
    if isinstance(what, ModuleType):
        return _of_module(what.__name__)
    if not isinstance(what, (str, os.PathLike)):
        raise TypeError(f"sync() takes a module, its name, or a path, not {what!r} (of type {type(what).__name__})")
    path = Path(what)
    if path.exists():
        return _of_path(path.resolve())
    if isinstance(what, str) and all(part.isidentifier() for part in what.split(".")):
        return _of_module(what)
    raise ValueError(f"there is no file, folder or module {str(what)!r}")


def _of_module(name: str) -> list[ModuleSource]:
    source = find_source(name)
    if source is None:
        raise ValueError(f"module {name!r} is not a source file of yours: it is built in, installed, or does not exist")
    if not source.is_package:
        return [source]
    spec = getattr(sys.modules.get(name), "__spec__", None) or _find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = [source] if source.file else []
    for place in places:
        found += _below(Path(place), name)
    return found


def _below(folder: Path, package: str) -> Iterator[ModuleSource]:
    """The modules in a folder: those of a package, or those that can be imported if the folder is on ``sys.path``."""
    prefix = package + "." if package else ""
    for path in _listed(folder):
        if path.name.startswith(".") or path.name in _SKIPPED:
            continue
        if path.suffix == ".py" and path.stem.isidentifier() and path.stem != "__init__" and is_users(str(path)):
            yield from _source_if_there(prefix + path.stem, path, False)
        elif (
            path.is_dir()
            and path.name.isidentifier()
            and (init := path / "__init__.py").exists()
            and is_users(str(init))
        ):
            yield from _source_if_there(prefix + path.name, init, True)
            yield from _below(path, prefix + path.name)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:  # removed in the meantime, for example by git checkout
        return []


def _source_if_there(name: str, file: Path, is_package: bool) -> Iterator[ModuleSource]:
    """Read a module that a folder has just listed; yields nothing if its file was removed in the meantime."""
    with contextlib.suppress(FileNotFoundError):
        yield read_source(name, str(file), is_package)


def _of_path(path: Path) -> list[ModuleSource]:
    path = path.parent if path.name == "__init__.py" else path
    is_package = path.is_dir() and (path / "__init__.py").exists()
    file = path / "__init__.py" if is_package else path
    if path.is_file() and path.suffix != ".py":
        raise ValueError(f"{path} is not a Python file")
    if path.is_dir() and not is_package:
        found = list(_below(path, _name_of(path)))
        if not found:
            raise ValueError(f"{path} contains no module that can be imported")
        return found
    for name, module in sys.modules.copy().items():
        known = getattr(module, "__file__", None)
        if (
            name != "__main__"
            and known
            and os.path.basename(known) == file.name
            and os.path.realpath(known) == str(file)
        ):
            return _of_module(name)
    name = _name_of(path)
    if not name:
        raise ValueError(f"{path} can't be imported: no entry of sys.path leads to it")
    source = read_source(name, str(file), is_package)
    return [source, *_below(path, name)] if is_package else [source]


def _name_of(path: Path) -> str:
    """The import name of a file or folder; empty for an entry of ``sys.path`` itself, and for paths outside of all entries."""
    roots = {Path(entry or os.getcwd()).resolve() for entry in sys.path}
    parts: list[str] = []
    here = path.with_suffix("") if path.suffix == ".py" else path
    while here not in roots:
        if not here.name.isidentifier() or here.parent == here:
            return ""
        parts.append(here.name)
        here = here.parent
    return ".".join(reversed(parts))
