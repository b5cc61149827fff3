"""F24: replicas drift apart; the check names the first tensor that differs, by how much, and on which ranks."""

from __future__ import annotations

import pytest

from tests.failures.cells import Cells

N = 4
MODEL = "torch.manual_seed(0); model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Linear(300, 3))"


def test_the_first_parameter_that_differs_is_named_with_its_rank(cells: Cells) -> None:
    cells.ok(MODEL)
    equal = cells.mesh.check()
    assert equal.is_equal
    assert repr(equal).startswith("t: 4 tensors of model are equal on 4 ranks (")
    cells.ok("with torch.no_grad():\n    if rank == 2: model[1].weight[1, 7] = 0.75; model[1].bias += 1")
    drifted = cells.mesh.check("model")
    assert not drifted.is_equal
    assert drifted.differences[0].odd == (2,)
    text = repr(drifted)
    assert "t: 2 of 4 tensors of model differ between 4 ranks" in text
    assert "\n  model.1.weight: [2] differs from [0-1,3], at [1, 7]: 0.75 on [2], " in text
    assert "; 1 of 900 elements differs\n  model.1.bias: [2] differs from [0-1,3]\n" in text
    assert "live.check(every=500) in the loop names the step" in text
    assert cells.mesh[0:2].check().is_equal


def test_a_variable_that_a_rank_does_not_have_is_named(cells: Cells) -> None:
    cells.ok("if rank: mine = torch.ones(2)")
    assert "\n  mine: [0] does not have it\n" in repr(cells.mesh.check("mine"))
    with pytest.raises(NameError, match="name 'minne' is not defined on any rank of t"):
        cells.mesh.check("minne")
    with pytest.raises(KeyError, match="t has no axis 'dp'"):
        cells.mesh.check("mine", axis="dp")


def test_drift_stops_the_loop_on_all_ranks_before_the_update(cells: Cells) -> None:
    cells.ok(f"{MODEL}\nfrom monarch_kernel import live")
    text = cells.fails(
        "done = 0\nfor step in live.loop(20):\n    live.check(every=3)\n"
        "    with torch.no_grad(): model[0].bias += 0.5 if (rank, step) == (1, 4) else 0.25\n    done += 1"
    )
    assert "[0-3] DriftError: step 6: the replicas differ: model.0.bias: [1] differs from [0,2-3], at [0]: " in text
    assert "300 of 300 elements differ, by up to 0.25" in text
    assert cells.ok("done") == (6, 6, 6, 6)


def test_checks_of_different_steps_are_not_compared(cells: Cells) -> None:
    cells.ok(f"{MODEL}\nfrom monarch_kernel import live")
    text = cells.fails(
        "for step in live.loop(20):\n    live.check(every=3 if rank else 5)\n    model[0].bias.data += 0.5"
    )
    assert "[0-3] RuntimeError: the ranks call live.check in different steps: [0] 5, [1-3] 3; " in text


SAID = """
import contextlib, io
with contextlib.redirect_stderr(io.StringIO()) as printed:
    for step in live.loop(3): live.check({what}, every=1)
printed.getvalue()
"""


def test_a_check_of_buffers_alone_says_once_in_a_loop_that_it_compares_nothing(cells: Cells) -> None:
    cells.ok("from monarch_kernel import live\nnorm = torch.nn.BatchNorm1d(3, affine=False)")
    first, *others = cells.ok(SAID.format(what="norm=norm"))
    assert first.startswith("live.check compared nothing in norm: there are only buffers")
    assert first.count("\n") == 1
    assert others == ["", "", ""]
    assert list(cells.ok(SAID.format(what="x=torch.ones(2)"))) == [""] * 4


@pytest.mark.slow  # four ranks import FSDP
def test_a_check_without_a_replica_says_so(cells: Cells) -> None:
    cells.ok(
        f"{MODEL}\nfrom monarch_kernel import live\nfrom torch.distributed.fsdp import fully_shard\nfully_shard(model)\nNone"
    )
    why = "no tensor has a replica, as each of 4 ranks has another shard (FSDP on all ranks)"
    assert list(cells.ok(SAID.format(what="model=model"))) == [
        f"live.check compared nothing in model: {why}\n",
        "",
        "",
        "",
    ]
