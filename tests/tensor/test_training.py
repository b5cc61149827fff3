"""Training on distributed tensors is the training of plain tensors, to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monarch_kernel.tensor import inspect
from tests.tensor.in_process import InProcess

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3),
}


def train(model: nn.Module, make: Callable[..., torch.optim.Optimizer], x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    optimizer, losses = make(model.parameters()), []
    for _ in range(20):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_weights_and_losses_are_those_of_plain_tensors(
    one: InProcess, make: Callable[..., torch.optim.Optimizer]
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    x, y = torch.randn(32, 16), torch.randint(0, 10, (32,))
    model = copy.deepcopy(plain)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(one.device.put(parameter)))
    losses = inspect(train(model, make, one.device.put(x), one.device.put(y)))
    assert losses == train(plain, make, x, y)
    for mine, theirs in zip(inspect(list(model.parameters())), plain.parameters()):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_gradients_of_recurrent_layers_are_those_of_plain_tensors(one: InProcess, make: type[nn.RNNBase]) -> None:
    """Ranks keep no history; torch's LSTM for CPUs leaves out what its backward needs where no gradients are recorded."""
    torch.manual_seed(0)
    plain, x = make(4, 3, num_layers=2), torch.randn(5, 2, 4)  # type: ignore[call-arg]
    model = copy.deepcopy(plain)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(one.device.put(parameter)))
    output = model(one.device.put(x))[0]
    output.square().sum().backward()
    expected = plain(x)[0]
    expected.square().sum().backward()
    torch.testing.assert_close(inspect(output), expected)
    for mine, theirs in zip(inspect([each.grad for each in model.parameters()]), plain.parameters()):
        torch.testing.assert_close(mine, theirs.grad)
