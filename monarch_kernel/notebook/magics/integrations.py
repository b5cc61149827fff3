"""Integrations of other frameworks, which a notebook loads by name: they build on the notebook, so it imports none of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol, cast

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.mesh import ValueMesh

__all__ = ["Integration", "Notebook", "integrations"]

_MODULES = ("monarch_kernel.integrations.lightning.registry",)


class Notebook(Protocol):
    """What an integration needs of a notebook."""

    def latest_mesh(self) -> ProcMesh | None:
        """Return the mesh that was started last; None if none is up."""

    def call(self, mesh: ProcMesh, function: Callable[[], Any]) -> ValueMesh[Any]:
        """Call a function on all ranks as a cell of the notebook: queued, with output, interruptible."""


class Integration(Protocol):
    """A module that makes a framework run on the meshes of a notebook, without importing it before the user does."""

    def install(self, notebook: Notebook) -> None:
        """Make the framework use this notebook."""

    def remove(self, notebook: Notebook) -> None:
        """Forget a notebook that ends."""


def integrations() -> list[Integration]:
    """Import all integrations."""
    return [cast(Integration, importlib.import_module(name)) for name in _MODULES]
