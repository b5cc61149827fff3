"""Forward and backward that run twice: what is compared, and what is left; in one process."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from monarch_kernel.features.replicas.repeats import Found, repeat_text, run_twice


def flip(gradient: torch.Tensor) -> None:
    gradient.view(torch.int32).view(-1)[2] ^= 1 << 3


class Noisy(nn.Module):
    """Uses all global random generators, and has buffers that a forward changes."""

    count: torch.Tensor
    last: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.last = x.detach() + self.count
        return self.net(x * random.random() + float(np.random.rand()))


def seeded() -> Noisy:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    return Noisy()


def test_two_runs_leave_what_one_run_leaves() -> None:
    left = []
    for twice in (False, True):
        model = seeded()
        x = torch.randn(8, 4)
        model(x).sum().backward()  # gradients of an earlier micro-batch, to which the next ones are added

        def backward(model: Noisy = model, x: torch.Tensor = x) -> float:
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss.item()

        if twice:
            loss, found = run_twice(0, backward, {"model": model})
            assert found == Found(0)
        else:
            loss = backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        numbers = [torch.rand(1), torch.tensor(random.random()), torch.tensor(np.random.rand())]
        assert model.last is not None
        left.append([torch.tensor(loss), *gradients, *model.buffers(), *numbers])
    assert len(left[0]) == len(left[1]) == 13
    for one, other in zip(*left):
        assert torch.equal(one, other)


@pytest.mark.parametrize("run", [0, 1])
def test_a_bit_that_flips_in_one_run_is_found(run: int) -> None:
    model, runs = nn.Linear(4, 3), iter(range(2))

    def backward() -> None:
        model(torch.ones(2, 4)).sum().backward()
        if next(runs) == run:
            assert model.weight.grad is not None
            flip(model.weight.grad)

    assert run_twice(7, backward, {"model": model})[1] == Found(7, (), ("model.weight",))


def test_a_gradient_is_compared_before_it_is_changed_by_others() -> None:
    model, runs = nn.Linear(4, 3), iter(range(2))
    model.weight.register_hook(lambda gradient: flip(gradient) if next(runs) else None)
    found = run_twice(7, lambda: model(torch.ones(2, 4)).sum().backward(), {"model": model})[1]
    assert found == Found(7, ("model.weight",), ("model.weight",))
    assert len(model.weight._backward_hooks or ()) == 1


def test_a_gradient_that_only_one_run_has_differs() -> None:
    model, runs = nn.Linear(4, 3), iter(range(2))

    def backward() -> None:
        (model(torch.ones(2, 4)) if next(runs) else model.weight).sum().backward()

    assert "model.bias" in run_twice(0, backward, {"model": model})[1].computed


def test_the_text_names_the_rank_that_has_computed_it() -> None:
    assert repeat_text({0: Found(5), 1: Found(5)}) == ""
    text = repeat_text({0: Found(5, (), ("a",)), 1: Found(5, ("a", "b"), ("a", "b"))})
    assert text.startswith(
        "step 5: the gradient of a (and 1 more) is another one when forward and backward run twice, on [1]."
    )
    text = repeat_text({0: Found(1_000, (), ("a",)), 1: Found(1_000, (), ("a",))})
    assert ", on [0-1], after the ranks had exchanged them, so that any rank may be the cause. Usual causes: " in text
