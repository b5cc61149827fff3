"""Random numbers of sharded tensors on a rank: the same numbers whatever the placements.

A *draw* is an operation that takes random numbers. All ranks of a target do the same draws in the same order, so each of them
numbers the draws by itself. The whole of a tensor is drawn in blocks of its elements in order. The generator of a block depends
on the seed, the number of the draw and the number of the block. A rank draws the blocks that have elements of its part, and
keeps those elements. So replicas are equal, parts differ, and no rank holds more than a block besides its part.

Generators of torch use 32 bits of a seed, so two blocks can be equal by chance: for a tensor of 10^9 elements, that is about
one chance in 500.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from monarch_kernel.features.tensors.records import Poison
from monarch_kernel.features.tensors.rules import note_write, on_whole

__all__ = ["BLOCK", "Draw", "Draws", "fill_part"]

BLOCK = 1 << 18
"""Number of elements that one generator draws."""

_FILLS = frozenset(
    ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
)
"""Operations that overwrite each element of a tensor by itself."""

_LIKE = {"rand_like": "uniform_", "randn_like": "normal_", "randint_like": "random_"}
"""Operations that make such a tensor -> the one that fills it."""

Fill = Callable[[int, Any], object]
"""Fills a tensor with the elements of a block."""


def fill_part(part: Any, whole: Sequence[int], offset: Sequence[int], fill: Fill) -> None:
    """Fill a part of a tensor whose elements are drawn in blocks.

    Args:
        part: The part.
        whole: The shape of the whole tensor.
        offset: Where the part starts in it, for each dimension.
        fill: Draws the elements of a block.
    """
    import torch

    shape, count, total = tuple(part.shape), part.numel(), math.prod(whole)
    steps = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]

    def place(number: Any) -> Any:
        """The place in the whole of an element of the part; both count in order, so places increase."""
        found = 0
        for size, start, step in reversed(list(zip(shape, offset, steps))):
            found = found + (number % size + start) * step
            number = number // size
        return found

    drawn = torch.empty(count, dtype=part.dtype)
    position = 0
    while position < count:
        block = place(position) // BLOCK
        first = block * BLOCK
        end = position + bisect_left(range(position, count), first + BLOCK, key=place)
        values = torch.empty(min(BLOCK, total - first), dtype=part.dtype)
        fill(block, values)
        start = place(position) - first
        if place(end - 1) - first - start == end - 1 - position:
            drawn[position:end] = values[start : start + end - position]
        else:
            drawn[position:end] = values[place(torch.arange(position, end)) - first]
        position = end
    part.copy_(drawn.view(shape))


class Draw:
    """The random numbers of one operation.

    Args:
        seed: The seed of the program.
        number: The number of the draw.
    """

    def __init__(self, seed: int, number: int) -> None:
        self._about = f"{seed} {number}"

    def seed_of(self, block: int) -> int:
        """The seed of a block."""
        return int.from_bytes(blake2b(f"{self._about} {block}".encode(), digest_size=4).digest(), "big")

    def fill(self, tensor: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Overwrite a sharded tensor by an operation that draws each element by itself.

        Raises:
            RuntimeError: Its values are sums of those on several ranks.
        """
        import torch
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if any(placement.is_partial() for placement in tensor.placements):
            raise RuntimeError(
                "random numbers can't be written to a tensor that is Partial: use x.redistribute(axis=Replicate()) first"
            )

        def fill(block: int, values: Any) -> None:
            function(values, *args, **kwargs, generator=torch.Generator().manual_seed(self.seed_of(block)))

        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        fill_part(tensor.to_local(), tuple(tensor.shape), offset, fill)
        note_write(tensor)
        return tensor

    def like(self, tensor: Any, fill: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a sharded tensor of random numbers that is placed as another one, or replicated if that is partial."""
        import torch
        from torch.distributed.tensor import Replicate

        ops: Any = torch.ops.aten
        placements = [Replicate() if each.is_partial() else each for each in tensor.placements]
        made = ops.empty_like.default(tensor, **kwargs).redistribute(placements=placements)
        function = getattr(ops, fill)
        return self.fill(made, function, args, {})

    def on_whole(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Do any operation on the whole of each tensor, alike on all ranks; results are replicated."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed_of(0))
            return on_whole(function, *args, **kwargs)


class Draws:
    """The random numbers of sharded tensors on this rank, for each target."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[int, int]] = {}  # target -> seed, number of draws

    def seed(self, target: int, seed: int) -> None:
        """Start the draws of a target again, with a seed."""
        self._states[target] = (seed, 0)

    def draw(self, target: int, name: str, *args: Any, **kwargs: Any) -> Any:
        """Do an operation that takes random numbers, on sharded tensors.

        Args:
            target: The ranks that do it.
            name: The operation, such as ``aten::normal_.default``.
            args: Its arguments.
            kwargs: Its other arguments.
        """
        import torch

        kwargs.pop("generator", None)
        seed, number = self._states[target]
        self._states[target] = (seed, number + 1)  # before an argument can fail: ranks count alike
        if any(isinstance(each, Poison) for each in args):
            raise LookupError("an argument is lost")
        base, _, overload = name.partition("::")[2].partition(".")
        function = getattr(getattr(torch.ops.aten, base), overload)
        draw, first, rest = Draw(seed, number), args[0], args[1:]
        if base in _FILLS and overload != "Tensor":
            return draw.fill(first, function, rest, kwargs)
        if base in _LIKE and "Tensor" not in overload:
            low_and_high = (0, *rest) if len(rest) == 1 else rest
            return draw.like(first, _LIKE[base], low_and_high, kwargs)
        if base == "bernoulli" and overload == "p":
            return draw.like(first, "bernoulli_", rest, {})
        if base == "bernoulli" and overload == "default":
            return (draw.like(first, "uniform_", (), {}) < first).to(first.dtype)
        if base == "native_dropout":
            p, is_training = rest
            if not is_training:
                return first.clone(), torch.ones_like(first, dtype=torch.bool)
            mask = draw.like(first, "bernoulli_", (1 - p,), {"dtype": torch.bool})
            return first * mask / (1 - p), mask
        return draw.on_whole(function, args, kwargs)
