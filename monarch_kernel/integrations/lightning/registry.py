"""Registers the name in ``Trainer(strategy="monarch")``, and the notebook whose mesh it refers to.

Lightning has no entry points for strategies, so the name goes into Lightning's registry: at once if Lightning is imported
already, else by a finder on ``sys.meta_path``, which registers it at the end of the import and changes nothing else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from monarch_kernel.notebook.magics.integrations import Notebook

__all__ = ["PACKAGES", "find_notebook", "install", "register", "remove"]

PACKAGES = {
    "lightning": "monarch_kernel.integrations.lightning.unified",
    "pytorch_lightning": "monarch_kernel.integrations.lightning.standalone",
}
"""A package of Lightning -> the module with the strategies that inherit from its classes."""

_REGISTRIES = {"lightning.pytorch.strategies": "lightning", "pytorch_lightning.strategies": "pytorch_lightning"}
"""A module with a ``StrategyRegistry`` -> its package."""

_NAMES = {"monarch": "ddp", "monarch_fsdp": "fsdp"}


class _Finder(MetaPathFinder):
    """Registers the name when Lightning is imported, and holds the notebook."""

    def __init__(self, notebook: Notebook | None) -> None:
        self.notebook = notebook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRIES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return None
        load = loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register_in(module)

        loader.exec_module = load_and_register
        return spec


def register() -> None:
    """Register the name with Lightning, now or when it is imported."""
    if _finder() is None:
        sys.meta_path.insert(0, _Finder(None))
    for name in _REGISTRIES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "StrategyRegistry"):  # else its import is in progress
            _register_in(module)


def install(notebook: Notebook) -> None:
    """Make the name refer to the latest mesh of a notebook, and run Trainers as its cells."""
    register()
    finder = _finder()
    assert finder is not None
    finder.notebook = notebook


def remove(notebook: Notebook) -> None:
    """Forget a notebook that ends."""
    finder = _finder()
    if finder is not None and finder.notebook is notebook:
        finder.notebook = None


def find_notebook() -> Notebook | None:
    """Return the notebook of this process; None in a script."""
    finder = _finder()
    return None if finder is None else finder.notebook


def _finder() -> _Finder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)


def _register_in(module: ModuleType) -> None:
    for name, strategy in _NAMES.items():
        module.StrategyRegistry.register(
            name,
            partial(_by_name, name, _REGISTRIES[module.__name__], strategy),
            description=f"{strategy.upper()} on the latest mesh of the notebook (monarch_kernel)",
            override=True,
        )


def _by_name(name: str, package: str, strategy: str) -> Any:
    """Create the strategy for ``Trainer(strategy=name)``.

    Raises:
        ValueError: there is no notebook, or it has no mesh.
    """
    notebook = find_notebook()
    if notebook is None:
        raise ValueError(
            f"strategy={name!r} refers to the latest mesh of a notebook, but this process has no notebook; "
            "write strategy=MonarchStrategy(mesh), from monarch_kernel.integrations.lightning"
        )
    mesh = notebook.latest_mesh()
    if mesh is None:
        raise ValueError(f"strategy={name!r}: no mesh is up; bring one up with: %mesh up NAME -n 4")
    make = importlib.import_module("monarch_kernel.integrations.lightning").MonarchStrategy
    return make(mesh, strategy, package=package)
