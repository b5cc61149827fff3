"""Reads parts of tensors from the ranks that hold them into memory of this process."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from monarch_kernel.features.resharding.plan import Box, Part, cut_up, numel, shape_of
from monarch_kernel.net.memory.exports import BufferHandle
from monarch_kernel.net.memory.layout import Layout, Memory, memory_of
from monarch_kernel.net.memory.leases import identity
from monarch_kernel.net.memory.paths import Transfer
from monarch_kernel.runtime.buffers.transfers import carry, together
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["Held", "Kind", "Plain", "Tally", "TensorReading", "kind_of", "new_thing"]

_CAST_NBYTES = 64 << 20
"""Limit of the buffers for parts that are converted on arrival; a single part may be larger."""


Kind = Literal["tensor", "array", "dtensor"]


class Held(NamedTuple):
    """The parts of a tensor that a rank holds.

    Attributes:
        dtype: name of the dtype in torch and NumPy.
        shape: shape of the whole tensor.
        parts: the parts that the rank has.
        handle: handle on its memory, if the rank has lent it.
        same: the path under which the same memory occurs first.
        kind: type of the object.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    handle: BufferHandle | None = None
    same: str = ""
    kind: Kind = "tensor"


class Plain(NamedTuple):
    """A plain value, such as a number or a string."""

    value: Any


class Tally(NamedTuple):
    """Statistics of a read: bytes by data path, the number of tensors, and the duration."""

    data_paths: dict[str, int]
    tensors: int
    seconds: float


class _Job(NamedTuple):
    """One read: lent memory, the memory to read it into, and the box of ``thing`` if it must be converted."""

    handle: BufferHandle
    to: Memory
    thing: Any = None
    at: tuple[slice, ...] = ()


class TensorReading:
    """Reads tensors from sources, once it is certain that the sources have all of them.

    If several sources hold the same elements, it reads from the nearest: in this process, then on this machine. Among equally
    near sources, it prefers those with the least elements to read so far, starting with a different source in each reader.

    Args:
        client: the client of this process.
        sources: for each source, path -> what it holds.
        turn: number of this reader among all readers.
    """

    def __init__(self, client: Client, sources: Sequence[Mapping[str, Held | Plain]], turn: int = 0) -> None:
        self._client = client
        self._sources = sources
        self._load = [0] * len(sources)
        self._turn = turn % max(1, len(sources))
        self._jobs: list[_Job] = []
        self._seen: set[tuple[int, Layout]] = set()
        self._tensors: list[Any] = []
        here = identity()
        self._distance = [_distance(source.values(), here) for source in sources]

    def want(self, path: str, thing: Any, memory: Memory, parts: Iterable[Part]) -> None:
        """Register a tensor or array to fill with what the sources have under a path.

        Args:
            path: path of the tensor.
            thing: the tensor or array; elements are converted if its dtype differs from that of the sources.
            memory: memory of ``thing``.
            parts: the parts of the whole tensor that it holds.

        Raises:
            LookupError: the sources do not have all elements.
        """
        if (memory.address, memory.layout) in self._seen:  # tied parameters
            return
        self._seen.add((memory.address, memory.layout))
        jobs: list[_Job] = []
        for part in parts:
            held: list[tuple[BufferHandle, Part, int]] = []
            for source in self._in_order():
                leaf = self._sources[source].get(path)
                if isinstance(leaf, Held) and leaf.handle is not None:
                    held += [(leaf.handle, each, source) for each in leaf.parts]
            steps, left = cut_up(part.box, [(number, [each.box]) for number, (_, each, _) in enumerate(held)])
            if left:
                raise LookupError(f"{path}: no rank has the elements {_text_of(left[0])}")
            for number, box in steps:
                handle, theirs, source = held[number]
                self._load[source] += numel(box)
                job = _job(thing, memory, part, handle, theirs, box)
                if handle.lent.pid != os.getpid() or job.handle.address != job.to.address:  # else it is itself
                    jobs.append(job)
        if jobs:
            self._tensors.append(thing)
            self._jobs += jobs

    def _in_order(self) -> list[int]:
        """The sources, in order of preference."""
        count = len(self._sources)
        return sorted(range(count), key=lambda i: (self._distance[i], self._load[i], (i - self._turn) % count))

    def go(self) -> Tally:
        """Read all registered tensors, the largest parts first.

        Raises:
            BufferGoneError: a source has ended; the targets are partly filled.
        """
        started = time.perf_counter()
        jobs = sorted(self._jobs, key=lambda job: -job.handle.layout.nbytes)
        transfers = self._carry([job for job in jobs if job.thing is None])
        batch: list[_Job] = []
        for job in [job for job in jobs if job.thing is not None]:
            if batch and sum(each.handle.layout.nbytes for each in batch) + job.handle.layout.nbytes > _CAST_NBYTES:
                transfers += self._convert(batch)
                batch = []
            batch.append(job)
        transfers += self._convert(batch)
        _note_writes(self._tensors)
        by_path: Counter[str] = Counter()
        for transfer in transfers:
            by_path[transfer.path] += transfer.nbytes
        return Tally(dict(by_path), len(self._tensors), time.perf_counter() - started)

    def _carry(self, jobs: Sequence[_Job]) -> list[Transfer]:
        futures: list[Future[Transfer]] = [carry(self._client, job.handle, job.to, is_write=False) for job in jobs]
        return together(futures).get(warn_after_s=None) if futures else []

    def _convert(self, jobs: Sequence[_Job]) -> list[Transfer]:
        landed = [new_thing(job.handle.layout.dtype, job.handle.layout.shape, like=job.thing) for job in jobs]
        transfers = self._carry([_Job(job.handle, memory_of(thing)) for job, thing in zip(jobs, landed)])
        for job, thing in zip(jobs, landed):
            _assign(job.thing, job.at, thing)
        return transfers


