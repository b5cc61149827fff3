"""F33: the backward of DDP waits, because a rank ran `no_sync`; the line has the place and the ranks that never reached it."""

from __future__ import annotations

import sys

import pytest
import torch

from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.diagnostics.unreduced_gradients import unreduced_text
from tests.failures.cells import Cells

PREPARE = """
from contextlib import nullcontext
from torch.nn.parallel import DistributedDataParallel as DDP
net = DDP(torch.nn.Linear(4, 4))
"""


class DistributedDataParallel(torch.nn.Module):
    """Stands in for torch's class, whose import takes some seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reduced = True
        self.module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})

    def forward(self) -> None:
        raise RuntimeError("... in the prior iteration\nParameter indices which did not receive grad for rank 0: 2 3")

    def _check_reducer_finalized(self) -> None:
        if not self.is_reduced:
            self.forward()


def test_parameters_without_a_gradient_are_named_for_their_indices() -> None:
    with pytest.raises(RuntimeError) as caught:
        DistributedDataParallel()()
    assert "parameters without a gradient on this rank: b.weight, b.bias" in describe(caught.value).notes


def test_a_backward_that_reduces_no_gradients_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, known = DistributedDataParallel(), set[object]()
    monkeypatch.setitem(sys.modules, "torch.nn.parallel.distributed", sys.modules[__name__])
    names = {"m": model, "same": model, "other": model.module, "x": 1}
    assert unreduced_text(names, known) == ""
    model.is_reduced = False
    assert unreduced_text(names, known) == (
        "m: its last backward has not reduced all gradients, which may differ by rank; "
        "parameters without a gradient on this rank: b.weight, b.bias; use all parameters in the loss, or make it with "
        "find_unused_parameters=True"
    )
    assert unreduced_text(names, known) == ""
    model.is_reduced = True
    assert unreduced_text(names, known) == ""
    model.is_reduced = False
    assert unreduced_text(names, known).startswith("m: ")


@pytest.mark.parametrize("is_old", [True, False])
def test_a_model_whose_group_was_formed_again_is_named(is_old: bool) -> None:
    model = DistributedDataParallel()
    model.process_group = object() if is_old else None
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError(f"[pair.cc:553] Connection closed by peer [127.0.0.1]:28558. GLHF! {model.training}")
    notes = "\n".join(describe(caught.value).notes)
    assert ("the group of model was made before the mesh formed its process group again" in notes) == is_old


@pytest.mark.slow  # the import of DistributedDataParallel
def test_the_place_and_the_missing_rank_are_named(cells: Cells) -> None:
    cells.ok(PREPARE)
    code = "with net.no_sync() if rank == 0 else nullcontext():\n    net(torch.ones(2, 4)).sum().backward()"
    with cells.waits(code, 0) as told:
        assert "[1] waits for" in told
        assert "all_reduce #" in told
        assert f"cell [{cells.number}], line 2" in told
        assert "[0] has finished the cell" in told


@pytest.mark.slow  # for the same reason
def test_parameters_without_a_gradient_are_named(cells: Cells) -> None:
    cells.ok(
        "class Two(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)\n"
        "    def forward(self, x):\n"
        "        return self.a(x)\n"
        "two = DDP(Two())"
    )
    text = cells.fails("for step in range(2):\n    two(torch.ones(1, 2)).sum().backward()")
    assert "Expected to have finished reduction in the prior iteration" in text
    assert "parameters without a gradient on this rank: b.weight, b.bias" in text
