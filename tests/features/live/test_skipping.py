"""A step whose loss jumps leaves parameters and optimizers as they are, and the next step goes on."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from monarch_kernel.features.live.skipping import UpdateSkipper


class Loop:
    """A loop on one rank, with a model of one parameter."""

    def __init__(self) -> None:
        self.step = -1
        self.skipper = UpdateSkipper(lambda: self.step)
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer: Any = torch.optim.Adam([self.weight], weight_decay=0.1)
        self.skipper.begin()

    def state(self) -> Any:
        return copy.deepcopy((self.weight.tolist(), self.optimizer.state_dict()["state"]))

    def train(self, loss: float, *, name: str = "loss") -> bool:
        """Make a step; returns whether it has changed anything."""
        self.step += 1
        before = repr(self.state())
        self.weight.grad = torch.ones(3)
        self.skipper.log(name, torch.tensor(loss))
        self.optimizer.step()
        assert self.weight.grad.tolist() == [1, 1, 1]
        return repr(self.state()) != before

    def settle(self) -> None:
        for _ in range(40):
            assert self.train(2.0 + self.step % 7 / 20)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.skipper.end()


def test_the_update_of_a_step_whose_loss_jumps_is_skipped(loop: Loop, capsys: pytest.CaptureFixture[str]) -> None:
    loop.settle()
    assert not loop.train(50.0)
    assert not loop.train(60.0)
    assert loop.train(2.1)
    assert capsys.readouterr().out.splitlines() == [
        f"live loop: the loss of step {step} jumps on rank 0: no rank applies the update of this step"
        for step in (40, 41)
    ]


def test_all_optimizers_of_the_step_skip(loop: Loop) -> None:
    loop.settle()
    other = torch.nn.Parameter(torch.ones(1))
    second = torch.optim.SGD([other], lr=1.0)
    other.grad = torch.ones(1)
    assert not loop.train(50.0)
    second.step()
    assert other.item() == 1.0
    assert loop.train(2.0)
    second.step()
    assert other.item() == 0.0


def test_a_loss_that_stays_high_is_the_new_normal(loop: Loop) -> None:
    loop.settle()
    applied = [loop.train(50.0 + at % 3) for at in range(40)]
    assert not any(applied[:31])
    assert all(applied[31:])


def test_other_values_and_values_that_are_not_finite_skip_nothing(loop: Loop) -> None:
    loop.settle()
    assert loop.train(50.0, name="grad_norm")
    assert loop.train(math.nan)
    assert loop.train(math.inf)
    assert not loop.train(50.0)


def test_a_loss_that_is_logged_after_the_update_is_an_error(loop: Loop) -> None:
    loop.step += 1
    loop.weight.grad = torch.ones(3)
    loop.optimizer.step()
    with pytest.raises(RuntimeError, match=r"the update of step 0 was applied before live\.log\(loss=\.\.\.\)"):
        loop.skipper.log("loss", 1.0)


def test_a_step_with_a_closure_is_an_error_if_it_must_be_skipped(loop: Loop) -> None:
    loop.settle()
    loop.step += 1
    loop.optimizer.step(lambda: 1.0)
    loop.step += 1
    loop.skipper.log("loss", 50.0)
    for arguments in ({"closure": lambda: 1.0},):
        with pytest.raises(RuntimeError, match=r"can't skip optimizer\.step\(closure\)"):
            loop.optimizer.step(**arguments)


def test_after_the_loop_nothing_is_skipped(loop: Loop) -> None:
    loop.settle()
    loop.skipper.log("loss", 50.0)
    loop.skipper.end()
    assert loop.train(50.0)
