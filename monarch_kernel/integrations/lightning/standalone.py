"""The strategies for the package ``pytorch_lightning``."""

from __future__ import annotations

from typing import Any

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.integrations.lightning.strategies import NotebookEnvironment, OnMesh, ShardedOnMesh

__all__ = ["MonarchDDP", "MonarchModelParallel"]


class _Environment(NotebookEnvironment, ClusterEnvironment):
    pass


class MonarchDDP(OnMesh, DDPStrategy):
    """DDP on the ranks of a mesh."""

    package = "pytorch_lightning"
    fabric = "lightning_fabric"

    def __init__(self, mesh: ProcMesh, **options: Any) -> None:
        super().__init__(**options)
        self._settle(mesh, _Environment(len(mesh)))


class MonarchModelParallel(ShardedOnMesh, ModelParallelStrategy):
    """FSDP2 and tensor parallelism on the ranks of a mesh."""

    package = "pytorch_lightning"
    fabric = "lightning_fabric"

    def __init__(self, mesh: ProcMesh, **options: Any) -> None:
        if not {"data_parallel_size", "tensor_parallel_size"} & options.keys():
            options |= {"data_parallel_size": len(mesh), "tensor_parallel_size": 1}
        super().__init__(**options)
        self._settle(mesh, _Environment(len(mesh)))
