"""Registers the name in ``Trainer(strategy="monarch")``, and the notebook whose mesh it refers to.

Lightning has no entry points for strategies, so the name goes into Lightning's registry: at once if Lightning is imported
already, else at the end of its import.
"""

from __future__ import annotations

import importlib
from functools import partial
from types import ModuleType
from typing import Any

from monarch_kernel.base.after_import import after_import
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


class _Registration:
    """The registration of the names in this process.

    Attributes:
        is_done: Whether the names are registered, or will be when Lightning is imported.
        notebook: The notebook of this process; None in a script.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.notebook: Notebook | None = None


_registration = _Registration()


def register() -> None:
    """Register the name with Lightning, now or when it is imported."""
    if not _registration.is_done:
        _registration.is_done = True
        for name in _REGISTRIES:
            after_import(name, _register_in)


def install(notebook: Notebook) -> None:
    """Make the name refer to the latest mesh of a notebook, and run Trainers as its cells."""
    register()
    _registration.notebook = notebook


def remove(notebook: Notebook) -> None:
    """Forget a notebook that ends."""
    if _registration.notebook is notebook:
        _registration.notebook = None


def find_notebook() -> Notebook | None:
    """Return the notebook of this process; None in a script."""
    return _registration.notebook


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
