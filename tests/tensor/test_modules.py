"""What can't be placed is an error before anything of a module has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Shard

from monarch_kernel.tensor import TensorError
from monarch_kernel.tensor.drawing import as_seed, is_random
from monarch_kernel.tensor.modules import distribute
from monarch_kernel.tensor.propagation import info_of
from tests.tensor.in_process import InProcess


class Scale(nn.Module):
    """A module that can't initialise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))


def two() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"nothing": {}}, "no parameter of the module matches 'nothing'"),
        (
            {"1": {"r": Shard(1)}},
            r"1.bias \(2,\) can't be placed: r=Shard\(1\) is not possible: the tensor has 1 dimension",
        ),
        ({"1": {"r": Partial()}}, "1.weight can't be Partial"),
        ({"1": {"r": "left"}}, "1.weight .* r='left' is no placement"),
    ],
)
def test_a_wrong_plan_changes_nothing(ranks: InProcess, plan: Any, text: str) -> None:
    module = two()
    with pytest.raises(TensorError, match=text):
        distribute(ranks.device, module, plan)
    assert all(type(param) is nn.Parameter and param.is_meta for param in module.parameters())


def test_a_module_without_values_must_initialise_itself(ranks: InProcess) -> None:
    with torch.device("meta"):
        module = Scale()
    with pytest.raises(TensorError, match=r"factor has no values, and Scale has no reset_parameters\(\)"):
        distribute(ranks.device, module, {})
    assert module.factor.is_meta


def test_a_module_is_placed_once(ranks: InProcess) -> None:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(ranks.device.put(torch.ones(2, 2)))
    with pytest.raises(TensorError, match="weight is on ranks already"):
        distribute(ranks.device, module, {})


def test_operations_that_take_random_numbers_are_known() -> None:
    ops, x = torch.ops.aten, torch.ones(1)
    attention = info_of(ops._scaled_dot_product_flash_attention_for_cpu.default)
    assert not is_random(attention, (x, x, x), {})
    assert not is_random(attention, (x, x, x, 0.0), {})
    assert is_random(attention, (x, x, x, 0.1), {})
    for op in (ops.normal_.default, ops.rand_like.default, ops.bernoulli_.float, ops.multinomial.default):
        assert is_random(info_of(op), (x,), {})
    assert not is_random(info_of(ops.add.Tensor), (x, x), {})
    assert as_seed(-1) == 2**63 - 1
