"""Meshes of processes as devices for distributed tensors.

The package `monarch_kernel.tensor` uses meshes, so it is above this one, and it loads torch. So it is imported by its name when
a mesh is first used as a device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from monarch_kernel.actor.proc_handle import ProcHandle
from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.features.record import controller as record_controller  # noqa: F401 - so that sessions have it
from monarch_kernel.features.tensors import controller  # noqa: F401 - so that sessions have it
from monarch_kernel.features.tensors.records import MemoryUse

__all__ = ["ProcDevice"]


class ProcDevice(ProcHandle):
    """The methods of `ProcMesh` that make and read distributed tensors (`monarch_kernel.tensor`)."""

    def activate(self) -> AbstractContextManager[None]:
        """Return a context in which new tensors of this thread are distributed: one of the same shape on each rank.

        ``with mesh.activate(): x = torch.rand(3, 4)``. Operations follow their tensors, so they need not be in the context.
        Contexts can be nested; the innermost counts, and ``no_mesh.activate()`` gives plain tensors again.

        Raises:
            SupervisionError: a rank is dead or was stopped.
        """
        context: AbstractContextManager[None] = _on_mesh(self).activate(self)
        return context

    def put(self, value: Any) -> Any:
        """Copy a plain tensor, or an array of NumPy, to all ranks, and return it as a distributed tensor.

        Raises:
            TypeError: it is neither, or is not dense, or not on the CPU.
            SupervisionError: a rank is dead or was stopped.
        """
        return _on_mesh(self).put(self, value)

    def shard(self, value: Any, **placements: Any) -> Any:
        """Place a plain tensor, or an array of NumPy, as one tensor of which each rank has a part.

        ``mesh.shard(x, dp=Shard(0), tp=Replicate())``: a placement of torch for each axis; an axis that is left out replicates.

        Raises:
            KeyError: there is no such axis.
            TensorError: the placement is not possible, or this is a part of a mesh.
            SupervisionError: a rank is dead or was stopped.
        """
        return _on_mesh(self).shard(self, value, placements)

    def zeros(self, *shape: Any, dtype: Any = None, **placements: Any) -> Any:
        """Make a tensor of zeros, of which each rank makes its part; placements are those of `shard`."""
        return _on_mesh(self).filled(self, 0, shape, dtype, placements)

    def ones(self, *shape: Any, dtype: Any = None, **placements: Any) -> Any:
        """Make a tensor of ones, of which each rank makes its part; placements are those of `shard`."""
        return _on_mesh(self).filled(self, 1, shape, dtype, placements)

    def full(self, shape: Any, value: float, *, dtype: Any = None, **placements: Any) -> Any:
        """Make a tensor of equal elements, of which each rank makes its part; placements are those of `shard`."""
        return _on_mesh(self).filled(self, value, (shape,), dtype, placements)

    def empty(self, *shape: Any, dtype: Any = None, **placements: Any) -> Any:
        """Make a tensor of undefined elements, of which each rank makes its part; placements are those of `shard`."""
        return _on_mesh(self).filled(self, None, shape, dtype, placements)

    def rand(self, *shape: Any, dtype: Any = None, **placements: Any) -> Any:
        """Make a tensor of uniform random numbers, the same whatever the placements, which are those of `shard`."""
        return _on_mesh(self).drawn(self, "uniform_", shape, dtype, placements)

    def randn(self, *shape: Any, dtype: Any = None, **placements: Any) -> Any:
        """Make a tensor of normal random numbers, the same whatever the placements, which are those of `shard`."""
        return _on_mesh(self).drawn(self, "normal_", shape, dtype, placements)

    def from_local(self, tensor: Any, **placements: Any) -> Any:
        """Make the tensors of all ranks the parts of one tensor, without a copy; placements are those of `shard`."""
        return _on_mesh(self).from_local(self, tensor, placements)

    def distribute(self, module: Any, plan: dict[str, dict[str, Any]] | None = None, *, init: Any = None) -> Any:
        """Place the parameters and buffers of a module, in place, and return it.

        A module on the device meta (``with torch.device("meta"): model = Model()``) never has values in this process: the
        ranks make the parts, and ``reset_parameters()`` of each module initialises them there, with the same random numbers
        whatever the plan.

        Args:
            module: a module of torch, with or without values.
            plan: pattern of names -> placements by axis, as for `shard`: ``{"*.up": {"tp": Shard(0)}}``. A pattern names
                parameters or modules; parameters that none names are replicated.
            init: called with each module that had no values, after its ``reset_parameters()`` if it has one.

        Raises:
            TensorError: a pattern names nothing, a placement is not possible, or a module can't be initialised; then nothing
                has changed.
            KeyError: there is no such axis.
        """
        return _on_mesh(self).distribute(self, module, plan, init)

    def tensor(self, name: str) -> Any:
        """Make a variable of all ranks a distributed tensor, without a copy. ``mesh["x"] = tensor`` is the other direction.

        Raises:
            RemoteError: a rank has no such variable, or it is no tensor that can be distributed.
            TensorError: ranks have tensors of different shapes or dtypes.
            SupervisionError: a rank is dead or was stopped.
        """
        return _on_mesh(self).tensor(self, name)

    def rank_tensor(self, axis: str | Sequence[str]) -> Any:
        """Make a distributed tensor without dimensions that is the index of each rank along an axis.

        Along several axes it is the index in the grid of these, the last one fastest.

        Raises:
            KeyError: there is no such axis.
            ValueError: an axis is named twice.
        """
        return _on_mesh(self).rank_tensor(self, axis)

    def rank_tensors(self) -> dict[str, Any]:
        """Make a `rank_tensor` for each axis."""
        return {axis: self.rank_tensor(axis) for axis in self.extent}

    def values(self, tensor: Any) -> ValueMesh[Any]:
        """Fetch the parts of a distributed tensor from the ranks of this mesh, as plain tensors on the CPU.

        Raises:
            TensorError: an operation that it depends on has failed, or it is on other ranks.
        """
        found: ValueMesh[Any] = _on_mesh(self).values(self, tensor)
        return found

    def memory(self) -> ValueMesh[MemoryUse]:
        """Return how many distributed tensors each rank holds, and how much memory they take."""
        found: ValueMesh[MemoryUse] = _on_mesh(self).memory(self)
        return found

    def memory_by_line(self) -> Any:
        """List the distributed tensors of this program by the lines that made them, with their bytes on each rank."""
        return _on_mesh(self).memory_by_line(self)

    def refill(self, *, same: Any = (), load: Callable[[], object] | None = None) -> Any:
        """Restore the distributed tensors of a mesh whose dead ranks were replaced by `heal`.

        A new rank gets its part of a sharded tensor from a rank that holds the same part. Parts that no rank holds are lost,
        and an operation on such a tensor raises an error, unless ``load`` fills them.

        Args:
            same: distributed tensors, or modules, optimizers, dicts and lists of these, of which each rank has its own, but all
                ranks have equal ones, such as the weights in data-parallel training.
            load: called with all tensors usable again and lost parts zero; has to fill these, such as by
                ``lambda: checkpoint.load(path, model=model, optimizer=optimizer)``.

        Returns:
            What was restored, and the variables that have lost tensors.

        Raises:
            SupervisionError: a rank is dead.
        """
        return _on_mesh(self).refill(self, same, load)


def _on_mesh(mesh: ProcHandle) -> Any:
    mesh.runtime  # noqa: B018 - raises where the mesh can't be a device, before the import, which takes seconds
    return importlib.import_module("monarch_kernel.tensor.on_mesh")
