"""Which distributed tensors a program has: by the lines that made them, and by the names of its variables.

The stream of operations notes what the program holds (`features.tensors.stream.Target`). The objects of the process are
searched only for the names of variables, when an error needs them.
"""

from __future__ import annotations

import gc
import math
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from monarch_kernel.base.events import TensorLineView, TensorsView
from monarch_kernel.base.text import format_nbytes, plural
from monarch_kernel.tensor.distributed_tensor import DistributedTensor
from monarch_kernel.tensor.lines import describe_place
from monarch_kernel.tensor.propagation import LAYOUTS, Layout

__all__ = [
    "Holding",
    "Holdings",
    "TensorsOnView",
    "copies_for",
    "copies_of",
    "count_by_name",
    "holdings_of",
    "indexes_of",
    "names_of",
    "tensors_in",
    "tensors_on",
]

_SHOWN = 6
_SHOWN_MESHES = 64
_COUNT_SHARE = 30
"""A view counts tensors again after this many times the time that it took."""

_PUT = "put there by the program"
_SHARD = re.compile(r"_?S\((\d+)")


class TensorHolder(Protocol):
    """The ranks that hold tensors (`device.Device`)."""

    lines: Any
    mesh: Any
    stream: Any
    target: Any


class Holding(NamedTuple):
    """Tensors that one line of the program has made.

    Attributes:
        line: The line; empty if it is not known.
        tensors: The number of tensors.
        nbytes: Their bytes on each rank. A view has none while the program has the tensor whose memory it shares.
    """

    line: str
    tensors: int
    nbytes: int


class Holdings(tuple[Holding, ...]):
    """What a program holds, by line; the largest first."""

    def __repr__(self) -> str:
        count, nbytes = sum(each.tensors for each in self), sum(each.nbytes for each in self)
        lines = [f"{format_nbytes(nbytes)} in {plural(count, 'tensor')} on each rank"]
        lines += [
            f"  {format_nbytes(each.nbytes)} in {plural(each.tensors, 'tensor')}: {each.line or 'an earlier line'}"
            for each in self[:_SHOWN]
        ]
        if (rest := self[_SHOWN:]) != ():
            lines.append(f"  {format_nbytes(sum(each.nbytes for each in rest))} by {plural(len(rest), 'other line')}")
        return "\n".join(lines)


def tensors_on(device: Any) -> list[DistributedTensor]:
    """The distributed tensors that this process has on a device."""
    return [
        each
        for each in gc.get_objects()
        if type(each) is DistributedTensor and "_part" in each.__dict__ and each._part.device is device
    ]


def holdings_of(device: TensorHolder) -> Holdings:
    """List the tensors on a device by the lines that made them.

    Memory counts for the tensor that was made with it; if the program has only views of that, for the first of them.
    """
    lines = device.lines
    sizes = tuple(device.mesh.extent.values())
    held = device.target.held.copy()
    for id in device.target.frees.copy():
        held.pop(id, None)
    bases, counted = device.target.bases, set()
    by_place: dict[Any, list[int]] = {}
    for id, (layout, op) in held.items():
        base, of_memory = bases.get(id, (id, layout))
        has_memory = base == id or not (
            base in counted or base in held or device.stream.is_held_elsewhere(base, device.target)
        )
        counted.add(base)
        counts = by_place.setdefault(_PUT if op < 0 else lines.place_of(op), [0, 0])
        counts[0] += 1
        counts[1] += _nbytes(LAYOUTS.numbered(of_memory), sizes) if has_memory else 0
    by_line: dict[str, list[int]] = {}
    for place, counts in by_place.items():
        line = place if isinstance(place, str) else "" if place is None else describe_place(place)
        by_line[line] = [sum(pair) for pair in zip(by_line.get(line, (0, 0)), counts)]
    holdings = [Holding(line, count, nbytes) for line, (count, nbytes) in by_line.items()]
    return Holdings(sorted(holdings, key=lambda each: (-each.nbytes, -each.tensors)))


