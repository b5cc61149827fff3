"""Functions of tensors that are sharded along two axes give what they give on plain tensors, with gradients; on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from monarch_kernel.actor import ProcMesh
from monarch_kernel.tensor import Shard
from tests.tensor.sharded_cases import GROUPS, Case
from tests.tensor.test_sharded_operations import Place, addends, compare, placed, run

PROCS = {"dp": 2, "tp": 2}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("tensors_dropped")]


def grids_of(case: Case) -> Iterator[tuple[str, str]]:
    """Yield the placements of the arguments that are sharded along both axes: uneven parts, empty ones, and partial sums."""
    last = len(case.shapes[case.sharded[0]]) - 1
    yield from [("S(0)", "S(0)"), ("R", "S(0)")]
    if last:
        yield from [("S(0)", "S(1)"), ("S(1)", "S(0)")]
    if last > 1:
        yield f"S({last})", "S(1)"
    if case.kinds[case.sharded[0]] == "f":
        yield from [("S(0)", "P(sum)"), ("P(sum)", "S(0)"), ("P(sum)", "P(sum)")]


def grid_of(case: Case, grid: tuple[str, str], number: int, value: torch.Tensor) -> tuple[list[str], int]:
    """How an argument is placed along both axes, and along how many of them it is partial."""
    texts = [placed(case, text, number, value) if number >= 0 else "R" for text in grid]
    return texts, sum(text.startswith("P") for text in texts)


def spread(value: torch.Tensor, n_partial: int) -> torch.Tensor:
    """Tensors whose sum along the first dimensions is a tensor."""
    return spread(addends(value), n_partial - 1) if n_partial else value.clone()


def summed(leaf: Any, n_partial: int) -> Any:
    return summed(leaf.sum(0), n_partial - 1) if n_partial else leaf


def plain_place(case: Case, grid: tuple[str, str]) -> Place:
    def place(number: int, value: torch.Tensor, has_gradient: bool) -> tuple[Any, Any]:
        _, n_partial = grid_of(case, grid, number, value)
        leaf = spread(value, n_partial).requires_grad_(has_gradient)
        return leaf, summed(leaf, n_partial)

    return place


def sharded_place(procs: ProcMesh, case: Case, grid: tuple[str, str]) -> Place:
    def place(number: int, value: torch.Tensor, has_gradient: bool) -> tuple[Any, Any]:
        texts, n_partial = grid_of(case, grid, number, value)
        dims = iter(range(n_partial))  # a sum along a sharded dimension is partial
        shards = {
            axis: Shard(next(dims) if text.startswith("P") else int(text[2:-1]) + n_partial)
            for axis, text in zip(PROCS, texts)
            if text != "R"
        }
        leaf = procs.shard(spread(value, n_partial), **shards).requires_grad_(has_gradient)
        return leaf, summed(leaf, n_partial)

    return place


def test_negative_dimensions_shifts_and_ranks_without_elements(procs: ProcMesh) -> None:
    """Where torch's rules are wrong, or fail on one rank alone."""
    functions: list[tuple[Any, tuple[int, ...], str]] = [
        *((lambda x, n=name: getattr(torch, n)(x, -1), (5, 3), "f") for name in ("cumsum", "cumprod", "logcumsumexp")),
        (lambda x: x.cumsum(dim=-2), (5, 3), "f"),
        (lambda x: x.argmax(-1), (5, 3), "f"),
        (lambda x: (x << 1, x >> 1, x & 3), (5, 3), "i9"),
        *((lambda x, n=name: getattr(torch, n)(x), (3, 1), "f") for name in ("amax", "min", "argmax")),
        (lambda x: x.amin(dim=0), (3, 1), "f"),
    ]
    for number, (function, shape, kind) in enumerate(functions):
        case = Case(f"function {number}", function, (shape,), (kind,), (0,))
        for grid in grids_of(case):
            compare(run(case, plain_place(case, grid)), run(case, sharded_place(procs, case, grid)))


@pytest.mark.parametrize("group", list(GROUPS))
@pytest.mark.filterwarnings("ignore")  # some functions warn of their future
def test_results_and_gradients_along_two_axes_are_those_of_plain_tensors(procs: ProcMesh, group: str) -> None:
    wrong: list[str] = []
    for case in GROUPS[group]:
        for grid in grids_of(case):
            try:
                compare(run(case, plain_place(case, grid)), run(case, sharded_place(procs, case, grid)))
            except Exception as error:
                wrong.append(f"{case.name} {grid}: {' '.join(str(error).split())[:300]}")
    assert not wrong, "\n".join(wrong)
