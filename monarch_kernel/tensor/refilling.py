"""Restores distributed tensors after ranks have died and were replaced: `ProcMesh.refill`.

A new rank gets its part of a tensor from a rank that has the same: for a sharded tensor one with the same indexes along all
axes along which the tensor is not replicated. The parts of other tensors are lost, unless the program says that all ranks have
the same, or loads them again, such as from a checkpoint.

A rank whose operation has failed, such as a collective with the dead rank, has lost its part, too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.actor.tensors import move_parts
from monarch_kernel.base.text import format_nbytes, format_ranks, plural
from monarch_kernel.errors import SupervisionError
from monarch_kernel.features.tensors.refilling import (
    Piece,
    blank_parts,
    find_parts,
    lend_parts,
    make_local,
    read_parts,
)
from monarch_kernel.tensor import placements as placing
from monarch_kernel.tensor.crossing import ranks_of
from monarch_kernel.tensor.device import AFTER_STOP, Blocked, Device, device_of, is_stopped
from monarch_kernel.tensor.distributed_tensor import Part
from monarch_kernel.tensor.inventory import copies_for, count_by_name, indexes_of, tensors_in
from monarch_kernel.tensor.propagation import LAYOUTS, LEAF, Layout, Outcome, Result
from monarch_kernel.tensor.reductions import form_group

__all__ = ["Refilled", "refill"]


class Refilled(NamedTuple):
    """What `ProcMesh.refill` has done.

    Attributes:
        ranks: The ranks that have got parts.
        copied: The number of tensors whose parts other ranks had.
        nbytes: The bytes that were copied.
        loaded: The number of tensors that ``load`` has filled.
        lost: The names of variables that have lost tensors -> the number of these.
    """

    ranks: tuple[int, ...]
    copied: int
    nbytes: int
    loaded: int
    lost: dict[str, int]

    def __repr__(self) -> str:
        if not self.ranks:
            return "nothing to refill: no rank has lost a part of a tensor"
        text = (
            f"{format_ranks(self.ranks)}: {plural(self.copied, 'tensor')} copied from other ranks "
            f"({format_nbytes(self.nbytes)})"
        )
        if self.loaded:
            text += f", {self.loaded} loaded"
        if self.lost:
            names = ", ".join(
                f"{name} ({count})" if count > 1 and name else name or f"{count} without a variable"
                for name, count in self.lost.items()
            )
            text += f"\n  lost: {names}; make them again, or call refill(load=...)"
        return text


class _Losses(NamedTuple):
    """The parts of tensors of one device that are lost.

    Attributes:
        old: The device as it was.
        new: The device of the ranks as they are now.
        parts: The tensors, by id.
        bad: Id -> the places of ranks that have lost their part.
        sources: Id -> for each of these places, a place that has the same part; without those for which there is none.
    """

    old: Device
    new: Device
    parts: dict[int, list[Part]]
    bad: dict[int, list[int]]
    sources: dict[int, list[int]]

    def layout(self, id: int) -> Layout:
        """The layout of a tensor."""
        return LAYOUTS.numbered(self.parts[id][0].layout)

    @property
    def kept(self) -> list[int]:
        """The ids of tensors that are whole, or can be made so."""
        return [id for id in self.parts if not self.bad[id] or id in self.sources]


def refill(mesh: ProcMesh, same: Any, load: Callable[[], object] | None) -> Refilled:
    """Restore the tensors of a mesh; see `ProcMesh.refill`."""
    if deaths := mesh.whole.deaths():
        reports = {mesh.spawned_extent.point(rank): death for rank, death in deaths.items()}
        way_out = AFTER_STOP if is_stopped(deaths) else "replace its dead ranks with .heal() first"
        raise SupervisionError(f"{mesh.name} can't be refilled: {way_out}", reports)
    are_same = {each._part.id for each in tensors_in(same)}
    losses = [_losses_of(device, parts, are_same) for device, parts in _lost_devices(mesh).items()]
    ranks: set[int] = set()
    copied = nbytes = 0
    lost: list[tuple[_Losses, int]] = []
    for each in losses:
        copied += len(each.sources)
        nbytes += _copy(each)
        ranks |= {each.new.mesh.ranks[place] for places in each.bad.values() for place in places}
        lost += [(each, id) for id in each.parts if id not in each.kept]
    if any(each.layout(id).placements for each in losses for id in each.parts):
        form_group(mesh.whole)
    for each in losses:
        _move(each, each.kept)
    names: dict[str, int] = {}
    blank = {id for each, id in lost if load is not None and _blank(each, id)}
    for each, id in lost:
        if id not in blank:
            _block(each, id)
    if load is not None and blank:
        try:
            load()
        except BaseException:
            for each, id in lost:
                _block(each, id)
            raise
    if len(blank) < len(lost):
        rest = {part.id for each, id in lost if id not in blank for part in each.parts[id]}
        names = count_by_name(rest)
    return Refilled(tuple(sorted(ranks)), copied, nbytes, len(blank), names)


def _block(losses: _Losses, id: int) -> None:
    """Make each use of a tensor an error."""
    mesh = losses.new.mesh
    where = format_ranks(mesh.ranks[place] for place in losses.bad[id])
    text = f"the part of rank {where} of this tensor is lost: make it again, or call {mesh.name}.refill(load=...)"
    for part in losses.parts[id]:
        part.device = Blocked(losses.new, text)


def _lost_devices(mesh: ProcMesh) -> dict[Device, dict[int, list[Part]]]:
    """Return the devices with ranks that have died, and their tensors by id."""
    found: dict[Device, dict[int, list[Part]]] = {}
    gc.collect()
    for part in [each for each in gc.get_objects() if type(each) is Part]:
        device = part.device
        if not isinstance(device, Device) or not device.target.lost or device.mesh.runtime is not mesh.runtime:
            continue
        if set(device.mesh.procs) <= set(mesh.whole.procs):
            found.setdefault(device, {}).setdefault(part.id, []).append(part)
    return found


def _losses_of(old: Device, parts: dict[int, list[Part]], are_same: set[int]) -> _Losses:
    mesh, ids = old.mesh, list(parts)
    new = device_of(mesh, old.stream_name)
    asked = {
        place: ranks_of(mesh.process(rank)).call(partial(find_parts, ids), "looking for parts of tensors")
        for place, (rank, proc) in enumerate(zip(mesh.ranks, mesh.procs))
        if proc not in old.target.lost
    }
    has = {place: future.get().values()[0] for place, future in asked.items()}
    indexes = indexes_of(mesh)
    bad: dict[int, list[int]] = {}
    sources: dict[int, list[int]] = {}
    for number, id in enumerate(ids):
        good = [place for place, here in has.items() if here[number]]
        bad[id] = [place for place in range(len(mesh)) if place not in good]
        placements = LAYOUTS.numbered(parts[id][0].layout).placements
        found = []
        for place in bad[id]:
            others = copies_for(place, indexes, placements) if placements else good if id in are_same else []
            found += [other for other in others if other in good][:1]
        if bad[id] and len(found) == len(bad[id]):
            sources[id] = found
    return _Losses(old, new, parts, bad, sources)


def _copy(losses: _Losses) -> int:
    """Copy parts to the ranks that have lost theirs; return the number of bytes."""
    mesh = losses.new.mesh
    sharded = [id for id in losses.kept if losses.layout(id).placements]
    by_pair: dict[tuple[int, int], list[int]] = {}
    for id, sources in losses.sources.items():
        for place, source in zip(losses.bad[id], sources):
            by_pair.setdefault((place, source), []).append(id)
    nbytes = 0
    for (place, source), ids in by_pair.items():
        here, there = (ranks_of(mesh.process(mesh.ranks[each])) for each in (place, source))
        lend: Any = partial(partial, lend_parts, ids)  # takes the owner of the leases
        nbytes += sum(
            move_parts(here, there, lend, partial(read_parts, ids), lambda lent: lent, "refilling tensors").values()
        )
    for place, rank in enumerate(mesh.ranks):
        if mine := [id for id in sharded if place not in losses.bad[id]]:
            ranks_of(mesh.process(rank)).call(partial(make_local, mine), "refilling tensors").get()
    return nbytes


def _move(losses: _Losses, ids: Iterable[int]) -> None:
    """Make tensors those of the ranks as they are now."""
    for id in ids:
        layout = losses.layout(id)
        losses.new.has_sharded |= bool(layout.placements)
        new_id = _rewrapped(losses.new, id, layout) if layout.placements else id
        for part in losses.parts[id]:
            losses.new.adopt(part, new_id)


def _rewrapped(device: Device, id: int, layout: Layout) -> int:
    """Make the sharded tensor whose parts the ranks keep under an id; return its id."""
    about = placing.about(device.mesh)
    numbers = [["list", [["value", each] for each in sizes]] for sizes in (layout.shape, layout.stride)]
    args = [*about, placing.strings(layout.placements), *numbers]
    key = ("monarch::rewrap", layout.number)
    entry = device.entries.get(key)
    if entry is None:
        outcome = Outcome((Result(layout),), LEAF)
        entry = device.define(key, key[0], "refill()", outcome, [["tensor"], *args], {}, [])
    first, _ = device.record_here(entry, [id])
    device.frees.append(id)
    return first


def _blank(losses: _Losses, id: int) -> bool:
    """Make the lost parts of a tensor zeros, for the program to fill; returns whether that is possible."""
    layout, parts, device = losses.layout(id), losses.parts[id], losses.new
    if not layout.placements:
        dtype = str(layout.dtype).removeprefix("torch.")
        piece = Piece(-1, dtype, layout.shape, layout.stride, 0, 0)
        for place in losses.bad[id]:
            rank = device.mesh.process(device.mesh.ranks[place])
            ranks_of(rank).call(partial(blank_parts, [(id, piece)]), "refilling tensors").get()
        _move(losses, [id])
        return True
    if any(text.startswith("P") for text in layout.placements):
        return False
    placements = dict(zip(device.mesh.extent, layout.placements))
    made = placing.filled(device, 0, layout.shape, layout.dtype, placements)
    if made._part.layout != parts[0].layout:
        return False
    new_id, made._part.id = made._part.id, id  # which is freed now
    for part in parts:
        device.adopt(part, new_id)
    return True
