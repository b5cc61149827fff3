"""Lightning's Trainer on a mesh: ``Trainer(strategy=MonarchStrategy(mesh))`` runs fit, validate, test and predict on its ranks.

Theory of operation
===================

The notebook's Trainer has a strategy with a *launcher* (`launcher.py`), as Lightning's own for notebooks has: what a call of
the Trainer would do here it has done elsewhere. The Trainer, the module and the data are pickled, once, without the mesh, and
each rank calls the same method of its copy (`program.py`), in the process group of the mesh, as part of a cell: so output,
progress bars, errors, interrupts and the order of cells are those of cells. Rank 0 sends home what has become of its copy
(`sync_back.py`), which the notebook's own objects take over: they stay the objects that they are.

Lightning comes as two packages with classes of their own, ``lightning`` and ``pytorch_lightning``: what both need is in
`strategies.py`, and what inherits from their classes in `unified.py` and `standalone.py`. Neither is imported before the user
does; the name ``"monarch"`` is registered with each when that happens (`registry.py`).
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
    """A strategy for a Trainer, which runs on the ranks of a mesh.

    Args:
        mesh: all of it; its ranks become those of Lightning, its hosts Lightning's nodes.
        strategy: ``ddp`` is Lightning's DDPStrategy. ``fsdp`` is its ModelParallelStrategy (FSDP2), with all ranks in the
            axis ``data_parallel`` unless sizes are given; the module shards itself in ``configure_model``.
        package: whose Trainer it is for; left out, ``pytorch_lightning`` if only that has been imported.
        **options: for Lightning's strategy, such as ``find_unused_parameters=True`` or ``save_distributed_checkpoint=False``.

    Raises:
        TypeError: it is no mesh.
        ValueError: it is a part of one, or there is no such strategy.
        ImportError: Lightning is not installed.
    """
    if not isinstance(mesh, ProcMesh):
        raise TypeError(f"MonarchStrategy() takes a mesh, such as %mesh up brings up, not a {type(mesh).__name__}")
    if not mesh.is_whole:
        raise ValueError(
            f"MonarchStrategy() takes a whole mesh, for the process group is that of all of it; {mesh.name!r} was sliced: "
            "bring up a mesh of the size that is wanted"
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
