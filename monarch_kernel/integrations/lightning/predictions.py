"""Merges the predictions of all ranks into the order of the data set."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

__all__ = ["batches_of", "in_order"]

Batches = list[list[list[int]]]
"""Indices of samples in the data set, by data loader and batch."""


def batches_of(trainer: Any) -> Batches:
    """Return which samples this rank predicted; empty lists for a loader that does not record them."""
    loader = trainer.predict_loop._combined_loader
    return [
        [list(batch) for batch in getattr(getattr(each, "batch_sampler", None), "seen_batch_indices", ())]
        for each in (loader.flattened if loader is not None else ())
    ]


def in_order(ranks: Sequence[tuple[list[list[Any]], Batches]]) -> list[Any]:
    """Return what a single process would have predicted: the same batches, in the same order.

    With n ranks, each rank has every n-th sample. Predictions that are tensors with a row for each sample, or dicts, lists and
    tuples of such tensors, are split and regrouped. Others stay as the ranks made them, batch by batch, rank by rank.

    Args:
        ranks: for each rank its predictions, by data loader and batch, and the samples that they are for.
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
                "predictions are not in the order of the data set, because they are not tensors with a row for each sample: "
                "they come batch by batch, rank by rank, and each of n ranks has every n-th sample",
                stacklevel=2,
            )
        return [each for each in made if each is not _NONE]
    numbers = torch.tensor(list(chain.from_iterable(seen for _, seen in pairs)))
    order = torch.argsort(numbers, stable=True)
    try:
        columns = [torch.cat(leaves)[order] for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    except RuntimeError:  # rows of different shapes
        return [made for made, _ in pairs]
    size = max(len(seen) for _, seen in pairs)
    cut = [torch.split(column, size) for column in columns]
    return [pytree.tree_unflatten(list(leaves), flat[0][1]) for leaves in zip(*cut, strict=True)]


_NONE = object()
