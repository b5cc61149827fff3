"""The states of random number generators, as plain values that a checkpoint can hold and that need no code to be read.

`rng` is the state of all global generators of a process, in the form of an object with ``state_dict()``. `stateful` gives
single generators (`torch.Generator`, `random.Random`, `numpy.random.Generator`) this form, too.

A generator can also be given new seeds (``reseed``): if a checkpoint of four ranks is loaded by six, there are no states for
two of them, and to give two ranks the same state would make their dropout masks equal.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import torch

from monarch_kernel.train.stateful_loaders import StatefulLoader, is_stateful_loader

__all__ = ["Generators", "derived_seed", "rng", "stateful"]

_ARRAY = "__ndarray__"
_MASK_32 = (1 << 32) - 1


class Generators:
    """The global random number generators of this process: those of Python, NumPy, torch, and torch's current device."""

    def __repr__(self) -> str:
        return "<the global random number generators of this process>"

    def state_dict(self) -> dict[str, Any]:
        """The states, by library or kind of device."""
        state: dict[str, Any] = {"python": _listed(random.getstate()), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            state["numpy"] = _plain(sys.modules["numpy"].random.get_state(legacy=False))
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        if torch.backends.mps.is_available():
            state["mps"] = torch.mps.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the states; ignores those of devices that are not here."""
        random.setstate(_tupled(state["python"]))
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy as np

            np.random.set_state(_with_arrays(state["numpy"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        if "mps" in state and torch.backends.mps.is_available():
            torch.mps.set_rng_state(state["mps"])

    def reseed(self, seed: int) -> None:
        """Seed all of them."""
        random.seed(seed)
        torch.manual_seed(seed % (1 << 63))  # also those of devices
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & _MASK_32)


rng = Generators()


class _One:
    """One generator."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any], seed: Callable[[int], Any]) -> None:
        self._get = get
        self._put = put
        self.reseed = seed

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._get()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._put(state["generator"])


def stateful(thing: Any) -> Any:
    """Give a random number generator ``state_dict()``, ``load_state_dict()`` and ``reseed()``; return all else as it is.

    A ``StatefulDataLoader`` gets the state of its generator, too.
    """
    if is_stateful_loader(thing):
        return StatefulLoader(thing)
    if isinstance(thing, torch.Generator):
        return _One(thing.get_state, thing.set_state, lambda seed: thing.manual_seed(seed % (1 << 63)))
    if isinstance(thing, random.Random):
        return _One(lambda: _listed(thing.getstate()), lambda state: thing.setstate(_tupled(state)), thing.seed)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return thing
    if isinstance(thing, numpy.random.RandomState):
        return _of_random_state(thing)
    if isinstance(thing, numpy.random.Generator):
        thing = thing.bit_generator
    if isinstance(thing, numpy.random.BitGenerator):
        return _of_bits(thing)
    return thing


def _of_random_state(thing: Any) -> _One:
    """A `numpy.random.RandomState`, which keeps every second normal number beside its bit generator."""

    def seed(number: int) -> None:
        bits = type(thing._bit_generator)(number)
        thing.set_state(type(thing)(bits).get_state(legacy=False))

    return _One(lambda: _plain(thing.get_state(legacy=False)), lambda state: thing.set_state(_with_arrays(state)), seed)


def _of_bits(bits: Any) -> _One:
    """A bit generator of NumPy, with which its `Generator` is made."""

    def put(state: Any) -> None:
        bits.state = _with_arrays(state)

    def seed(number: int) -> None:
        bits.state = type(bits)(number).state

    return _One(lambda: _plain(bits.state), put, seed)


def derived_seed(states: Any, rank: int) -> int:
    """A seed that follows from the states of a checkpoint and the rank, so that loading it twice gives the same numbers."""
    hashed = blake2b(digest_size=8)
    hashed.update(repr(_plain(states)).encode())
    hashed.update(rank.to_bytes(8, "little"))
    return int.from_bytes(hashed.digest(), "little")


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value


def _tupled(value: Any) -> Any:
    return tuple(_tupled(each) for each in value) if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """Replace NumPy arrays by lists, because a checkpoint is read without classes of other libraries."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if type(value).__module__ == "numpy":
        return {_ARRAY: str(value.dtype), "values": value.tolist()} if value.ndim else value.item()
    return value


def _with_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        if _ARRAY in value:
            return sys.modules["numpy"].array(value["values"], dtype=value[_ARRAY])
        return {key: _with_arrays(each) for key, each in value.items()}
    return value
