"""Movement of tensors to, from and between meshes of processes, and comparison of their replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from monarch_kernel.actor.proc_handle import ProcHandle
from monarch_kernel.actor.replica_check import ReplicaCheck, check_replicas
from monarch_kernel.actor.tensors import Moved, Ranks, all_to_all, copy_state, fetch_state, gather_parts, scatter
from monarch_kernel.runtime.rpc.gather import check_name

__all__ = ["ProcTensors"]


class ProcTensors(ProcHandle):
    """The methods of `ProcMesh` that move tensors (`monarch_kernel.actor.tensors`) and compare replicas."""

    @property
    def _as_targets(self) -> Ranks:
        return Ranks(self._client, self.procs, self.ranks, self._region, self.spawned_extent, self.name)

    def scatter(self, name: str, tensor: Any, *, axis: str | None = None, dim: int = 0) -> Moved:
        """Cut a tensor along a dimension, assign each rank its part as a variable, and wait until all ranks have it.

        Args:
            name: the name of the variable. A rank that fails keeps the old value.
            tensor: a tensor on the CPU, or a NumPy array. Ranks get the same kind, in separate memory.
            axis: ranks at index n along this axis get part n, whatever their indexes along other axes are. By default each rank
                gets a different part, in the order of the ranks.
            dim: the dimension of the tensor. If its size can't be divided evenly, the first parts are larger by one, as with
                `torch.tensor_split`; if there are fewer elements than ranks, the last ranks get none.

        Raises:
            TypeError: the memory of ``tensor`` can't be read directly.
            IndexError: there is no such dimension.
            KeyError: there is no such axis.
        """
        return scatter(self._as_targets, name, tensor, axis, dim)

    def gather(self, name: str, *, axis: str | None = None, dim: int = 0) -> Any:
        """Concatenate the parts of a tensor on the ranks, and return the whole tensor, or NumPy array.

        Args:
            name: the name of the variable. A DTensor knows which part each rank has, and ``axis`` and ``dim`` are ignored.
            axis: the axis along which the parts follow each other. Ranks along other axes have equal parts, of equal shapes,
                and one of them is read. By default each rank has a different part, in the order of the ranks.
            dim: the dimension of the tensor. The parts may differ in size along it.

        Raises:
            MoveError: the parts do not make one tensor, or a rank wrote to them meanwhile.
            RemoteError: a rank has no such variable.
            IndexError: there is no such dimension.
            KeyError: there is no such axis.
        """
        return gather_parts(self._as_targets, name, axis, dim)

    def all_to_all(
        self,
        name: str,
        source: ProcTensors | None = None,
        *,
        axis: str | None = None,
        dim: int = 0,
        from_axis: str | None = None,
        from_dim: int = 0,
    ) -> Moved:
        """Cut a tensor that another mesh has in parts into other parts for the ranks of this mesh, and wait until they have it.

        ``b.all_to_all("x", a, dim=1)`` gives ranks of ``b`` columns of a tensor that ranks of ``a`` have in rows. The meshes
        can have any number of ranks and any shape. The data goes from rank to rank.

        Args:
            name: the name of the variable on both meshes. Here it becomes a new tensor, or NumPy array.
            source: the mesh that has the tensor; by default this mesh.
            axis: the axis of this mesh, as in `scatter`.
            dim: the dimension that is cut for this mesh, as in `scatter`.
            from_axis: the axis of the source, as in `gather`.
            from_dim: the dimension along which the parts of the source follow each other, as in `gather`.

        Raises:
            MoveError: the parts do not make one tensor, or a rank wrote to them meanwhile.
            RemoteError: a rank has no such variable.
            SupervisionError: a rank has died.
        """
        there = self if source is None else source
        return all_to_all(self._as_targets, there._as_targets, name, axis, dim, from_axis, from_dim)

    def copy_state(
        self,
        source: ProcTensors,
        names: str | Iterable[str] | Mapping[str, str],
        *,
        strict: bool = True,
        cast: bool = False,
    ) -> Moved:
        """Copy variables of another mesh into those of this mesh, in place and from rank to rank, and wait until it is done.

        ``generator.copy_state(trainer, "model")`` updates the weights of a generator. Variables can be modules, tensors,
        arrays, numbers, strings, and dicts and lists of these. Both meshes can have any number of ranks, and tensors that are
        sharded in any way: a DTensor knows which part a rank has (FSDP2, tensor parallelism), and each rank has any other
        tensor in full. Each rank reads what it needs from the nearest rank that has it. Parameters stay the same objects, so
        optimizers keep them.

        Args:
            source: the mesh to read from. Its ranks serve the copy in the order of their cells.
            names: names of the variables; a dict if the names here are different: ``{"model": "policy"}``.
            strict: whether both meshes must have the same tensors in these variables. If False, a tensor that only one mesh has
                is left alone.
            cast: whether to convert tensors to the dtypes of this mesh.

        Raises:
            MoveError: shapes, dtypes or names do not match, and nothing was changed; or the source wrote to what was read.
            RemoteError: a rank has no such variable, or its value can't be moved.
            SupervisionError: a rank has died. If that was during the copy, the variables here are undefined.
        """
        return copy_state(self._as_targets, source._as_targets, names, strict=strict, cast=cast)

    def fetch_state(
        self,
        names: str | Iterable[str],
        *,
        check: Callable[[Mapping[str, tuple[str, tuple[int, ...]]]], None] | None = None,
        turn: int = 0,
    ) -> dict[str, Any]:
        """Copy variables of the ranks into this process, and return their tensors and values by path.

        ``trainer.fetch_state("model")`` has each parameter in full under its name in ``state_dict()``, such as
        ``model.0.weight``, however the ranks shard it. An actor with a handle on the mesh can do the same; the data goes
        straight from the ranks to its process. Variables can be what `copy_state` takes.

        Args:
            names: names of the variables.
            check: called before anything is read, with path -> dtype and shape of each tensor. What it raises ends the call.
            turn: number of this process among those that read the same; each starts with another replica.

        Raises:
            MoveError: ranks have different tensors under a name, or a rank wrote to them meanwhile.
            RemoteError: a rank has no such variable, or its value can't be moved.
            SupervisionError: a rank has died.
        """
        return fetch_state(self._as_targets, names, check, turn)

    def check(self, *names: str, axis: str | None = None) -> ReplicaCheck:
        """Compare the replicas of tensors between ranks by digests, in order with their cells.

        The result says whether they are equal. Otherwise it names the first tensor that differs, the ranks, and by how much.
        Ranks are replicas of a tensor if they hold the same part of it: all of it, or the same shard of a DTensor. Of modules,
        parameters and gradients are compared; buffers that differ are only mentioned.

        Args:
            names: variables: modules, optimizers, tensors, arrays, and dicts and lists of these. By default all modules.
            axis: compare only ranks along this axis of the mesh, where ranks along other axes hold different tensors without
                DTensors, such as stages of a pipeline.

        Raises:
            NameError: no rank has such a variable. One that only some ranks have is a difference.
            SupervisionError: a rank has died.
            KeyError: there is no such axis.
            ValueError: a name is not that of a variable.
        """
        for name in names:
            check_name(name)
        return check_replicas(self._as_targets, names, axis)
