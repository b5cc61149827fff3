"""Shorter names for public modules: ``monarch_kernel.parallel`` is ``monarch_kernel.train.parallel``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

# ``python -m monarch_kernel`` imports this module while the working directory is first on the path, where a user's own
# ``pathlib.py`` may be. So this module imports nothing until an alias is imported.
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.abc import Loader, MetaPathFinder
    from importlib.machinery import ModuleSpec
    from types import ModuleType
else:
    Loader = MetaPathFinder = object

__all__ = ["install"]


def install(names: Mapping[str, str]) -> None:
    """Make imports of aliases, and of modules below them, return the modules that they stand for.

    Args:
        names: the full name of each module, by its alias.
    """
    sys.meta_path.insert(0, _Finder(names))


class _Finder(MetaPathFinder):
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for alias, name in self._names.items():
            if fullname == alias or fullname.startswith(f"{alias}."):
                import importlib.util
                from importlib.machinery import ModuleSpec

                spec = importlib.util.find_spec(name + fullname[len(alias) :])
                return None if spec is None else ModuleSpec(fullname, _Loader(spec), origin=spec.origin)
        return None


class _Loader(Loader):
    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        import importlib

        return importlib.import_module(self._spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import has set it to that of the alias
