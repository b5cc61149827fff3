"""Private names of Monarch, as placeholders: a test that uses one is skipped, and the other tests of its module run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from _pytest.outcomes import Skipped

from monarch_kernel.actor.spawning import SPAWN_DEFAULTS
from monarch_kernel.integrations import monarch as alias
from monarch_kernel.runtime.controller.session import LocalAgents

__all__ = ["FORKS", "LIMIT", "MARK", "install"]

MARK = "a private name of Monarch"
"""The text of the reason for which a test is skipped."""

FORKS = "MONARCH_UPSTREAM_FORKS"
"""The variable that makes ranks forks of a process that has imported torch; otherwise they start as Monarch's do."""

LIMIT = "MONARCH_UPSTREAM_LIMIT_S"
"""The variable that says after how many seconds a test is ended."""

PUBLIC = ("actor", "config", "job", "rdma", "spmd")
PLACES = (*PUBLIC, "kubernetes_job", "transport")
MODULES = (
    "monarch._src.actor.actor_mesh",
    "monarch._src.actor.bootstrap",
    "monarch._src.actor.future",
    "monarch._src.actor.proc_mesh",
    "monarch._src.rdma.rdma",
    "monarch.common.future",
    "monarch.common.remote",
)
"""Private modules that tests import from their package."""
SPELLINGS = {"Slice": "NDSlice"}


def install() -> None:
    """Make the alias importable, with placeholders; ranks do the same."""
    alias.install(shadow=True)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    SPAWN_DEFAULTS.prepare = _install_on_rank
    if os.environ.get(FORKS):
        SPAWN_DEFAULTS.is_fresh = LocalAgents.is_light = False


def _install_on_rank() -> None:
    alias._install_on_rank()
    install()


class _Private(type):
    """The class of placeholders, which may be base classes and annotations, but can't be used."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if (
            "__init__" in vars(cls) or cls.__module__ != __name__
        ):  # a class of the test that has a placeholder as its base
            return super().__call__(*args, **kwargs)
        raise Skipped(f"{MARK} is used: {cls.__name__}", allow_module_level=True)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(f"{cls.__name__}.{name}")

    def __getitem__(cls, item: Any) -> Any:
        return cls


def _placeholder(name: str) -> type:
    return _Private(name, (), {"__module__": __name__})


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, name = fullname.partition(".")
        if root != alias.NAME or not name or name in (*PUBLIC, *alias.SUBMODULES):
            return None
        return ModuleSpec(fullname, _Loader(), is_package=True)


class _Loader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        found: dict[str, Any] = {}

        def find(name: str) -> Any:
            if name.startswith("__") or f"{module.__name__}.{name}" in MODULES:  # the import then finds the module
                raise AttributeError(name)
            if name not in found:
                found[name] = _find(name)
            return found[name]

        module.__getattr__ = find  # type: ignore[method-assign]


def _find(name: str) -> Any:
    for place in PLACES:
        public = importlib.import_module(f"{alias.__name__}.{place}")
        spelled = SPELLINGS.get(name, name)
        if spelled in public.__all__:
            return getattr(public, spelled)
    return _placeholder(name)