def _job(thing: Any, memory: Memory, part: Part, handle: BufferHandle, theirs: Part, box: Box) -> _Job:
    shape = shape_of(box)
    ours_at, theirs_at = (
        tuple(at + start - first for at, (start, _), (first, _) in zip(each.at, box, each.box))
        for each in (part, theirs)
    )
    far, later = handle.layout.box(theirs_at, shape)
    lent = handle._replace(layout=far, address=handle.address + later)
    near, later = memory.layout.box(ours_at, shape)
    to = memory._replace(layout=near, address=memory.address + later)
    if near.dtype == far.dtype:
        return _Job(lent, to)
    return _Job(lent, to, thing, tuple(slice(at, at + size) for at, size in zip(ours_at, shape)))


def _distance(leaves: Iterable[Held | Plain], here: str) -> int:
    handle = next((leaf.handle for leaf in leaves if isinstance(leaf, Held) and leaf.handle is not None), None)
    if handle is None or handle.lent.machine != here:
        return 2
    return int(handle.lent.pid != os.getpid())


def new_thing(dtype: str, shape: Sequence[int], kind: Kind = "tensor", *, like: Any = None) -> Any:
    """Create a tensor or a NumPy array to read into; of the kind of ``like``, if given.

    Raises:
        TypeError: NumPy has no such dtype.
    """
    if kind_of(like) != "array" if like is not None else kind != "array":
        import torch

        return torch.empty(tuple(shape), dtype=getattr(torch, dtype))
    import numpy

    try:
        return numpy.empty(tuple(shape), dtype=dtype)
    except TypeError:
        raise TypeError(f"NumPy has no {dtype}: use a tensor there, not an array") from None


def kind_of(thing: Any) -> Kind:
    """The kind of an object with memory."""
    if not hasattr(thing, "untyped_storage"):
        return "array"
    return "dtensor" if hasattr(thing, "placements") else "tensor"


def _assign(thing: Any, at: tuple[slice, ...], value: Any) -> None:
    """Copy a tensor or array into a box of another one, converting the dtype."""
    if kind_of(thing) != "array":
        thing.detach()[at].copy_(value)
    else:
        thing[at] = value


def _note_writes(things: Sequence[Any]) -> None:
    """Tell autograd that tensors were modified behind its back, so that it rejects values that it saved of them."""
    for tensor in (thing for thing in things if kind_of(thing) != "array"):
        import torch

        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _text_of(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
