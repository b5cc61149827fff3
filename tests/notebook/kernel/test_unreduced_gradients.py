"""A cell says that the last backward of a model in DistributedDataParallel has left gradients unreduced."""

from __future__ import annotations

import pytest

from tests.notebook.kernel.conftest import Notebook

pytestmark = pytest.mark.slow  # the import of DistributedDataParallel

DEFINE = """%%remote t
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
class Branch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    def forward(self, x):
        return self.b(x) if rank else self.a(x)
def backward(model):
    model(torch.ones(1, 2)).sum().backward()
    return model"""


def test_the_cell_with_the_backward_names_the_parameters_of_each_rank_once(four: Notebook) -> None:
    four.ok(DEFINE)
    assert four.ok("%%remote t\nwhole = backward(DDP(Branch(), find_unused_parameters=True))").stderr == ""
    told = four.ok("%%remote t\nm = backward(DDP(Branch()))").stderr
    assert "m: its last backward has not reduced all gradients, which may differ by rank" in told
    assert "parameters without a gradient on this rank: b.weight, b.bias;" in told
    assert "parameters without a gradient on this rank: a.weight, a.bias;" in told
    assert four.ok("%%remote t\n1").stderr == ""


def test_a_cell_that_fails_has_its_error_only(four: Notebook) -> None:
    four.ok(DEFINE)
    failed = four.run("%%remote t\nfailing = backward(DDP(Branch()))\n1 / 0")
    assert "ZeroDivisionError" in failed.text
    assert "has not reduced" not in failed.text
    assert four.ok("%%remote t\n1").stderr == ""
