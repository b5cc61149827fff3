"""The states of random number generators survive a checkpoint, and can be derived for other ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monarch_kernel.train import checkpoint
from monarch_kernel.train.generators import derived_seed, rng, stateful


def draw(thing: Any) -> list[float]:
    """Numbers of a generator."""
    if thing is rng:
        return [random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]
    if isinstance(thing, torch.Generator):
        return torch.rand(3, generator=thing).tolist()
    if isinstance(thing, np.random.BitGenerator):
        return np.random.Generator(thing).random(3).tolist()
    return [thing.random() for _ in range(3)]


GENERATORS = [
    rng,
    torch.Generator().manual_seed(3),
    random.Random(3),
    np.random.RandomState(3),
    *(np.random.Generator(bits(3)) for bits in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)),
    np.random.PCG64DXSM(3),
]


@pytest.mark.parametrize("thing", GENERATORS, ids=lambda thing: type(thing).__name__)
def test_a_generator_goes_on_after_a_load(thing: Any, tmp_path: Path) -> None:
    draw(thing)
    checkpoint.save(tmp_path / "a", generator=thing)
    expected = draw(thing)
    assert draw(thing) != expected
    checkpoint.load(tmp_path / "a", generator=thing)
    assert draw(thing) == expected


@pytest.mark.parametrize("thing", GENERATORS, ids=lambda thing: type(thing).__name__)
def test_new_seeds_follow_from_the_state_and_the_rank(thing: Any) -> None:
    its = stateful(thing)
    state = its.state_dict()
    found = []
    for rank in (0, 1, 0):
        its.reseed(derived_seed(state, rank))
        found.append(draw(thing))
    assert found[0] == found[2] != found[1]


def test_other_objects_stay() -> None:
    thing = object()
    assert stateful(thing) is thing