def _nbytes(layout: Layout, sizes: Sequence[int]) -> int:
    """The memory of a tensor on the rank with the largest part of it; ``sizes`` are those of the axes of its mesh."""
    shape = list(layout.shape)
    for text, size in zip(layout.placements, sizes):
        if (sharded := _SHARD.match(text)) is not None:
            shape[int(sharded[1])] = -(-shape[int(sharded[1])] // size)
    return math.prod(shape) * layout.dtype.itemsize


class TensorsOnView:
    """The tensors of a session as views show them: counted again when enough time has passed that it costs little.

    Args:
        devices: Returns the devices of the session.
    """

    def __init__(self, devices: Callable[[], Iterable[TensorHolder]]) -> None:
        self._devices = devices
        self._counted: dict[tuple[int, ...], tuple[float, tuple[TensorLineView, ...]]] = {}  # with when to count again

    def __call__(self, procs: Sequence[int]) -> TensorsView | None:
        """Return the tensors on processes; None if there are none."""
        ranks_of = {proc: rank for rank, proc in enumerate(procs)}
        here = [each for each in self._devices() if not each.target.lost and ranks_of.keys() >= set(each.target.procs)]
        until, lines = self._counted.get(key := tuple(procs), (0.0, ()))
        began = time.monotonic()
        if began >= until:
            lines = _lines_of(here, ranks_of)
            if len(self._counted) >= _SHOWN_MESHES:
                self._counted.clear()
            cost_s = time.monotonic() - began
            self._counted[key] = began + _COUNT_SHARE * cost_s, lines
        if not lines:
            return None
        by_rank = [0] * len(procs)
        for line in lines:
            for rank in line.ranks:
                by_rank[rank] += line.nbytes
        outstanding = sum(max(0, each.target.issued - each.target.acked) for each in here)
        return TensorsView(sum(line.tensors for line in lines), max(by_rank), outstanding, lines)


def _lines_of(devices: Iterable[TensorHolder], ranks_of: Mapping[int, int]) -> tuple[TensorLineView, ...]:
    found = [
        TensorLineView(*holding, tuple(ranks_of[proc] for proc in device.target.procs))
        for device in devices
        for holding in holdings_of(device)
    ]
    return tuple(sorted(found, key=lambda line: (-line.nbytes, -line.tensors)))


def copies_for(place: int, indexes: Sequence[Sequence[int]], placements: Sequence[str]) -> list[int]:
    """Return the places of ranks that have the same part of a sharded tensor as the rank at a place.

    Args:
        place: The place.
        indexes: For each place, the indexes along all axes.
        placements: Of the tensor, along each axis.
    """
    fixed = [axis for axis, text in enumerate(placements) if text != "R"]
    return [
        other
        for other, there in enumerate(indexes)
        if other != place and all(there[axis] == indexes[place][axis] for axis in fixed)
    ]


def indexes_of(mesh: Any) -> list[tuple[int, ...]]:
    """For each place of a mesh, the indexes along all axes."""
    return [tuple(mesh.extent.point(place)[axis] for axis in mesh.extent) for place in range(len(mesh))]


def copies_of(device: Any, lost: Collection[int]) -> str:
    """Say of which sharded tensors other ranks have the parts of lost processes, and of which no rank has them."""
    mesh = device.mesh
    indexes, places = indexes_of(mesh), [place for place, proc in enumerate(mesh.procs) if proc in lost]
    living = set(range(len(mesh))) - set(places)
    whole: set[int] = set()
    alone: set[int] = set()
    for part in {each._part.id: each._part for each in tensors_on(device)}.values():
        placements = LAYOUTS.numbered(part.layout).placements
        if placements:
            has_copies = all(living & set(copies_for(place, indexes, placements)) for place in places)
            (whole if has_copies else alone).add(part.id)
    text = f"; other ranks have the same parts of {len(whole)}" if whole else ""
    return text + (f"; no other rank has those of {_listed(count_by_name(alone))}" if alone else "")


def names_of(device: Any, namespace: Mapping[str, Any] | None = None) -> str:
    """Name the variables that have tensors on a device: ``model (12), x and 3 others``."""
    tensors = {each._part.id for each in tensors_on(device)}
    named = count_by_name(tensors, namespace)
    return f"{plural(len(tensors), 'tensor')}: {_listed(named)}" if named else plural(0, "tensor")


def _listed(named: Mapping[str, int]) -> str:
    named = dict(named)
    rest = named.pop("", 0)
    shown = [name if count == 1 else f"{name} ({count})" for name, count in list(named.items())[:_SHOWN]]
    if more := len(named) - _SHOWN:
        shown += [f"{plural(more, 'other variable')}"] * (more > 0)
    if rest:
        shown.append(f"{rest} that no variable refers to directly")
    return ", ".join(shown)


def count_by_name(ids: set[int], namespace: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Count tensors by the variables that have them, or whose gradients they are; the rest is under an empty name."""
    named: dict[str, int] = {}
    rest = set(ids)
    for name, value in (_namespace() if namespace is None else namespace).items():
        if name.startswith("_"):
            continue
        tensors = [*tensors_in(value)]
        gradients = [each.grad for each in tensors if each.is_leaf and isinstance(each.grad, DistributedTensor)]
        for title, those in ((name, tensors), (f"gradients of {name}", gradients)):
            if found := {each._part.id for each in those} & ids:
                named[title] = len(found)
                rest -= found
    return {**named, "": len(rest)} if rest else named


def _namespace() -> dict[str, Any]:
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    found: dict[str, Any] = shell.user_ns if shell is not None else sys.modules["__main__"].__dict__
    return dict(found)


def tensors_in(value: Any, depth: int = 3) -> Iterator[DistributedTensor]:
    """Yield the distributed tensors in a value of a user."""
    if isinstance(value, DistributedTensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from _each((*value.parameters(), *value.buffers()), 1)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _each([each for state in value.state.values() for each in state.values()], 1)
    elif isinstance(value, Mapping):
        yield from _each(value.values(), depth - 1)
    elif isinstance(value, (list, tuple)):
        yield from _each(value, depth - 1)


def _each(values: Iterable[Any], depth: int) -> Iterator[DistributedTensor]:
    if depth > 0:
        for value in values:
            yield from tensors_in(value, depth)
