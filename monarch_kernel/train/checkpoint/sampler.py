"""Deals the samples of an epoch to ranks, in a way that can go on with another number of ranks.

Theory of operation. The order of an epoch is a permutation that follows from a seed and the number of the epoch. Of *n* ranks,
rank *r* gets each *n*-th sample, from the *r*-th on. If each rank has read *k* samples, these are the first *k n* of the order,
whatever the number of ranks: so the next ranks, however many they are, divide what comes after. The position is therefore
the number of samples that earlier ranks have read (``start``), the number of ranks since, and how many samples this rank has
read since (``read``).

A loader with workers reads ahead. The position counts samples in the batches that the program has received: `Loader` counts
them for a `torch.utils.data.DataLoader`; torchdata's ``StatefulDataLoader`` does so itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from hashlib import blake2b
from numbers import Integral
from typing import Any

import torch
from torch import distributed as dist
from torch.utils import data

from monarch_kernel.base.text import plural
from monarch_kernel.train.stateful_loaders import without_generator

__all__ = ["Loader", "Sampler", "dealt_again", "is_dealt", "misfit"]

_MARK = "monarch_sampler"
_VERSION = 1
_OF_ORDER = ("total", "seed", "shuffle", "drop_last")


class Sampler(data.Sampler[int]):
    """Deals the samples of a data set to the ranks, in a new order each epoch.

    Use it with `Loader`, or as the sampler of torchdata's ``StatefulDataLoader``.

    Args:
        source: the data set, or the number of samples.
        shuffle: False: each epoch has the order of the data set.
        seed: seed of the orders; the same on all ranks.
        drop_last: leave out the last samples of an epoch that are fewer than the ranks, so that all ranks read equally many.
            With False each sample comes once, but some ranks read one more than others.
        rank: this rank; None: from the process group.
        ranks: the number of ranks; None: from the process group.

    Raises:
        TypeError: the data set has no length.
        ValueError: ``rank`` is not below ``ranks``.

    Attributes:
        epoch: number of the epoch.
        start: how many samples of the epoch other numbers of ranks have read.
        read: how many samples this rank has read since.
        is_counted: whether a `Loader` counts what the program has read; otherwise an iterator starts the next epoch.
    """

    def __init__(
        self,
        source: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        has_group = dist.is_available() and dist.is_initialized()
        self.ranks = ranks if ranks is not None else dist.get_world_size() if has_group else 1
        self.rank = rank if rank is not None else dist.get_rank() if has_group else 0
        if not 0 <= self.rank < self.ranks:
            raise ValueError(
                f"checkpoint.Sampler(rank={self.rank}, ranks={self.ranks}): the rank must be below the number"
            )
        if not isinstance(source, Integral):
            _check_has_length(source)
        self.source = source
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.start = 0
        self.read = 0
        self.is_counted = False

    def __repr__(self) -> str:
        return f"<checkpoint.Sampler: {plural(self.total, 'sample')}, rank {self.rank} of {self.ranks}, epoch {self.epoch}>"

    @property
    def total(self) -> int:
        """The number of samples of the data set."""
        return int(self.source) if isinstance(self.source, Integral) else len(self.source)  # type: ignore[arg-type]

    def __len__(self) -> int:
        """The number of samples that this rank has not read in this epoch."""
        return len(self.dealt()) - self.read

    def __iter__(self) -> Iterator[int]:
        return _Reading(self)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch; if it is the current one, it goes on where it is. An epoch that ends starts the next one."""
        if epoch != self.epoch:
            self.epoch, self.start, self.read = epoch, 0, 0

    def dealt(self) -> range:
        """The places in the order that this rank reads in this epoch after ``start``."""
        left = self.total - self.start
        end = self.total - (left % self.ranks if self.drop_last else 0)
        return range(self.start + self.rank, end, self.ranks)

    def ids(self) -> list[int]:
        """The samples at these places."""
        if not self.shuffle:
            return list(self.dealt())
        generator = torch.Generator().manual_seed(_seed_of(self.seed, self.epoch))
        order: list[int] = torch.randperm(self.total, generator=generator).tolist()
        return [order[place] for place in self.dealt()]

    def position(self, read: int | None = None) -> dict[str, Any]:
        """The position, if this rank has read so many samples after ``start``."""
        return {
            _MARK: _VERSION,
            "epoch": self.epoch,
            "start": self.start,
            "read": self.read if read is None else read,
            "ranks": self.ranks,
            "seed": self.seed,
            "total": self.total,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def misfit(self, position: Any) -> str | None:
        """The reason why this sampler can't go to a position; None if it can."""
        if not isinstance(position, Mapping) or _MARK not in position:
            return f"the saved state ({type(position).__name__}) is not the position of a checkpoint.Sampler"
        here = self.position()
        differ = [
            name for name in _OF_ORDER if position.get(name, here[name]) != here[name]
        ]  # earlier versions saved fewer
        if not differ:
            return None
        return (
            f"the sampler has {_settings(here, differ)}, but {_settings(position, differ)} when the position was saved, so the "
            "samples would be dealt in another way: create it with the same data set and settings"
        )

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Go to a position, also to one of another number of ranks.

        Raises:
            ValueError: the samples would be dealt in another way.
        """
        if why := self.misfit(position):
            raise ValueError(why)
        self.epoch, self.start, self.read = position["epoch"], position["start"], position["read"]
        if position["ranks"] != self.ranks:
            self.start, self.read = self.start + self.read * position["ranks"], 0


class _Reading(Iterator[int]):
    """Reads the rest of an epoch, ahead of the program if a loader has workers."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._begin()

    def _begin(self) -> None:
        self._ids = self._sampler.ids()
        self._position = self._sampler.position()

    def __next__(self) -> int:
        at: int = self._position["read"]
        if at >= len(self._ids):
            if not self._sampler.is_counted and self._sampler.epoch == self._position["epoch"]:
                self._sampler.set_epoch(self._sampler.epoch + 1)
            raise StopIteration
        self._position["read"] = at + 1
        return self._ids[at]

    def state_dict(self) -> dict[str, Any]:
        """The position, for ``StatefulDataLoader``."""
        return dict(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position, for ``StatefulDataLoader``."""
        self._sampler.go_to(state)
        self._begin()
        self._sampler.start = self._sampler.read = 0  # as for any iterator, another one starts at the beginning


class Loader:
    """A `torch.utils.data.DataLoader` that goes on where it was when its state was saved.

    It counts the batches that the program has received, whatever its workers have read ahead. It draws no number from the
    global generators, so that a program which resumes draws the same ones as a program that was not interrupted.

    Iterating goes on where the epoch is; each epoch that ends starts the next one.

    Args:
        loader: has a `Sampler`, and makes batches itself.

    Raises:
        TypeError: it has another sampler, or no ``batch_size``.
    """

    def __init__(self, loader: data.DataLoader[Any]) -> None:
        sampler = getattr(loader, "sampler", None)
        if not isinstance(sampler, Sampler) or loader.batch_size is None:
            raise TypeError(
                "checkpoint.Loader needs DataLoader(data, batch_size=..., sampler=checkpoint.Sampler(data)): other samplers "
                "can't go on in the middle of an epoch"
            )
        self.loader = loader
        self.sampler = sampler
        self._batch_size = loader.batch_size
        sampler.is_counted = True
        self._seeds = torch.Generator() if loader.generator is None else None
        loader.generator = self._seeds or loader.generator

    def __repr__(self) -> str:
        return f"<checkpoint.Loader of {self.sampler!r}>"

    def __len__(self) -> int:
        """The number of batches that are left in this epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        sampler = self.sampler
        if self._seeds is not None:
            self._seeds.manual_seed(_seed_of(sampler.seed, sampler.epoch, sampler.rank))
        epoch, most = sampler.epoch, len(sampler.dealt())
        for batch in self.loader:
            if sampler.epoch == epoch:
                sampler.read = min(sampler.read + self._batch_size, most)
            yield batch
        if sampler.epoch == epoch:
            sampler.set_epoch(epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return self.sampler.position()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position."""
        self.sampler.go_to(state)


def misfit(thing: Any, state: Any) -> str | None:
    """The reason why an object refuses a state, because its `Sampler` can't go there; None if there is none.

    It changes nothing, so that a load can refuse the state before it changes other objects.
    """
    sampler = thing if isinstance(thing, Sampler) else getattr(thing, "sampler", None)
    if not isinstance(sampler, Sampler):
        return None
    if isinstance(thing, Loader):
        return sampler.misfit(state)
    positions = _positions(state).values()  # of a StatefulDataLoader, or of a class of the user
    return next((why for position in positions if (why := sampler.misfit(position))), None)


def is_dealt(state: Any) -> bool:
    """Whether a state has the position of a `Sampler`."""
    return bool(_positions(state))


def dealt_again(states: Sequence[Any]) -> Any:
    """Combine the states of all ranks that saved into one for any number of ranks.

    Args:
        states: states with the same positions of a `Sampler` in them, by rank.

    Returns:
        The state; or the reason why there is none.
    """
    found = [_positions(state) for state in states]
    if not found[0] or any(each.keys() != found[0].keys() for each in found):
        return "it differs by rank"
    combined = {}
    for place, first in found[0].items():
        each = [positions[place] for positions in found]
        counts = [position["read"] for position in each]
        if any({**position, "read": 0} != {**first, "read": 0} for position in each):
            return "its ranks are in different epochs"
        if counts != sorted(counts, reverse=True) or counts[0] - counts[-1] > 1:
            return f"its ranks have read different numbers of samples: {', '.join(map(str, counts))}"
        combined[place] = {**first, "start": first["start"] + sum(counts), "read": 0}
    return without_generator(_replaced(states[0], combined))


def _positions(state: Any, place: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """The positions within a state, by their keys."""
    if not isinstance(state, Mapping):
        return {}
    if _MARK in state:
        return {place: state}
    return {at: found for key, value in state.items() for at, found in _positions(value, (*place, key)).items()}


def _replaced(state: Any, positions: Mapping[tuple[Any, ...], Any], place: tuple[Any, ...] = ()) -> Any:
    if place in positions:
        return positions[place]
    if not isinstance(state, Mapping):
        return state
    return {key: _replaced(value, positions, (*place, key)) for key, value in state.items()}


def _check_has_length(source: Any) -> None:
    try:
        len(source)
    except TypeError:
        raise TypeError(
            f"checkpoint.Sampler needs a data set with a length, and {type(source).__name__} has none: pass the number of "
            "samples, or a data set with __len__() and __getitem__(); the samples of an iterable can't be dealt by number"
        ) from None


def _settings(position: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={position[name]}" for name in names)


def _seed_of(*parts: int) -> int:
    """A seed that follows from numbers, and is another one for others."""
    hashed = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") >> 1
