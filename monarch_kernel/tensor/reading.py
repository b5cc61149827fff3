"""Reads distributed tensors: values, layouts and short texts come from the ranks, after all operations issued before."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch.utils import _pytree as pytree

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.mesh import Region, ValueMesh
from monarch_kernel.base.text import format_ranks
from monarch_kernel.errors import Failure, RemoteError, TensorError
from monarch_kernel.features.tensors.messages import DescribeResult, DescribeTensors, FetchTensors, ShowTensor
from monarch_kernel.features.tensors.records import Poison, TensorLayout
from monarch_kernel.net.wire.codec import decode_plain, pack
from monarch_kernel.net.wire.messages import Message
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.gather import gather, read_value
from monarch_kernel.tensor.distributed_tensor import DistributedTensor
from monarch_kernel.tensor.inventory import holdings_of
from monarch_kernel.tensor.lines import Lines, user_place

__all__ = [
    "agreed_layouts",
    "agreed_value",
    "described_result",
    "error_of",
    "fetch_shard",
    "fetched",
    "inspect",
    "show",
    "values",
]

T = TypeVar("T")


class Source(Protocol):
    """The ranks that hold tensors (`device.Device`)."""

    mesh: ProcMesh
    stream: Any
    target: Any
    lines: Lines
    frees: deque[int]
    places: dict[tuple[tuple[str, int], ...], ProcMesh]
    """Ranks by their points, as meshes."""

    def refuse_lost(self) -> NoReturn:
        """Raise the error about ranks that have ended."""
        ...


def fetch_shard(tensor: Any, shard: Mapping[str, int] | None = None, /, **point: int) -> Future[Any]:
    """Fetch the tensor of one rank, as a plain tensor on the CPU.

    Args:
        tensor: A distributed tensor, or a nested dict, list or tuple of some, which are fetched together.
        shard: The rank by axes of the mesh, as a dict.
        point: The same as keywords; axes that are left out count as 0.

    Returns:
        A future, which raises `TensorError` if an operation that the tensor depends on has failed on that rank.

    Raises:
        TypeError: There is no distributed tensor, or no such axis.
        IndexError: The mesh has no such rank.
        SupervisionError: The rank has ended.
        TensorError: The tensors are on several meshes.
    """
    if shard:
        point = {**shard, **point}
    if type(tensor) is DistributedTensor:
        part: Any = tensor._part
        place = _rank_at(part.device, point)
        return _request(part.device, place, FetchTensors, (part.id,), "fetching a tensor", _only)
    flat, tree = pytree.tree_flatten(tensor)
    tensors = [each for each in flat if isinstance(each, DistributedTensor)]
    if not tensors:
        raise TypeError(f"fetch_shard() takes distributed tensors, not a {type(tensor).__name__}")
    source: Any = tensors[0]._part.device
    if any(each._part.device is not source for each in tensors):
        raise TensorError("fetch_shard() takes tensors of one mesh: call it for each mesh")
    place = _rank_at(source, point)

    def finish(found: ValueMesh[Any]) -> Any:
        taken = iter(found.item())
        return pytree.tree_unflatten(
            [next(taken) if isinstance(each, DistributedTensor) else each for each in flat], tree
        )

    return _request(source, place, FetchTensors, tuple(each._part.id for each in tensors), "fetching a tensor", finish)


def _only(found: ValueMesh[Any]) -> Any:
    return found.values()[0][0]


def _rank_at(source: Source, point: Mapping[str, int]) -> ProcMesh:
    """Return the rank at a point as a mesh; axes that are left out count as 0."""
    key = tuple(point.items())
    place = source.places.get(key)
    if place is None:
        place = source.mesh.slice(**{**dict.fromkeys(source.mesh.extent, 0), **point})
        if len(source.places) < _MAX_PLACES:
            source.places[key] = place
    return place


_MAX_PLACES = 4096


def inspect(tensor: Any, shard: Mapping[str, int] | None = None, /, **point: int) -> Any:
    """Fetch the tensor of one rank and wait for it: the same as ``fetch_shard(tensor, **point).result()``."""
    return fetch_shard(tensor, shard, **point).get()


def values(mesh: ProcMesh, tensor: Any) -> ValueMesh[torch.Tensor]:
    """Fetch a tensor from all ranks of a mesh.

    Raises:
        TypeError: It is no distributed tensor.
        TensorError: It is not on all of these ranks, or an operation that it depends on has failed.
    """
    if not isinstance(tensor, DistributedTensor):
        raise TypeError(f"values() takes a distributed tensor, not a {type(tensor).__name__}")
    there: ProcMesh = tensor.mesh
    if not set(there.procs) >= set(mesh.procs):
        raise TensorError(f"the tensor is on {there.name} {dict(there.extent)}, which has not all ranks of {mesh!r}")
    source: Any = tensor._part.device
    return _request(source, mesh, FetchTensors, (tensor._part.id,), "fetching a tensor", _first).get()


def fetched(
    source: Source, ranks: ProcMesh, id: int, finish: Callable[[ValueMesh[Any]], Any] = lambda found: found
) -> Future[Any]:
    """Fetch what ranks keep under an id, and drop it there."""
    future = _request(source, ranks, FetchTensors, (id,), "fetching a result", lambda found: finish(_first(found)))
    source.frees.append(id)
    return future


def described_result(source: Source, first: int, name: str) -> tuple[Any, list[tuple[Any, ...]]]:
    """Wait for the result of a call, and return its structure and the layouts of its tensors.

    Raises:
        TensorError: The tensors have other shapes on other ranks, or the call has failed.
    """
    found = _request(source, source.mesh, DescribeResult, first, f"the result of {name}", lambda found: found).get()
    shapes = ValueMesh(
        found.extent, [[(each.shape, each.dtype, *each.placements) for each in there[1:]] for there in found.values()]
    )
    _agreed(source, shapes, name, "returns other tensors on other ranks", repr)
    structure, *layouts = found.values()[0]
    return structure, [_layout(each) for each in layouts]


def _layout(each: TensorLayout) -> tuple[Any, ...]:
    place = each.shape, each.stride, each.offset
    return *place, getattr(torch, each.dtype), torch.device(each.device), 0, each.placements


def show(*tensors: DistributedTensor, shard: Mapping[str, int] | None = None, **point: int) -> None:
    """Print tensors: the values of each rank, or statistics if there are many; ranks with the same share a line.

    Args:
        tensors: The tensors.
        shard: The place of the ranks on axes of the mesh; by default, all ranks are shown.
        point: The same, as keywords: ``show(x, gpus=0)``.

    Raises:
        KeyError: There is no such axis.
    """
    for tensor in tensors:
        if not isinstance(tensor, DistributedTensor):
            raise TypeError(f"show() takes distributed tensors, not a {type(tensor).__name__}")
        shown = tensor.slice_mesh(**{**(shard or {}), **point}) if shard or point else tensor
        source: Any = shown._part.device
        texts = _request(source, source.mesh, ShowTensor, shown._part.id, "showing a tensor", lambda found: found).get()
        groups: dict[str, list[int]] = {}
        for rank, text in zip(source.mesh.ranks, texts.values()):
            groups.setdefault(text, []).append(rank)
        for text, ranks in groups.items():
            prefix = f"{format_ranks(ranks)} "
            print(prefix + text.replace("\n", "\n" + " " * len(prefix)))


def agreed_value(source: Source, id: int, title: str) -> Any:
    """Fetch a value that all ranks must agree on, such as that of ``item()``.

    Raises:
        TensorError: They differ, or an operation has failed.
    """
    source.lines.note_wait(title, user_place(sys._getframe(1)))
    found = _request(source, source.mesh, FetchTensors, (id,), f"the result of {title}", _first).get()
    return _agreed(source, found, title, "returns another value on other ranks", _with_equal_nan)


def _with_equal_nan(value: Any) -> Any:
    return "nan" if value != value else value


def agreed_layouts(source: Source, ids: Iterable[int], title: str) -> list[tuple[Any, ...]]:
    """Ask for the layouts of tensors, which all ranks must agree on.

    Raises:
        TensorError: They differ, or an operation has failed.
    """
    source.lines.note_wait(title, user_place(sys._getframe(1)))
    found = _request(
        source, source.mesh, DescribeTensors, tuple(ids), f"the result of {title}", lambda found: found
    ).get()
    shapes = ValueMesh(found.extent, [[each.shape for each in there] for there in found.values()])
    _agreed(source, shapes, title, "returns another shape on other ranks", repr)
    layouts: list[TensorLayout] = found.values()[0]
    return [_layout(each) for each in layouts]


def _agreed(source: Source, found: ValueMesh[T], title: str, what: str, key: Callable[[T], Any]) -> T:
    groups: dict[Any, tuple[T, list[int]]] = {}
    for rank, value in zip(source.mesh.ranks, found.values()):
        groups.setdefault(key(value), (value, []))[1].append(rank)
    if len(groups) > 1:
        listed = "; ".join(f"{format_ranks(ranks)} {value}" for value, ranks in groups.values())
        raise TensorError(
            f"{title} {what} of {source.mesh.name}: {listed}\n"
            "  the program goes on once for all ranks: use fetch_shard(x, ...) for the value of one rank, or code on the ranks"
        )
    return next(iter(groups.values()))[0]


def _first(found: ValueMesh[Any]) -> ValueMesh[Any]:
    return ValueMesh(found.extent, [each[0] for each in found.values()])


def _request(
    source: Source,
    ranks: ProcMesh,
    kind: Callable[[int, Any], Message],
    content: Any,
    description: str,
    finish: Callable[[ValueMesh[Any]], T],
) -> Future[T]:
    """Ask ranks about tensors; the result is what ``finish`` makes of their answers, unless there is a poison among them.

    Raises:
        SupervisionError: All of these ranks have ended.
    """
    if source.target.lost and all(proc in source.target.lost for proc in ranks.procs):
        source.refuse_lost()
    region: Region = ranks.region
    read = gather(region, f"{description} failed on {source.mesh.name}", RemoteError, _read, ranks.spawned_extent)

    def check(answers: Sequence[Answer]) -> T:
        found = read(answers)
        poisons: dict[int, Poison] = {}
        for rank, answer in zip(ranks.ranks, found.values()):
            if (poison := _poison_in(answer)) is not None:
                poisons[rank] = poison
        if poisons:
            raise error_of(source, poisons)
        return finish(found)

    return ranks.runtime.request(ranks.procs, lambda id: pack(kind(id, content)), description, check, quiet=True)


def _poison_in(answer: Any) -> Poison | None:
    if type(answer) is list:
        for each in answer:
            if type(each) is Poison:
                return each
    return None


def _read(answer: Value) -> Any:
    found = read_value(answer)
    return [_unpacked(*each) for each in decode_plain(found)] if type(found) is bytes else found


def _unpacked(dtype: str, shape: Sequence[int], data: bytes) -> torch.Tensor:
    """Make a tensor of what travels of it (`PackedTensor`)."""
    with torch._C._DisableTorchDispatch():  # also in mesh.activate() this makes a plain tensor
        return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape)


def error_of(source: Source, poisons: Mapping[int, Poison]) -> TensorError:
    """Make the error of an operation that has failed; of several, of the one that was issued first."""
    op = min(poison.op for poison in poisons.values())
    failures: dict[int, Failure] = {rank: poison.failure for rank, poison in poisons.items() if poison.op == op}
    name = source.lines.name_of(op) or ("putting a tensor" if op < 0 else "an operation")
    line = source.lines.describe(op)
    failed = {rank: failure for rank, failure in failures.items() if failure.kind != "released"}
    where = f"rank {format_ranks(failed)} of {source.mesh.name}"
    if not failed:  # it was the operand of a reduction
        where = (
            f"another rank, so rank {format_ranks(failures)} of {source.mesh.name} has lost a result that depends on it"
        )
    text = f"{name} failed on {where}" + (f"; issued in {line}" if line else "")
    texts: dict[str, list[int]] = {}
    for rank, failure in failed.items():
        texts.setdefault(failure.headline(), []).append(rank)
    for headline, ranks in texts.items():
        text += f"\n  {format_ranks(ranks)} {headline}"
    text += "\n  what depends on its result is lost, all else is fine"
    if any(_OUT_OF_MEMORY.search(failure.headline()) for failure in failed.values()):
        text += f"\n  the program holds {holdings_of(source)}".replace("\n", "\n  ")
    return TensorError(text, failures)


_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|MemoryError", re.IGNORECASE)
