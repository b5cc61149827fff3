"""Restores a rank's parts of distributed tensors from those of another rank.

The functions run on the ranks. A part is a view of memory that other parts may share, such as a parameter and its view. So the
memory moves, each once, and the views are made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from monarch_kernel.features.resharding.plan import Part, whole
from monarch_kernel.features.resharding.reading import Held, Plain, TensorReading, new_thing
from monarch_kernel.features.resharding.worker import Leaves
from monarch_kernel.features.tensors.parts import PARTS, local_part
from monarch_kernel.features.tensors.records import Poison
from monarch_kernel.net.memory.layout import memory_of
from monarch_kernel.runtime.rpc.handles import PROCESS

__all__ = ["Piece", "blank_parts", "find_parts", "lend_parts", "make_local", "read_parts"]


class Piece(NamedTuple):
    """A part as a view of memory.

    Attributes:
        memory: The number of the memory among all that was lent; -1 if the part has no elements.
        bits: 1 if it is conjugated, 2 if it is negated.
    """

    memory: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bits: int


def _table() -> Any:
    assert PARTS.table is not None
    return PARTS.table


def find_parts(ids: Sequence[int]) -> list[bool]:
    """For each tensor, whether this rank has its part, and no operation that it depends on has failed."""
    found = [_table().take(id, 0, 0) for id in ids]
    return [each is not None and not isinstance(each, Poison) for each in found]


def lend_parts(ids: Sequence[int], owner: int) -> Leaves:
    """Lend the memory of parts until all leases of ``owner`` end, and describe the parts under the path ``pieces``."""
    import torch

    leaves: Leaves = {}
    numbers: dict[int, int] = {}
    pieces = []
    for id in ids:
        part = local_part(_table().take(id, 0, 0))
        storage = part.untyped_storage()
        number = -1
        if storage.nbytes():
            number = numbers.setdefault(storage.data_ptr(), len(numbers))
            if str(number) not in leaves:
                memory = memory_of(torch.empty(0, dtype=torch.uint8).set_(storage))
                box = whole(memory.layout.shape)
                held = Held(
                    "uint8", memory.layout.shape, (Part(box, (0,)),), PROCESS.client.exports.lend(memory, owner)
                )
                leaves[str(number)] = held
        dtype, bits = str(part.dtype).removeprefix("torch."), part.is_conj() + 2 * part.is_neg()
        pieces.append(Piece(number, dtype, tuple(part.shape), part.stride(), part.storage_offset(), bits))
    leaves["pieces"] = Plain([tuple(piece) for piece in pieces])
    return leaves


def read_parts(ids: Sequence[int], source: Leaves, turn: int) -> int:
    """Copy the memory that another rank has lent, and make the parts of it; return the number of bytes."""
    import torch

    described = source["pieces"]
    assert isinstance(described, Plain)
    reading = TensorReading(PROCESS.client, [source], turn)
    things: dict[int, Any] = {}
    for path, held in source.items():
        if isinstance(held, Held):
            thing = things[int(path)] = new_thing(held.dtype, held.shape)
            reading.want(path, thing, memory_of(thing), [Part(whole(held.shape), (0,))])
    reading.go()
    for id, each in zip(ids, described.value):
        piece = Piece(*each)
        made = torch.empty(0, dtype=getattr(torch, piece.dtype))
        if piece.memory < 0:
            made = made.new_empty(piece.shape)
        else:
            made.set_(things[piece.memory].untyped_storage(), piece.offset, piece.shape, piece.stride)
        if piece.bits & 1:
            torch._C._set_conj(made, True)
        if piece.bits & 2:
            torch._C._set_neg(made, True)
        _table().put(id, made)
    return sum(thing.numel() for thing in things.values())


def blank_parts(pieces: Sequence[tuple[int, Piece]]) -> None:
    """Make parts of zeros, which the program fills."""
    import torch

    for id, piece in pieces:
        made = torch.empty_strided(piece.shape, piece.stride, dtype=getattr(torch, piece.dtype)).zero_()
        _table().put(id, made)


def make_local(ids: Sequence[int]) -> None:
    """Keep only this rank's part of sharded tensors, whose process group is gone."""
    for id in ids:
        _table().put(id, local_part(_table().take(id, 0, 0)))
