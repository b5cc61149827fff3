"""Lightning's Trainer on a mesh: ``Trainer(strategy=MonarchStrategy(mesh))`` runs fit, validate, test and predict on its ranks.

Theory of operation
===================

The notebook's Trainer has a strategy with a *launcher* (`launcher.py`), like Lightning's own strategies for notebooks. The
launcher runs a method of the Trainer on the ranks instead of in the notebook. It pickles the Trainer, the module and the data
once, without the mesh, and each rank calls the same method of its copy (`program.py`), in the process group of the mesh, as
part of a cell. So output, progress bars, errors, interrupts and the order of cells work as in cells. Rank 0 then sends the
state of its copy to the notebook (`sync_back.py`), which loads it into its own objects and keeps their identity.

Lightning comes as two packages with separate classes, ``lightning`` and ``pytorch_lightning``. `strategies.py` has what both
need, and `unified.py` and `standalone.py` have the classes that inherit from theirs. This package imports neither before the
user does; it registers the name ``"monarch"`` with each at that moment (`registry.py`).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Literal

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.integrations.lightning.registry import PACKAGES, register

__all__ = ["MonarchStrategy"]


def MonarchStrategy(
    mesh: ProcMesh,
    strategy: Literal["ddp", "fsdp"] = "ddp",
    *,
    package: Literal["lightning", "pytorch_lightning"] | None = None,
    **options: Any,
) -> Any:
    """Create a strategy that runs a Trainer on the ranks of a mesh.

    Args:
        mesh: a whole mesh; its ranks are Lightning's ranks, and its hosts are Lightning's nodes.
        strategy: ``ddp`` is Lightning's DDPStrategy. ``fsdp`` is its ModelParallelStrategy (FSDP2), with all ranks in the
            axis ``data_parallel`` unless sizes are given; the module shards itself in ``configure_model``.
        package: the package of the Trainer; by default ``pytorch_lightning`` if only that has been imported, else
            ``lightning``.
        **options: for Lightning's strategy, such as ``find_unused_parameters=True`` or ``save_distributed_checkpoint=False``.

    Raises:
        TypeError: ``mesh`` is not a mesh.
        ValueError: ``mesh`` is a slice, or there is no such strategy or package.
        ImportError: Lightning is not installed.
    """
    if not isinstance(mesh, ProcMesh):
        raise TypeError(f"MonarchStrategy() takes a mesh, such as %mesh up starts, not a {type(mesh).__name__}")
    if not mesh.is_whole:
        raise ValueError(
            f"MonarchStrategy() takes a whole mesh, because the process group spans all its ranks, but this is a slice of "
            f"{mesh.name!r}: start a mesh of the size that you want"
        )
    if strategy not in ("ddp", "fsdp"):
        raise ValueError(f"there is no strategy {strategy!r} for meshes; there are: ddp, fsdp")
    if package is None:
        only_standalone = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
        package = "pytorch_lightning" if only_standalone else "lightning"
    if package not in PACKAGES:
        raise ValueError(f"there is no Lightning package {package!r}; there are: {', '.join(PACKAGES)}")
    try:
        classes = importlib.import_module(PACKAGES[package])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ImportError(f"{package} is not installed: pip install 'monarch_kernel[lightning]'") from error
    return (classes.MonarchDDP if strategy == "ddp" else classes.MonarchModelParallel)(mesh, **options)


register()
