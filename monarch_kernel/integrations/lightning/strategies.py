"""What our strategies add to those of Lightning, whichever of its packages they are of."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.integrations.lightning.launcher import LaunchFailed, MeshLauncher

if TYPE_CHECKING:
    import torch

__all__ = ["NotebookEnvironment", "OnMesh", "ShardedOnMesh"]


class NotebookEnvironment:
    """The cluster as Lightning sees it in the notebook, which is no rank of it: it answers as rank 0 would."""

    main_address = ""
    main_port = 0
    creates_processes_externally = True

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    @staticmethod
    def detect() -> bool:
        """Not by itself."""
        return False

    def world_size(self) -> int:
        """How many ranks there are."""
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Stays what the mesh has."""

    def global_rank(self) -> int:
        """The first."""
        return 0

    def set_global_rank(self, rank: int) -> None:
        """Stays the first."""

    def local_rank(self) -> int:
        """The first of its host."""
        return 0

    def node_rank(self) -> int:
        """The first host."""
        return 0


class OnMesh:
    """A mixin: a strategy that runs on the ranks of a mesh, of which it leads a copy each.

    Attributes:
        package: Lightning's, such as ``lightning.pytorch``.
        fabric: what that is built on, such as ``lightning.fabric``.
        is_over: whether this rank has failed or was interrupted: the others are elsewhere, so nothing is asked of them.
    """

    package: ClassVar[str]
    fabric: ClassVar[str]
    parallel_devices: list[torch.device] | None
    cluster_environment: Any
    accelerator: Any
    _launcher: Any

    def _settle(self, mesh: ProcMesh, environment: Any) -> None:
        """Take the mesh's ranks for one's own, when they are up: before, nobody knows their devices.

        Raises:
            SupervisionError: some did not come up.
        """
        import torch

        if any(rank.state == "starting" for rank in mesh.view().ranks):
            mesh.initialized.get()
        ranks = mesh.view().ranks
        hosts = set(mesh._runtime.fleet.places(mesh.procs))
        self._mesh: ProcMesh | None = mesh
        self._nodes = len(hosts)
        self.is_over = False
        self.cluster_environment = environment
        device = torch.device("cuda", 0) if ranks[0].device.startswith("cuda") else torch.device("cpu")
        self.parallel_devices = [device] * (len(mesh) // len(hosts))  # of a GPU each rank sees its own alone

    def part(self, name: str) -> ModuleType:
        """A module of Lightning."""
        return importlib.import_module(f"{self.package}.{name}")

    @property
    def num_nodes(self) -> int:
        """Hosts of the mesh."""
        return self._nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        """Stays what the mesh has; `_check_request` refuses others."""

    def _configure_launcher(self) -> None:
        if self._mesh is not None:
            self._check_request(self._mesh)
            self._launcher = MeshLauncher(self, self._mesh)

    def _check_request(self, mesh: ProcMesh) -> None:
        """See whether the Trainer that is being made was asked for what the mesh has.

        Lightning does not tell strategies, so it is read off the frame in which it makes them.

        Raises:
            ValueError: it was asked for something else.
        """
        frame = sys._getframe(1)
        while frame.f_back is not None and not {"devices", "num_nodes", "strategy"} <= frame.f_locals.keys():
            frame = frame.f_back
        devices, nodes = frame.f_locals.get("devices", "auto"), frame.f_locals.get("num_nodes", 1)
        assert self.parallel_devices is not None
        per, kind = len(self.parallel_devices), self.parallel_devices[0].type
        has = f"mesh {mesh.name!r} has {len(mesh)} ranks, {per} on each of {self._nodes} hosts"
        if self._nodes == 1:
            has = f"mesh {mesh.name!r} has {per} ranks on one host"
        number = _number_of(devices)
        if number not in (None, per):
            raise ValueError(f"Trainer(devices={devices!r}), but {has}: leave devices out, or bring up another mesh")
        if nodes not in (1, self._nodes):
            raise ValueError(f"Trainer(num_nodes={nodes!r}), but {has}: leave num_nodes out, or bring up another mesh")
        chosen = self.accelerator.name()
        if chosen != kind:
            raise ValueError(
                f"Trainer(accelerator=...) is, or was chosen as, {chosen!r} here, but the ranks of mesh {mesh.name!r} are "
                f"on {kind!r}: write accelerator={kind!r}"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Without the mesh, and without what each call of the Trainer makes anew."""
        own = {"_mesh": None, "_launcher": None}
        return {**self.__dict__, **own, "_optimizers": [], "_lightning_optimizers": [], "lr_scheduler_configs": []}

    def enter_rank(self, environment: Any) -> None:
        """Be that of a rank from now on.

        Args:
            environment: Lightning's, which reads that of torchrun.
        """
        self.cluster_environment = environment
        self.set_world_ranks()

    def set_world_ranks(self) -> None:
        """Tell Lightning's decorators for rank 0 which rank this is."""
        rank = self.cluster_environment.global_rank()
        for module in (f"{self.package}.utilities.rank_zero", "lightning_utilities.core.rank_zero"):
            importlib.import_module(module).rank_zero_only.rank = rank

    # -- where the others are elsewhere

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; for none after a failure."""
        if not self.is_over:
            super().barrier(*args, **kwargs)  # type: ignore[misc]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all ranks the object of one; after a failure each keeps its own."""
        return obj if self.is_over else super().broadcast(obj, src)  # type: ignore[misc]

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce over all ranks; after a failure over this one."""
        return tensor if self.is_over else super().reduce(tensor, *args, **kwargs)  # type: ignore[misc]

    def all_gather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather from all ranks; after a failure from this one."""
        return tensor if self.is_over else super().all_gather(tensor, *args, **kwargs)  # type: ignore[misc]

    def on_exception(self, exception: BaseException) -> None:
        """Lightning is told of an exception; of one that came from ranks it has been told there."""
        if isinstance(exception, LaunchFailed):
            exception.raise_own()
        super().on_exception(exception)  # type: ignore[misc]

    def full_state(self) -> dict[str, Any]:
        """The weights, on the CPU; to be called on all ranks, whole on the first."""
        import torch

        state: dict[str, Any] = self.lightning_module.state_dict()  # type: ignore[attr-defined]
        return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}

    def can_send_optimizers(self) -> bool:
        """Whether rank 0 has all of the optimizers' state."""
        return True


class ShardedOnMesh(OnMesh):
    """A mixin: the same where each rank has a part of the weights."""

    def full_state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_model_state_dict(self.lightning_module, options=options))  # type: ignore[attr-defined]

    def can_send_optimizers(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights, for a checkpoint.

        Raises:
            RuntimeError: after a failure, for the parts of others are out of reach.
        """
        if self.is_over:
            raise RuntimeError(
                "no checkpoint can be saved now: this rank has failed, and the others have parts of the weights"
            )
        return dict(super().lightning_module_state_dict())  # type: ignore[misc]


def _number_of(devices: Any) -> int | None:
    """How many devices ``Trainer(devices=...)`` asks for; None for as many as there are."""
    if isinstance(devices, str):
        devices = devices.strip()
        if devices in ("auto", "-1"):
            return None
        return int(devices) if devices.isdecimal() else len([part for part in devices.split(",") if part.strip()])
    if isinstance(devices, int):
        return None if devices == -1 else devices
    return len(devices)
