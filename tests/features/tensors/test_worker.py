"""A rank does operations in order, poisons what a failure loses, and drops tensors; in this process."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from monarch_kernel.features.tensors.messages import DefineOp, RunOps
from monarch_kernel.features.tensors.parts import layout_of
from monarch_kernel.features.tensors.records import FORGET, FREE, MemoryUse, Poison, count_holes
from monarch_kernel.features.tensors.worker import Interpreter, rank_index, summary

TENSOR, INT, FLOAT = ["tensor"], ["int"], ["float"]


def define(
    interpreter: Interpreter,
    entry: int,
    name: str,
    *args: list[Any],
    returns: list[bool] | None = None,
    changed: tuple[int, ...] = (),
    default_dtype: str = "float32",
    **kwargs: list[Any],
) -> None:
    counts = count_holes([*args, *kwargs.values()])
    interpreter.define(DefineOp(name, 0, entry, list(args), kwargs, counts, returns, list(changed), default_dtype))


def run(interpreter: Interpreter, *words: int, floats: tuple[float, ...] = (), first: int = 0) -> int:
    return interpreter.run(RunOps(array("q", words).tobytes(), array("d", floats).tobytes(), first, 0, False))


@pytest.fixture
def interpreter() -> Interpreter:
    """A rank with tensors 0 (of ones) and 1 (of zeros, which has no inverse)."""
    made = Interpreter({"monarch::own": lambda tensor: tensor})
    made.put(0, torch.ones(2, 2))
    made.put(1, torch.zeros(2, 2))
    return made


def poison_of(interpreter: Interpreter, id: int) -> Poison:
    found = interpreter.tensors[id]
    assert isinstance(found, Poison)
    return found


def test_records_have_tensors_integers_and_floats_in_order(interpreter: Interpreter) -> None:
    define(interpreter, 5, "aten::add.Tensor", TENSOR, TENSOR, alpha=FLOAT)
    define(interpreter, 6, "aten::mul.Tensor", TENSOR, INT)
    define(interpreter, 7, "aten::addmm.default", TENSOR, TENSOR, TENSOR, beta=INT, alpha=FLOAT)
    assert run(interpreter, 5, 10, 0, 0, 6, 11, 10, -4, 7, 12, 0, 0, 0, 2, floats=(0.5, 3.0)) == 3
    assert [interpreter.tensors[id][0, 0].item() for id in (10, 11, 12)] == [1.5, -6, 8]


def test_templates_of_other_arguments(interpreter: Interpreter) -> None:
    size = ["list", [["value", 2], ["value", 3]]]
    define(interpreter, 0, "aten::mul.Tensor", TENSOR, ["scalar", 1.5, "float64"])
    define(interpreter, 1, "aten::index.Tensor", TENSOR, ["list", [["value", None], TENSOR]])
    define(
        interpreter, 2, "aten::empty.memory_format", size, layout=["layout", "strided"], device=["device", "cpu"],
        memory_format=["memory_format", "contiguous_format"],
    )  # fmt: skip
    define(interpreter, 3, "aten::mul.Tensor", TENSOR, ["complex", 0.0, 2.0])
    interpreter.put(2, torch.tensor([1]))
    run(interpreter, 0, 10, 0, 1, 11, 0, 2, 2, 12, 3, 13, 0)
    assert interpreter.tensors[10][0, 0] == 1.5
    assert interpreter.tensors[11].shape == (2, 1)
    assert interpreter.tensors[12].shape == (2, 3)
    assert interpreter.tensors[13][0, 0] == 2j
    with pytest.raises(ValueError, match="unknown kind"):
        define(interpreter, 4, "aten::mul.Tensor", TENSOR, ["pickle", "x"])


def test_a_failure_poisons_its_result_and_what_takes_it(interpreter: Interpreter) -> None:
    define(interpreter, 0, "aten::mm.default", TENSOR, TENSOR)
    define(interpreter, 1, "aten::add.Tensor", TENSOR, TENSOR)
    interpreter.put(2, torch.ones(3, 3))
    assert run(interpreter, 0, 10, 0, 2, 1, 11, 10, 0, 1, 12, 0, 0, first=40) == 3
    assert poison_of(interpreter, 10).op == poison_of(interpreter, 11).op == 40
    assert "mat1 and mat2 shapes cannot be multiplied" in poison_of(interpreter, 11).failure.message
    assert interpreter.tensors[12].sum() == 8


def test_the_numbers_of_a_poisoned_operation_are_skipped(interpreter: Interpreter) -> None:
    define(interpreter, 0, "aten::mm.default", TENSOR, TENSOR)
    define(interpreter, 1, "aten::add.Tensor", TENSOR, TENSOR, alpha=FLOAT)
    interpreter.put(2, torch.ones(3, 3))
    run(interpreter, 0, 10, 0, 2, 1, 11, 10, 0, 1, 12, 0, 0, floats=(7.0, 1.0))
    assert interpreter.tensors[12].sum() == 8


def test_a_failed_write_poisons_all_that_share_memory(interpreter: Interpreter) -> None:
    define(interpreter, 0, "aten::view.default", TENSOR, ["list", [["value", 4]]])
    define(interpreter, 1, "aten::mm.default", TENSOR, TENSOR)
    define(interpreter, 2, "aten::add_.Tensor", TENSOR, TENSOR, returns=[], changed=(0,))
    interpreter.put(2, torch.ones(3, 3))
    run(interpreter, 0, 10, 0, 1, 11, 0, 2, 2, 12, 10, 11)
    assert {id for id, each in interpreter.tensors.items() if isinstance(each, Poison)} == {0, 10, 11}


def test_a_failed_check_poisons_all_results_of_what_it_checks(interpreter: Interpreter) -> None:
    define(interpreter, 0, "aten::linalg_inv_ex.default", TENSOR, returns=[True, True], check_errors=["value", False])
    define(
        interpreter, 1, "aten::_linalg_check_errors.default", TENSOR, ["value", "linalg.inv"], returns=[],
        is_matrix=["value", True],
    )  # fmt: skip
    interpreter.put(2, torch.eye(2))
    run(interpreter, 0, 10, 1, 1, 12, 11, 0, 13, 2, 1, 15, 14)
    assert poison_of(interpreter, 10).op == poison_of(interpreter, 11).op == 1
    assert "singular" in poison_of(interpreter, 10).failure.message
    assert not isinstance(interpreter.tensors[13], Poison)


def test_an_unknown_operation_fails_where_it_is_used(interpreter: Interpreter) -> None:
    define(interpreter, 0, "nowhere::op.default", TENSOR)
    run(interpreter, 0, 10, 0)
    assert "nowhere::op.default is not known on this rank" in poison_of(interpreter, 10).failure.message


def test_own_operations_and_default_dtypes(interpreter: Interpreter) -> None:
    define(interpreter, 0, "monarch::own", TENSOR)
    define(interpreter, 1, "aten::ones.default", ["list", [["value", 1]]], default_dtype="float64")
    run(interpreter, 0, 10, 0, 1, 11)
    assert interpreter.tensors[10] is interpreter.tensors[0]
    assert interpreter.tensors[11].dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_tensors_and_entries_are_dropped(interpreter: Interpreter) -> None:
    define(interpreter, 0, "aten::view.default", TENSOR, ["list", [["value", 4]]])
    run(interpreter, 0, 10, 0)
    assert interpreter.memory() == MemoryUse(3, 32)
    assert run(interpreter, FREE, 2, 0, 99, FORGET, FREE, 1, 1) == 0
    assert interpreter.memory() == MemoryUse(1, 16)
    with pytest.raises(KeyError):
        run(interpreter, 0, 11, 10)
    with pytest.raises(ValueError, match="unknown record -7"):
        run(interpreter, -7)


def test_descriptions_of_tensors() -> None:
    assert layout_of(torch.ones(2, 3).t()[1:]) == ((2, 2), (1, 3), 1, "float32", "cpu", ())
    assert rank_index(7, [3, 7], [0, 1]).item() == 1
    assert summary(torch.ones(2)) == "tensor([1., 1.])"
    assert summary(torch.arange(101)) == "shape (101,), int64, min 0, mean 50, max 100"
    assert summary(torch.full((200,), float("inf"))) == "shape (200,), float32, 200 of 200 elements are not finite"
    assert summary(torch.zeros(200, dtype=torch.complex64)) == "shape (200,), complex64"
