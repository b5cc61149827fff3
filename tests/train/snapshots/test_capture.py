"""A snapshot restores the state of training into the same objects."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from monarch_kernel.train.snapshots.capture import capture, check, put_back, set_random_state


class Counting(nn.Module):
    """Has a non-persistent buffer, extra state, and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        return x

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def things() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Counting(), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model.bfloat16_part = nn.Parameter(torch.randn(3).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "generator": torch.Generator().manual_seed(7),
        "noise": np.random.default_rng(7),
        "choice": random.Random(7),
        "average": torch.zeros(2, 3),
        "losses": [],
        "best": {},
        "seen": set(),
        "window": collections.deque(maxlen=3),
    }


def train(has: dict[str, Any], steps: range) -> list[float]:
    """Train with all objects that have a state."""
    for step in steps:
        x = torch.randn(8, 4, generator=has["generator"])
        loss = has["model"](x).square().mean() * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
        loss = loss * (1 + 0.1 * has["noise"].random() + 0.1 * has["choice"].random())
        loss = loss + has["model"].bfloat16_part.float().square().sum()
        has["optimizer"].zero_grad()
        loss.backward()
        has["optimizer"].step()
        has["schedule"].step()
        has["average"] += loss.detach()
        has["losses"].append(loss.item())
        has["best"]["loss"] = min(loss.item(), has["best"].get("loss", 9.0))
        has["seen"].add(step)
        has["window"].append(step)
    return [*has["losses"], float(has["average"].sum()), has["best"]["loss"], *has["seen"], *has["window"]]


@pytest.mark.parametrize("others", [False, True], ids=["into the same", "into new ones"])
def test_training_continues_from_a_snapshot_as_without_it(others: bool) -> None:
    has = things()
    train(has, range(5))
    captured = capture(has)
    expected = train(has, range(5, 12))
    state = {
        name: value.clone() for name, value in has["model"].state_dict().items() if isinstance(value, torch.Tensor)
    }
    for _ in range(2):  # captured state can be restored twice
        has = things() if others else has
        put_back(has, captured)
        set_random_state(captured)
        assert (has["model"][1].calls, float(has["model"][1].seen)) == (5, 5.0)
        assert train(has, range(5, 12)) == expected
        for name, value in has["model"].state_dict().items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, state[name]), name


def test_an_optimizer_has_no_state_before_the_first_step() -> None:
    has = things()
    captured = capture(has)
    first = train(has, range(3))
    put_back(has, captured)
    assert not has["optimizer"].state
    set_random_state(captured)
    assert train(has, range(3)) == first


def test_captured_state_is_a_copy() -> None:
    model = nn.Linear(300, 300)  # large enough for shared memory, where available
    was = model.weight.detach().clone()
    captured = capture({"model": model})
    with torch.no_grad():
        model.weight.zero_()
    put_back({"model": model}, captured)
    assert torch.equal(model.weight, was)
    with torch.no_grad():
        model.weight.zero_()
    put_back({"model": model}, captured)
    assert torch.equal(model.weight, was)


@pytest.mark.parametrize(
    ("had", "has", "said"),
    [
        ({"model": nn.Linear(2, 2)}, {"net": nn.Linear(2, 2)}, "the snapshot has model, but live.snapshot now has net"),
        ({"model": nn.Linear(2, 2)}, {"model": [1]}, "it was a module when the snapshot was taken, but is a list"),
        (
            {"model": nn.Linear(2, 2)},
            {"model": nn.Linear(2, 2, bias=False)},
            "its parameters or buffers differ from the snapshot .bias",
        ),
        ({"model": nn.Linear(2, 2)}, {"model": nn.Linear(3, 2)}, r"has \[2, 3\] of it, but had \[2, 2\]"),
    ],
)
def test_different_objects_are_refused(had: dict[str, Any], has: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        put_back(has, capture(had))


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    def trained(*sizes: int) -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.zeros(size)) for size in sizes], lr=0.1)

    with pytest.raises(ValueError, match="its parameters differ from the snapshot"):
        put_back({"optimizer": trained(2, 3)}, capture({"optimizer": trained(2)}))


def test_objects_that_can_not_be_restored_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"live.snapshot\(step=...\): a int can't be restored; modules, optimizers"):
        check({"step": 3})
    with pytest.raises(TypeError, match=r"loader=...\): a DataLoader can't go on .*; pass checkpoint.Loader\("):
        check({"loader": DataLoader(range(4))})
    with pytest.raises(ValueError, match=r"live.snapshot\(\) needs the objects to restore"):
        check({})
