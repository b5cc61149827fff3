"""Mixins that make a Lightning strategy run on a mesh, for both packages of Lightning."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.text import plural
from monarch_kernel.integrations.lightning.launcher import LaunchFailed, MeshLauncher

if TYPE_CHECKING:
    import torch

__all__ = ["NotebookEnvironment", "OnMesh", "ShardedOnMesh"]


class NotebookEnvironment:
    """Lightning's cluster environment in the notebook, which is no rank of the cluster; answers like rank 0."""

    main_address = ""
    main_port = 0
    creates_processes_externally = True

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    @staticmethod
    def detect() -> bool:
        """Return False: Lightning must not detect it automatically."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the mesh determines it."""

    def global_rank(self) -> int:
        """Return the first rank."""
        return 0

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: it is always the first rank."""

    def local_rank(self) -> int:
        """Return the first rank of the host."""
        return 0

    def node_rank(self) -> int:
        """Return the first host."""
        return 0


class OnMesh:
    """A mixin for a strategy that runs on the ranks of a mesh, with a copy on each rank.

    Attributes:
        package: Lightning's package, such as ``lightning.pytorch``.
        fabric: the package below it, such as ``lightning.fabric``.
        is_over: whether this rank failed or was interrupted: the other ranks are at different points of the program, so this
            one no longer starts collectives.
    """

    package: ClassVar[str]
    fabric: ClassVar[str]
    parallel_devices: list[torch.device] | None
    cluster_environment: Any
    accelerator: Any
    _launcher: Any

    def _settle(self, mesh: ProcMesh, environment: Any) -> None:
        """Use the ranks of a mesh; wait until they are up, because their devices are unknown before.

        Raises:
            SupervisionError: some ranks did not start.
        """
        import torch

        if any(rank.state == "starting" for rank in mesh.view().ranks):
            mesh.initialized.get()
        ranks = mesh.view().ranks
        hosts = set(mesh.runtime.host_pool.places(mesh.procs))
        self._mesh: ProcMesh | None = mesh
        self._nodes = len(hosts)
        self.is_over = False
        self.cluster_environment = environment
        device = torch.device("cuda", 0) if ranks[0].device.startswith("cuda") else torch.device("cpu")
        self.parallel_devices = [device] * (len(mesh) // len(hosts))  # each rank sees only its own GPU

    def part(self, name: str) -> ModuleType:
        """Import a module of Lightning."""
        return importlib.import_module(f"{self.package}.{name}")

    @property
    def num_nodes(self) -> int:
        """The number of hosts of the mesh."""
        return self._nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        """Do nothing: the mesh determines it, and `_check_request` refuses other values."""

    def _configure_launcher(self) -> None:
        if self._mesh is not None:
            self._check_request(self._mesh)
            self._launcher = MeshLauncher(self, self._mesh)

    def _check_request(self, mesh: ProcMesh) -> None:
        """Check that the arguments of the Trainer fit the mesh.

        Lightning does not pass them to strategies, so this method reads them from the frame in which Lightning creates the
        strategy.

        Raises:
            ValueError: an argument contradicts the mesh.
        """
        frame = sys._getframe(1)
        while frame.f_back is not None and not {"devices", "num_nodes", "strategy"} <= frame.f_locals.keys():
            frame = frame.f_back
        devices, nodes = frame.f_locals.get("devices", "auto"), frame.f_locals.get("num_nodes", 1)
        assert self.parallel_devices is not None
        per, kind = len(self.parallel_devices), self.parallel_devices[0].type
        has = f"mesh {mesh.name!r} has {plural(len(mesh), 'rank')}, {per} on each of {self._nodes} hosts"
        if self._nodes == 1:
            has = f"mesh {mesh.name!r} has {plural(per, 'rank')} on one host"
        number = _number_of(devices)
        if number not in (None, per):
            raise ValueError(f"Trainer(devices={devices!r}), but {has}: leave devices out, or start another mesh")
        if nodes not in (1, self._nodes):
            raise ValueError(f"Trainer(num_nodes={nodes!r}), but {has}: leave num_nodes out, or start another mesh")
        chosen = self.accelerator.name()
        if chosen != kind:
            raise ValueError(
                f"the Trainer uses accelerator {chosen!r}, given or chosen by default, but the ranks of mesh {mesh.name!r} "
                f"use {kind!r}: write accelerator={kind!r}"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the mesh, and what each call of the Trainer creates again."""
        own = {"_mesh": None, "_launcher": None}
        return {**self.__dict__, **own, "_optimizers": [], "_lightning_optimizers": [], "lr_scheduler_configs": []}

    def enter_rank(self, environment: Any) -> None:
        """Switch this copy to its rank.

        Args:
            environment: Lightning's cluster environment for torchrun's environment variables.
        """
        self.cluster_environment = environment
        self.set_world_ranks()

    def set_world_ranks(self) -> None:
        """Set the rank in Lightning's ``rank_zero_only`` decorators."""
        rank = self.cluster_environment.global_rank()
        for module in (f"{self.package}.utilities.rank_zero", "lightning_utilities.core.rank_zero"):
            importlib.import_module(module).rank_zero_only.rank = rank

    # -- collectives, which do nothing after a failure

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; after a failure, return at once."""
        if not self.is_over:
            super().barrier(*args, **kwargs)  # type: ignore[misc]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send the object of one rank to all; after a failure, each rank keeps its own."""
        return obj if self.is_over else super().broadcast(obj, src)  # type: ignore[misc]

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce over all ranks; after a failure, over this rank only."""
        return tensor if self.is_over else super().reduce(tensor, *args, **kwargs)  # type: ignore[misc]

    def all_gather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather from all ranks; after a failure, from this rank only."""
        return tensor if self.is_over else super().all_gather(tensor, *args, **kwargs)  # type: ignore[misc]

    def on_exception(self, exception: BaseException) -> None:
        """Handle an exception of the Trainer; re-raise one that the ranks have reported already."""
        if isinstance(exception, LaunchFailed):
            exception.raise_own()
        super().on_exception(exception)  # type: ignore[misc]

    def full_state(self) -> dict[str, Any]:
        """Return the weights on the CPU; a collective, complete on rank 0."""
        import torch

        state: dict[str, Any] = self.lightning_module.state_dict()  # type: ignore[attr-defined]
        return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}

    def can_send_optimizers(self) -> bool:
        """Return whether rank 0 has the complete state of the optimizers."""
        return True


class ShardedOnMesh(OnMesh):
    """A mixin like `OnMesh`, for strategies in which each rank has a shard of the weights."""

    def full_state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_model_state_dict(self.lightning_module, options=options))  # type: ignore[attr-defined]

    def can_send_optimizers(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights for a checkpoint.

        Raises:
            RuntimeError: after a failure, because the shards of other ranks are out of reach.
        """
        if self.is_over:
            raise RuntimeError(
                "can't save a checkpoint after this rank failed, because other ranks have shards of the weights"
            )
        return dict(super().lightning_module_state_dict())  # type: ignore[misc]


def _number_of(devices: Any) -> int | None:
    """Return how many devices ``Trainer(devices=...)`` requests; None for all devices."""
    if isinstance(devices, str):
        devices = devices.strip()
        if devices in ("auto", "-1"):
            return None
        return int(devices) if devices.isdecimal() else len([part for part in devices.split(",") if part.strip()])
    if isinstance(devices, int):
        return None if devices == -1 else devices
    return len(devices)
