"""The state of torchdata's ``StatefulDataLoader``, with the state of its generator.

Each iterator of a loader draws a seed for its workers, from the generator of the loader or from torch's global one, and a
shuffled epoch draws its order. ``StatefulDataLoader`` saves where its epoch is, and not how many numbers were drawn: it draws
them again when the first iterator after a load is created, some of them from a generator that it has set back. So all that the
generator gives afterwards differs, such as the order of the next epoch, or the dropout masks of the next step.

https://github.com/pytorch/data/blob/main/torchdata/stateful_dataloader/stateful_dataloader.py
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.utils import data

__all__ = ["GENERATOR", "StatefulLoader", "is_stateful_loader", "without_generator"]

GENERATOR = "monarch_generator"
"""The key under which the state of a loader has that of its generator. ``StatefulDataLoader`` itself ignores it."""

_WAY_OUT = (
    "so the rest of the epoch can't be found again: use shuffle=True, sampler=checkpoint.Sampler(data), or a generator that "
    "the program seeds before each epoch"
)

_DRAWS = (data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)


def is_stateful_loader(thing: Any) -> bool:
    """Whether an object is a ``StatefulDataLoader``."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(thing, module.StatefulDataLoader)


def without_generator(state: Any) -> Any:
    """Return the state of a loader for another rank, which keeps its generator."""
    return {key: value for key, value in state.items() if key != GENERATOR} if isinstance(state, Mapping) else state


class StatefulLoader:
    """A ``StatefulDataLoader`` whose generator goes on where it was.

    Args:
        loader: the loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def problem(self, others: Collection[Any]) -> str:
        """Say why the rest of an epoch can't be found again; empty if it can.

        Samplers of torch have no state: ``StatefulDataLoader`` draws the order of the epoch once more, and skips what was read.

        Args:
            others: the objects whose states are saved beside that of the loader.
        """
        loader = self._loader
        for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            if not isinstance(sampler, _DRAWS) or hasattr(sampler, "state_dict"):
                continue
            name, generator = type(sampler).__name__, getattr(sampler, "generator", None)
            if generator is None:
                return f"its {name} draws each epoch from torch's global generator, {_WAY_OUT}"
            if any(each is generator for each in others):
                return (
                    f"its {name} draws each epoch from a generator that is saved, too, as it is after that, {_WAY_OUT}"
                )
        return ""

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader and of its generator."""
        state: dict[str, Any] = self._loader.state_dict()
        generator = self._loader.generator
        return state if generator is None else {**state, GENERATOR: generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a state; the generators are set when the next iterator has been created, which draws from them."""
        loader = self._loader
        drawn = state.get(GENERATOR)
        loader.load_state_dict(without_generator(state))
        vars(loader).pop("_get_iterator", None)
        create = getattr(loader, "_get_iterator", None)
        if create is None:
            return

        def create_once() -> Any:
            vars(loader).pop("_get_iterator", None)
            before = torch.get_rng_state()
            iterator = create()
            torch.set_rng_state(before)
            if drawn is not None and loader.generator is not None:
                loader.generator.set_state(drawn)
            return iterator

        vars(loader)["_get_iterator"] = create_once
