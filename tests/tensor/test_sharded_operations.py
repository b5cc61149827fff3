"""Functions of sharded tensors give what they give on plain tensors, with gradients, for each placement; on real ranks.

``TABLE=write pytest tests/tensor/test_sharded_operations.py`` writes the table in `docs/tensors-operations.md`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monarch_kernel.actor import ProcMesh
from monarch_kernel.features.tensors.samples import least_samples
from monarch_kernel.tensor import DistributedTensor, Replicate, Shard, record
from tests.tensor.sharded_cases import GROUPS, Case, placements_of, values_of

PROCS = {"r": 2}

TABLE = Path(__file__).parents[2] / "docs" / "tensors-operations.md"

Place = Callable[[int, torch.Tensor, bool], tuple[Any, Any]]


def addends(x: torch.Tensor) -> torch.Tensor:
    """Two tensors whose sum is a tensor."""
    return torch.stack([x * 0.3 - 1, x * 0.7 + 1])


def run(case: Case, place: Place) -> tuple[list[Any], list[Any]]:
    """Call the function of a case, and differentiate a weighted sum of its results."""
    leaves, args = [], []
    for number, (value, kind) in enumerate(zip(values_of(case), case.kinds)):
        leaf, arg = place(number, value, kind == "f")
        leaves.append(leaf)
        args.append(arg)
    result = case.function(*args)
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    total: Any = 0
    for number, each in enumerate(results):
        if each.requires_grad:
            weights = torch.randn(each.shape, generator=torch.Generator().manual_seed(number), dtype=each.dtype)
            total = total + (each * place(-1, weights, False)[1]).sum()
    if isinstance(total, torch.Tensor):
        total.backward()
    return results, [leaf.grad for leaf, kind in zip(leaves, case.kinds) if kind == "f"]


def placed(case: Case, text: str, number: int, value: torch.Tensor) -> str:
    """How an argument is placed when the main ones of a case are placed so."""
    is_main = number in case.sharded
    if not is_main or (text.startswith("S") and int(text[2:-1]) >= value.dim()):
        return "R"
    return "R" if text.startswith("P") and not value.is_floating_point() else text


def plain_place(case: Case, text: str) -> Place:
    def place(number: int, value: torch.Tensor, has_gradient: bool) -> tuple[Any, Any]:
        if placed(case, text, number, value).startswith("P"):
            leaf = addends(value).requires_grad_(has_gradient)
            return leaf, leaf.sum(0)
        leaf = value.clone().requires_grad_(has_gradient)
        return leaf, leaf

    return place


def sharded_place(procs: ProcMesh, case: Case, text: str) -> Place:
    def place(number: int, value: torch.Tensor, has_gradient: bool) -> tuple[Any, Any]:
        how = placed(case, text, number, value)
        if how.startswith("P"):
            leaf = procs.shard(addends(value), r=Shard(0)).requires_grad_(has_gradient)
            return leaf, leaf.sum(0)
        leaf = procs.shard(value, r=Shard(int(how[2:-1])) if how.startswith("S") else Replicate())
        leaf.requires_grad_(has_gradient)
        return leaf, leaf

    return place


def whole(each: Any) -> Any:
    if isinstance(each, DistributedTensor):
        return each.detach().full_tensor()
    return each.detach() if isinstance(each, torch.Tensor) else each


def described(results: list[Any]) -> str:
    """How results are placed, as in the table."""
    found = [each._part.device.describe_placements(each)[2:] for each in results if isinstance(each, DistributedTensor)]
    return ", ".join(dict.fromkeys(found)) or "plain"


def compare(expected: tuple[list[Any], list[Any]], found: tuple[list[Any], list[Any]]) -> None:
    """Compare results and gradients with those of plain tensors."""
    for kind, mine, theirs in zip(("result", "gradient"), expected, found):
        for number, (here, there) in enumerate(zip(mine, theirs, strict=True)):
            torch.testing.assert_close(
                whole(there), whole(here), atol=1e-4, rtol=1e-3, equal_nan=True,
                msg=lambda text_of, kind=kind, number=number: f"{kind} {number}: {text_of}",
            )  # fmt: skip


def checked(procs: ProcMesh, case: Case, text: str) -> str:
    """Compare a case with plain tensors; return how its results are placed."""
    found = run(case, sharded_place(procs, case, text))
    compare(run(case, plain_place(case, text)), found)
    return described(found[0])


def rows(results: dict[str, dict[str, str]]) -> list[str]:
    columns = ["R", "S(0)", "S(1)", "S(2)", "S(3)", "P(sum)"]
    return [
        f"| `{name}` | {' | '.join(found.get(column, '') for column in columns)} |" for name, found in results.items()
    ]


def filled(table: str) -> list[tuple[bool | str, ...]]:
    """The functions of a table, and for which placements each has a result.

    The placements of results are left out: where several cost the same, torch's choice differs from process to process.
    """
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    return [(name, *map(bool, found)) for name, *found in cells]


def section(group: str) -> tuple[str, str]:
    return f"<!-- {group}: generated -->\n", "\n<!-- end -->"


HEAD = """| function | Replicate | Shard(0) | Shard(1) | Shard(2) | Shard(3) | Partial |
|---|---|---|---|---|---|---|
"""


@pytest.mark.parametrize("group", list(GROUPS))
@pytest.mark.slow
@pytest.mark.usefixtures("tensors_dropped")
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # some functions warn of their future
def test_results_and_gradients_are_those_of_plain_tensors(procs: ProcMesh, group: str) -> None:
    wrong: list[str] = []
    results: dict[str, dict[str, str]] = {}
    for case in GROUPS[group]:
        for text in placements_of(case):
            try:
                results.setdefault(case.name, {})[text] = checked(procs, case, text)
            except Exception as error:
                wrong.append(f"{case.name} {text}: {' '.join(str(error).split())[:300]}")
    assert not wrong, "\n".join(wrong)
    start, end = section(group)
    text = TABLE.read_text()
    before, _, rest = text.partition(start)
    table, _, after = rest.partition(end)
    made = HEAD + "\n".join(rows(results))
    if os.environ.get("TABLE") == "write":
        TABLE.write_text(before + start + made + end + after)
    else:
        assert filled(table) == filled(made), "the table is old: write it with TABLE=write"


def test_the_least_samples_of_a_rank() -> None:
    assert least_samples(5, [2]) == 2
    assert least_samples(5, [4]) == 0  # chunks of 2: 2, 2, 1 and none
    assert least_samples(8, [2, 2]) == 2
    assert least_samples(1, [2]) == 0
    assert least_samples(3, []) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("tensors_dropped")
def test_an_image_model_trains_on_sharded_samples(procs: ProcMesh) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2),
            nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(4, 3),
        )  # fmt: skip

    plain, there = made(), procs.distribute(made())
    mine, theirs = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, there))
    y = torch.arange(6) % 3
    for step in range(3):
        x = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(step))
        losses = []
        for model, optimizer, batch, labels in (
            (plain, mine, x, y),
            (there, theirs, procs.shard(x, r=Shard(0)), procs.shard(y, r=Shard(0))),
        ):
            loss = F.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    torch.testing.assert_close(there[1].running_var.full_tensor(), plain[1].running_var, atol=1e-4, rtol=1e-3)  # type: ignore[index, union-attr, operator]


@pytest.mark.slow
@pytest.mark.usefixtures("tensors_dropped")
def test_views_that_need_other_ranks_are_views_in_recorded_functions(procs: ProcMesh) -> None:
    def program(x: Any) -> Any:
        made = x * 1
        row = made[1]
        made.mul_(2)
        row.add_(1)
        return made

    recorded = record(program)
    for step in range(4):
        x = torch.arange(12.0).view(4, 3) + step
        assert torch.equal(recorded(procs.shard(x, r=Shard(0))).full_tensor(), program(x))
    assert "recorded;" in recorded.describe()
