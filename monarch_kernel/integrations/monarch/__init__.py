"""Code for PyTorch Monarch runs as it is: `install` makes this package importable as ``monarch``.

Theory of operation. The names of `monarch_kernel.actor`, `monarch_kernel.rdma` and `monarch_kernel.spmd` are those of Monarch.
So ``monarch.actor`` has the same objects, with a few more names; ``monarch.remote`` and other names of tensors are those of
`monarch_kernel.tensor`. An alias (`base.aliases`) stands for this package and its
modules. Ranks import the user's modules, which import ``monarch``, so each process installs the alias before it unpickles
anything of the user (`SpawnDefaults.prepare`). Processes start as Monarch's do: as new interpreters without torch, which see
all GPUs that ``CUDA_VISIBLE_DEVICES`` names.

What is missing on purpose raises an error that says why and what to use instead (`missing.py`). The table is in
``docs/monarch.md``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from typing import Any

from monarch_kernel.actor.hosting.responses import Responses
from monarch_kernel.actor.spawning import SPAWN_DEFAULTS
from monarch_kernel.base import aliases
from monarch_kernel.errors import ActorDiedError, SupervisionError
from monarch_kernel.integrations.monarch import private, timer
from monarch_kernel.integrations.monarch.missing import refuse
from monarch_kernel.runtime.controller.session import LocalAgents

__all__ = ["NAME", "PATH", "SUBMODULES", "install", "timer"]

NAME = "monarch"
"""The name under which this package is imported."""

PATH = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "monarch_path")
"""A directory for ``PYTHONPATH``: with it, ``import monarch`` imports this package in programs that do not call `install`."""

SUBMODULES = {"job.kubernetes": "kubernetes_job", "job.spmd": "spmd_job", "tools.network": "network"}
"""Modules below those of Monarch that are modules beside them here."""

_PLACES = ("actor", "config", "rdma")
"""Modules whose names this one has, too."""
_SUBMODULES = (*_PLACES, "job", "spmd", "tools")
_SPELLINGS = {"ActorFuture": "Future"}
_OF_TENSORS = {
    "Tensor": "DistributedTensor",
    **{
        name: name
        for name in (
            "Stream", "call_on_shard_and_fetch", "fetch_shard", "get_active_mesh", "get_active_stream", "inspect",
            "no_mesh", "reduce", "reduce_", "remote", "show", "slice_mesh", "to_mesh",
        )
    },
}  # fmt: skip
"""Names of Monarch's tensor engine -> names of `monarch_kernel.tensor`, which loads torch."""


def install(*, shadow: bool = False) -> None:
    """Make ``import monarch`` import this package, also in the processes that this program spawns from now on.

    Args:
        shadow: whether to do so although another package of this name is installed, such as torchmonarch.

    Raises:
        ImportError: another package of this name is installed or imported.
    """
    if getattr(sys.modules.get(NAME), "__name__", "") == __name__:
        return
    if not shadow and (found := _other()):
        raise ImportError(
            f"a package named {NAME} is installed at {found}: uninstall torchmonarch, or call install(shadow=True) to import "
            "this one in its place"
        )
    for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
        del sys.modules[name]
    aliases.install({**{f"{NAME}.{name}": f"{__name__}.{place}" for name, place in SUBMODULES.items()}, NAME: __name__})
    private.install(NAME)
    sys.modules[NAME] = sys.modules[__name__]
    ActorDiedError.__name__ = SupervisionError.__name__  # for code that compares names
    SPAWN_DEFAULTS.is_fresh, SPAWN_DEFAULTS.device = True, "visible"
    SPAWN_DEFAULTS.prepare = _install_on_rank
    LocalAgents.is_light = Responses.is_lenient = True


def _install_on_rank() -> None:
    install(shadow=True)  # the program has decided
    if logging.root.level == logging.WARNING:  # nothing has set it; Monarch's processes pass INFO on to handlers
        logging.root.setLevel(logging.INFO)


def _other() -> str:
    """Find another package of the name; empty if there is none."""
    loaded = sys.modules.get(NAME)
    if loaded is not None:
        return str(getattr(loaded, "__file__", None) or "an unknown place")
    spec = importlib.util.find_spec(NAME)
    if spec is None:
        return ""
    where = spec.origin or str(next(iter(spec.submodule_search_locations or ()), "an unknown place"))
    return "" if os.path.dirname(where) == PATH else where


def __getattr__(name: str) -> Any:
    if name in _OF_TENSORS:
        return getattr(importlib.import_module("monarch_kernel.tensor"), _OF_TENSORS[name])
    name = _SPELLINGS.get(name, name)
    if not name.startswith("__") and name not in _SUBMODULES:
        for place in _PLACES:
            public = importlib.import_module(f"{__name__}.{place}")
            if name in public.__all__:
                return getattr(public, name)
    refuse(NAME, name)
