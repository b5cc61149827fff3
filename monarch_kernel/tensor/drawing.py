"""Finds out which operations take random numbers, and seeds those of sharded tensors.

On ranks, a sharded tensor gets the same random numbers whatever its placements (`features.tensors.drawing`). They depend on the
seed and on how many such operations were done since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from monarch_kernel.tensor.propagation import OpInfo

__all__ = ["as_seed", "is_random"]

_UNTAGGED = frozenset(
    (
        "aten::rand_like.default",
        "aten::randn_like.default",
        "aten::randint_like.default",
        "aten::native_dropout.default",
    )
)
"""Operations that take random numbers and do not have torch's tag for it."""


def is_random(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call takes random numbers; attention without dropout does not."""
    if info.name not in _UNTAGGED and torch.Tag.nondeterministic_seeded not in info.op.tags:
        return False
    for place, argument in enumerate(info.op._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True


def as_seed(seed: int) -> int:
    """Return a seed as a number that fits in a message: generators of torch take negative ones, too."""
    return int(seed) % 2**63
