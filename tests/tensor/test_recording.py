"""Recorded functions equal the same function called, and are refused where they would not; on ranks in this process."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monarch_kernel.features.tensors.messages import DefineBlock, RunOps
from monarch_kernel.tensor import TensorError, inspect, no_mesh, record, remote
from tests.tensor.in_process import InProcess


def blocks(mesh: InProcess) -> int:
    return len([message for message in mesh.messages if isinstance(message, DefineBlock)]) // 2


def on_ranks(mesh: InProcess, plain: nn.Module) -> nn.Module:
    there = copy.deepcopy(plain)
    for module in there.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(mesh.device.put(parameter)))
    return there


def plain_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any, Any], Any]:
    def step(x: Any, y: Any) -> Any:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_recorded_training_equals_plain_training(ranks: InProcess, momentum: float) -> None:
    plain = plain_model()
    model = on_ranks(ranks, plain)
    here = train_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=momentum))
    there = record(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)))
    torch.manual_seed(1)
    for _ in range(8):
        x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
        assert inspect(there(ranks.device.put(x), ranks.device.put(y))).item() == here(x, y).item()
    assert blocks(ranks) == 1
    for mine, theirs in zip(plain.parameters(), model.parameters()):
        assert torch.equal(mine, inspect(theirs))
        assert mine.grad is not None
        assert torch.equal(mine.grad, inspect(theirs.grad))


def test_a_recorded_call_is_one_record(mesh: InProcess) -> None:
    @record
    def many(x: Any) -> Any:
        for _ in range(50):
            x = x + 1
        return x * 2

    x = torch.zeros(2)
    for _ in range(3):
        result = many(x)
    before = len([each for each in mesh.messages if isinstance(each, RunOps)])
    op = mesh.stream.next_op
    result = many(result)
    assert mesh.stream.next_op == op + 1
    assert len([each for each in mesh.messages if isinstance(each, RunOps)]) == before + 2
    assert inspect(result).tolist() == [300, 300]
    assert many.describe().startswith("test_a_recorded_call_is_one_record.many: recorded; 52 operations")


def test_locals_are_dropped_at_their_last_use(mesh: InProcess) -> None:
    most = remote("tests.tensor.test_recording.table_size", propagate=lambda x: x)

    @record
    def many(x: Any) -> Any:
        for _ in range(20):
            x = most(x * 2)
        return x

    TABLES[:] = [mesh.interpreters[0].tensors]
    x = torch.ones(1)
    for _ in range(4):
        SIZES.clear()
        result = many(x)
    assert inspect(result).item() == 2.0**20
    assert max(SIZES) <= 4 + len(TABLES)  # the argument twice, the operand, the last result
    TABLES.clear()


TABLES: list[dict[int, Any]] = []
SIZES: list[int] = []


def table_size(x: Any) -> Any:
    """Note how many tensors the first rank has."""
    SIZES.append(len(TABLES[0]))
    return x + 0


def test_what_the_function_keeps_gets_new_values(mesh: InProcess) -> None:
    kept: dict[str, Any] = {"last": torch.zeros(())}

    @record
    def running(x: Any) -> Any:
        kept["last"] = kept["last"] * 0.5 + x
        return kept["last"] + 0

    expected, one = 0.0, torch.ones(())
    for _ in range(7):
        expected = expected * 0.5 + 1
        assert inspect(running(one)).item() == expected
        assert inspect(kept["last"]).item() == expected
    assert blocks(mesh) == 1
    kept.clear()


def test_numbers_that_differ_are_refused_with_their_line(mesh: InProcess) -> None:
    numbers = iter(range(100))

    @record
    def scaled(x: Any) -> Any:
        return x * float(next(numbers))

    x = torch.ones(1)
    for _ in range(4):
        scaled(x)
    with pytest.raises(TensorError) as caught:
        scaled(x)
    text = str(caught.value)
    assert "scaled can't be recorded, as its calls differ: operation 1, torch.mul in" in text
    assert "return x * float(next(numbers))" in text
    assert "has other numbers: [3.0] and [4.0]; make them arguments of the function, or tensors" in text


def test_each_kind_of_arguments_has_its_own_block(mesh: InProcess) -> None:
    dropout = nn.Dropout(0.0)

    @record
    def scaled(x: Any, factor: float) -> Any:
        return dropout(x * factor)

    x, y = torch.ones(1), torch.ones(2)
    for _ in range(3):
        assert inspect(scaled(x, 2.0)).tolist() == [2]
        assert inspect(scaled(x, 3.0)).tolist() == [3]
        assert inspect(scaled(y, 2.0)).tolist() == [2, 2]
    assert blocks(mesh) == 3
    dropout.eval()
    for _ in range(3):
        scaled(x, 2.0)
    assert blocks(mesh) == 4


def test_the_same_tensor_twice_is_another_kind(mesh: InProcess) -> None:
    @record
    def swap_add(x: Any, y: Any) -> Any:
        x.add_(1)
        return x - y

    x, y = torch.zeros(1), torch.zeros(1)
    assert [inspect(swap_add(x, y)).item() for _ in range(4)] == [1, 2, 3, 4]
    assert [inspect(swap_add(x, x)).item() for _ in range(4)] == [0, 0, 0, 0]


def test_a_failure_in_a_block_names_the_operation_and_loses_only_what_depends_on_it(mesh: InProcess) -> None:
    @record
    def both(x: Any) -> Any:
        return torch.linalg.cholesky(x), x * 2

    fine = torch.eye(2)
    for _ in range(3):
        both(fine)
    factor, doubled = both(fine - 2)
    assert inspect(doubled)[0, 0] == -2
    with pytest.raises(
        TensorError, match=r"(?s)torch.linalg.cholesky failed on rank.*return torch.linalg.cholesky\(x\)"
    ):
        inspect(factor)
    factor, _ = both(fine)
    assert inspect(factor)[0, 0] == 1


def test_a_failed_write_in_a_block_loses_what_shares_the_memory(mesh: InProcess) -> None:
    @record
    def write(x: Any, index: Any) -> Any:
        y = x + 0
        flat = y.view(-1)
        flat.index_fill_(0, index, 5.0)
        return y, flat + 1, x * 2

    x, index = torch.zeros(2, 2), torch.tensor([0])
    for _ in range(3):
        write(x, index)
    written, more, doubled = write(x, index + 9)
    assert inspect(doubled)[0, 0] == 0
    for lost in (written, more):
        with pytest.raises(TensorError, match=r"(?s)torch\.index_fill_ failed on rank.*flat\.index_fill_\(0, index"):
            inspect(lost)
    written, more, _ = write(x, index)
    assert (inspect(written)[0, 0], inspect(more)[0]) == (5, 6)
    ids = {each._part.id for each in (x, index, written, more)}
    del lost, doubled, _
    gc.collect()
    mesh.stream.free_dropped()
    assert not [id for id in mesh.interpreters[0].tensors if id < 0]
    assert ids <= set(mesh.interpreters[0].tensors)


def test_remote_functions_and_results_that_are_arguments(mesh: InProcess) -> None:
    double = remote(lambda x: x * 2)

    @record
    def step(x: Any) -> Any:
        return {"same": x, "doubled": double(x), "n": 3}

    for i in range(5):
        found = step(torch.full((1,), float(i)))
        assert (inspect(found["same"]).item(), inspect(found["doubled"]).item(), found["n"]) == (i, 2 * i, 3)
    assert blocks(mesh) == 1


def test_recorded_functions_can_call_each_other(mesh: InProcess) -> None:
    @record
    def inner(x: Any) -> Any:
        return x + 1

    @record
    def outer(x: Any) -> Any:
        return inner(x) * 2

    x = torch.ones(1)
    assert [inspect(outer(x)).item() for _ in range(4)] == [4] * 4
    assert [inspect(inner(x)).item() for _ in range(4)] == [2] * 4


def test_wrong_use(mesh: InProcess) -> None:
    x = torch.ones(1)
    with pytest.raises(TensorError, match=r"item\(\) waits for values of the ranks, and a recorded function can't"):
        record(lambda x: x.item())(x)
    with no_mesh.activate(), pytest.raises(TensorError, match="one of its arguments has to be a distributed tensor"):
        record(lambda: 1)()
    with pytest.raises(TensorError, match=r"move them to the ranks with mesh\.put\(x\)"):
        record(lambda x, y: x)(x, inspect(x))
    many = record(lambda x, n: x * n)
    for n in range(32):
        many(x, n)
    with pytest.raises(TensorError, match="called with 32 kinds of arguments"):
        many(x, 32)
    assert inspect(x + 1).item() == 2  # nothing is recorded any more
    assert record(many) is many
