"""The format of operations on the wire. Pure, and without torch.

A batch is a sequence of integers of 64 bits. A record of an operation is::

    entry, id of the first new tensor, ids of the tensors that it takes ..., integers that are arguments ...

The entry (`DefineOp`) says how many there are. Floats that are arguments are in a separate sequence, in the same order. Two
records are not operations::

    FREE, n, n ids           drop these tensors
    FORGET                   drop all entries of the target
    DROP, entry              drop an entry

An argument of an entry is a template: plain data, so that no rank unpickles anything for an operation. It is a list of a kind
and its content:

    ["tensor"]               the next tensor of the record; ["int"] and ["float"] in the same way
    ["value", x]             None, a bool, a number or a string; ["complex", real, imaginary]
    ["list", [...]]          a list of templates
    ["scalar", x, "int64"]   a tensor without dimensions, from the program
    ["dtype", "float32"]     also ["layout", name], ["memory_format", name] and ["device", name]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from monarch_kernel.errors import Failure

__all__ = [
    "DROP",
    "FORGET",
    "FREE",
    "MemoryUse",
    "PackedTensor",
    "Poison",
    "Slot",
    "TensorLayout",
    "Wholes",
    "count_holes",
]

FREE = -1
FORGET = -2
DROP = -3

Template = list[Any]

Wholes = tuple[str, list[tuple[tuple[int, ...], tuple[int, ...], str] | None]]
"""What an operation on the wholes of sharded tensors returns: ``tensor``, ``tuple`` or ``list``, and for each part its shape,
its stride and its dtype; None if it is no tensor."""


class Poison(NamedTuple):
    """What a rank has in place of a tensor, because an operation has failed.

    Attributes:
        op: The number of the operation in the session.
        failure: The report of the rank.
    """

    op: int
    failure: Failure


class PackedTensor(NamedTuple):
    """A small dense tensor as it travels in an answer: its elements in order; ``dtype`` is a name such as ``float32``."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Slot:
    """The place of a tensor in the arguments or the result of a function; ``index`` counts the tensors."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> tuple[Any, ...]:
        return Slot, (self.index,)


class TensorLayout(NamedTuple):
    """The shape of a tensor in memory, as a rank reports it.

    Attributes:
        dtype: A name such as ``float32``.
        placements: Of a DTensor, along each axis of its mesh: ``S(0)``, ``R`` or ``P(sum)``; its shape is that of the whole.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    device: str
    placements: tuple[str, ...] = ()


class MemoryUse(NamedTuple):
    """How many tensors a rank holds for the program.

    Attributes:
        tensors: The number of distributed tensors.
        nbytes: The bytes of their memory; tensors that share memory count once.
    """

    tensors: int
    nbytes: int


def count_holes(templates: Sequence[Template]) -> tuple[int, int, int]:
    """Count the tensors, integers and floats that a record has for these templates."""
    kinds = [kind for template in templates for kind in _kinds(template)]
    return kinds.count("tensor"), kinds.count("int"), kinds.count("float")


def _kinds(template: Template) -> Iterator[str]:
    kind = template[0]
    if kind == "list":
        for item in template[1]:
            yield from _kinds(item)
    else:
        yield kind
