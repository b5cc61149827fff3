"""Predictions of all ranks, put into the order of the data set."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

__all__ = ["batches_of", "in_order"]

Batches = list[list[list[int]]]
"""By data loader, by batch: the numbers of its samples in the data set."""


def batches_of(trainer: Any) -> Batches:
    """Which samples this rank has predicted; empty lists for a loader that does not tell."""
    loader = trainer.predict_loop._combined_loader
    return [
        [list(batch) for batch in getattr(getattr(each, "batch_sampler", None), "seen_batch_indices", ())]
        for each in (loader.flattened if loader is not None else ())
    ]


def in_order(ranks: Sequence[tuple[list[list[Any]], Batches]]) -> list[Any]:
    """What one process alone would have predicted: the same batches, in the same order.

    Each rank has each n-th sample. Predictions that are tensors (or dicts, lists and tuples of them) with a row for each sample
    are cut and put together anew; others can't be, and come as the ranks made them, batch by batch, rank by rank.

    Args:
        ranks: of each its predictions, by data loader and batch, and which samples they are of.
    """
    loaders = len(ranks[0][0])
    found = [_of_loader([(made[i], seen[i] if i < len(seen) else []) for made, seen in ranks]) for i in range(loaders)]
    return found[0] if loaders == 1 else found


def _of_loader(ranks: Sequence[tuple[list[Any], list[list[int]]]]) -> list[Any]:
    import torch
    from torch.utils import _pytree as pytree

    pairs = [(made, seen) for all_made, all_seen in ranks for made, seen in zip(all_made, all_seen, strict=False)]
    flat = [pytree.tree_flatten(made) for made, _ in pairs]
    fits = (
        len(pairs) == sum(len(made) for made, _ in ranks)
        and all(spec == flat[0][1] for _, spec in flat)
        and all(
            isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == len(seen)
            for (leaves, _), (_, seen) in zip(flat, pairs, strict=True)
            for leaf in leaves
        )
    )
    if not pairs or not fits:
        made = [each for batch in zip_longest(*(made for made, _ in ranks), fillvalue=_NONE) for each in batch]
        if made:
            warnings.warn(
                "predictions are not in the order of the data set: they are no tensors with a row for each sample, so they "
                "come batch by batch of each rank; each rank has each n-th sample",
                stacklevel=2,
            )
        return [each for each in made if each is not _NONE]
    numbers = torch.tensor(list(chain.from_iterable(seen for _, seen in pairs)))
    order = torch.argsort(numbers, stable=True)
    try:
        columns = [torch.cat(leaves)[order] for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    except RuntimeError:  # rows of several shapes
        return [made for made, _ in pairs]
    size = max(len(seen) for _, seen in pairs)
    cut = [torch.split(column, size) for column in columns]
    return [pytree.tree_unflatten(list(leaves), flat[0][1]) for leaves in zip(*cut, strict=True)]


_NONE = object()
