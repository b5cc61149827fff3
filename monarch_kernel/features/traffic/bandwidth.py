"""Sizes and bandwidths of collectives, as nccl-tests define them. Pure.

Definitions
===========

The size ``S`` of a collective is the number of bytes of the whole array: the input of an all_reduce, the output of an
all_gather, the input of a reduce_scatter, all parts together of a gather or scatter. The *algorithm bandwidth* is ``S / t``,
with ``t`` the time of the collective. The *bus bandwidth* is the algorithm bandwidth times a factor, which makes it comparable
with what a link between ranks can carry, whatever the number ``n`` of ranks is:

- all_reduce: ``2 (n - 1) / n``
- all_gather, reduce_scatter, all_to_all, gather, scatter: ``(n - 1) / n``
- broadcast, reduce, send, recv: 1

See https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md; ``gather.cu``, ``scatter.cu`` and ``sendrecv.cu`` of
nccl-tests have the factors that are not on that page.

`moved` uses the same model to say how many bytes a rank receives and sends in a collective. The library (gloo, NCCL) may choose
an algorithm that moves more, or have the network reduce and move less.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Moved", "bus_factor", "moved"]

_SHARED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_TO_ONE = ("reduce", "gather")


class Moved(NamedTuple):
    """What one rank moves in a collective.

    Attributes:
        nbytes: bytes of its inputs or of its outputs, whichever is more.
        size: the size of the whole collective, by which bandwidths are computed.
        nbytes_in: bytes that it receives from other ranks.
        nbytes_out: bytes that it sends to other ranks.
    """

    nbytes: int
    size: int
    nbytes_in: int
    nbytes_out: int


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth divided by algorithm bandwidth.

    Args:
        operation: such as ``all_reduce``.
        ranks: number of ranks in the process group.
    """
    if operation == "all_reduce":
        return 2 * (ranks - 1) / max(1, ranks)
    if operation in _SHARED:
        return (ranks - 1) / max(1, ranks)
    return 1.0


def moved(
    operation: str,
    ranks: int,
    outputs: int,
    inputs: int,
    *,
    is_root: bool = False,
    own_output: int = 0,
    own_input: int = 0,
) -> Moved:
    """Compute what a rank moves in a collective.

    Args:
        operation: such as ``all_reduce``.
        ranks: number of ranks in the process group.
        outputs: bytes of the tensors that it receives into; those of its inputs if the collective is in place.
        inputs: bytes of the tensors that it gives.
        is_root: whether it is the root of a collective that has one.
        own_output: of an all_to_all: bytes that it receives from itself.
        own_input: of an all_to_all: bytes that it sends to itself.
    """
    nbytes = size = max(outputs, inputs)
    taken = given = 0
    if operation == "all_reduce":
        taken = given = 2 * (ranks - 1) * inputs // max(1, ranks)
    elif operation in ("all_gather", "reduce_scatter"):
        taken = given = abs(outputs - inputs)
    elif operation == "all_to_all":
        taken, given = outputs - own_output, inputs - own_input
    elif operation == "send":
        given = nbytes
    elif operation == "recv":
        taken = nbytes
    elif operation in ("broadcast", "reduce", "gather", "scatter"):
        if operation in ("gather", "scatter"):
            part = inputs if operation == "gather" else outputs
            size, amount = (nbytes, nbytes - part) if is_root else (part * ranks, part)
        else:
            amount = nbytes if ranks > 1 else 0
        if is_root == (operation in _TO_ONE):
            taken = amount
        else:
            given = amount
    return Moved(nbytes, size, taken, given)
