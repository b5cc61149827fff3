"""Modules of Monarch that are private there, but from which libraries import public names.

``monarch._src`` has the Python sources of Monarch, and ``monarch._rust_bindings`` its library. Public names such as
SupervisionError are defined there, and libraries import them from there. Each of these modules has all names of the public
module of the same subject, and refuses others. Modules that are missing on purpose (`MISSING_MODULES`) say why.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from monarch_kernel.integrations.monarch.missing import MISSING_MODULES, MissingNameError, refuse

__all__ = ["install"]

_HERE = __name__.rpartition(".")[0]
_ROOTS = ("_src", "_rust_bindings")
_BY_SUBJECT = {"rdma": ("rdma",), "spmd": ("spmd",), "job": ("job", "kubernetes_job"), "config": ("config",)}
_OTHERS = ("actor", "config", "telemetry", "transport")
_MODULES = {
    "_src": (),
    "_src.actor": (
        "actor_mesh", "bootstrap", "concurrent", "debugger", "debugger.debug_controller", "endpoint", "future", "host_mesh",
        "proc_mesh", "returns_future", "shape", "supervision", "telemetry",
    ),
    "_src.job": ("job", "job_state", "kubernetes", "port_forward", "process", "shell", "slurm"),
    "_src.rdma": ("rdma",),
    "_src.spmd": ("actor", "host_mesh"),
    "_rust_bindings": (),
    "_rust_bindings.monarch_hyperactor": (
        "actor", "actor_mesh", "channel", "config", "context", "host_mesh", "proc", "proc_mesh", "shape", "supervision",
        "value_mesh",
    ),
}  # fmt: skip
_NAMES = frozenset([*_MODULES, *(f"{parent}.{name}" for parent, names in _MODULES.items() for name in names)])
_SPELLINGS = {"Slice": "NDSlice"}
_REASON = "is private in Monarch, and this product has no such name: use the names of monarch.actor"


def install(package: str) -> None:
    """Make the private modules importable below a package of this name."""
    sys.meta_path.insert(0, _Finder(package))


class _Finder(MetaPathFinder):
    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(self._prefix)
        if name != fullname and name in MISSING_MODULES:
            return ModuleSpec(fullname, _Refusing(name), is_package=True)
        if name == fullname or name not in _NAMES:
            return None
        return ModuleSpec(fullname, _Loader(name), is_package=any(other.startswith(f"{name}.") for other in _NAMES))


class _Refusing(Loader):
    """Loads a module that is missing on purpose: the import raises an error that says why."""

    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> NoReturn:
        raise MissingNameError(f"the module {module.__name__} {MISSING_MODULES[self._name]}", name=module.__name__)


class _Loader(Loader):
    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        subject = self._name.rpartition(".")[2]
        parent = self._name.split(".")[1:2]
        places = (*_BY_SUBJECT.get(subject, ()), *_BY_SUBJECT.get(parent[0] if parent else "", ()), *_OTHERS)

        def find(name: str) -> Any:
            if not name.startswith("__") and f"{self._name}.{name}" not in _NAMES:
                for place in places:
                    public = importlib.import_module(f"{_HERE}.{place}")
                    if _SPELLINGS.get(name, name) in public.__all__:
                        return getattr(public, _SPELLINGS.get(name, name))
            refuse(module.__name__, name, _REASON)

        module.__getattr__ = find  # type: ignore[method-assign]
