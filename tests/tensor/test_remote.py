"""Remote functions: results, how their shapes are known, errors and lifetime; on ranks in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monarch_kernel.features.tensors.messages import DefineCall, DescribeResult
from monarch_kernel.features.tensors.records import Poison
from monarch_kernel.tensor import TensorError, call_on_shard_and_fetch, inspect, no_mesh, remote
from monarch_kernel.tensor.reading import values
from tests.tensor.in_process import InProcess


def sent(mesh: InProcess, kind: type) -> int:
    return len([message for message in mesh.messages if isinstance(message, kind)]) // 2  # on two ranks


def scaled(x: Any, factor: float = 2.0) -> Any:
    return x * factor


def test_a_function_runs_on_the_parts_of_each_rank(mesh: InProcess) -> None:
    double = remote(scaled)
    x = mesh.index() + torch.ones(3)
    assert [inspect(double(x), r=rank).tolist() for rank in (0, 1)] == [[2, 2, 2], [4, 4, 4]]
    assert inspect(double(x, factor=10.0) + 1).tolist() == [11, 11, 11]
    assert repr(double) == "<remote scaled>"
    assert remote(double) is double


def test_cached_shapes_wait_once_per_shape_and_arguments(mesh: InProcess) -> None:
    double = remote(scaled, propagate="cached")
    x = torch.ones(3)
    results = [double(x) for _ in range(4)]
    assert sent(mesh, DescribeResult) == 1
    assert sent(mesh, DefineCall) == 2  # with unknown and with known layouts
    double(torch.ones(4))
    double(x, 3.0)
    assert sent(mesh, DescribeResult) == 3
    assert [inspect(each).tolist() for each in results] == [[2, 2, 2]] * 4


def test_a_propagating_function_never_waits(mesh: InProcess) -> None:
    stack = remote(lambda x, n: torch.stack([x] * n), propagate=lambda x, n: x.new_empty((n, *x.shape)))
    made = stack(torch.ones(2), 3)
    assert made.shape == (3, 2)
    assert sent(mesh, DescribeResult) == 0
    assert inspect(made).sum() == 6


def test_mocked_and_inspect(mesh: InProcess) -> None:
    x = torch.ones(3)
    assert remote(scaled, propagate="mocked")(x).shape == (3,)
    assert sent(mesh, DescribeResult) == 0
    waits = remote(scaled, propagate="inspect")
    assert [inspect(waits(x)).tolist() for _ in range(2)] == [[2, 2, 2]] * 2
    assert sent(mesh, DescribeResult) == 2


def test_nested_results_have_tensors_and_constants(mesh: InProcess) -> None:
    @remote
    def split(x: Any) -> Any:
        return {"halves": list(x.chunk(2)), "n": len(x), "t": x.view(2, 2).t()}

    for _ in range(2):
        found = split(torch.arange(4))
        assert found["n"] == 4
        assert [inspect(each).tolist() for each in found["halves"]] == [[0, 1], [2, 3]]
        assert inspect(found["t"] + 0).tolist() == [[0, 2], [1, 3]]
        assert found["t"].is_contiguous()


def test_a_result_of_other_strides_is_copied_and_of_another_shape_is_an_error(mesh: InProcess) -> None:
    x = torch.arange(4).view(2, 2)
    turned = remote(lambda x: x.t(), propagate=lambda x: x)(x)
    assert inspect(turned.view(4)).tolist() == [0, 2, 1, 3]
    wrong = remote(lambda x: x[0], propagate=lambda x: x)(x)
    with pytest.raises(TensorError, match=r"has returned tensors \[\(\(2,\), 'int64'\)\], but its propagate="):
        inspect(wrong)


def test_a_failure_is_raised_where_the_call_waits_or_where_the_result_is_read(mesh: InProcess) -> None:
    def fail(x: Any) -> Any:
        raise ValueError("nope")

    x = torch.ones(2)
    lost = remote(fail, propagate=lambda x: x)(x)
    with pytest.raises(
        TensorError, match=r"(?s)fail failed on rank \[0-1\] of t; issued in .*ValueError: nope"
    ) as caught:
        values(mesh.mesh, lost)
    assert caught.value.reports[0].user_frame is not None
    with pytest.raises(TensorError, match="ValueError: nope"):
        remote(fail)(x)
    with pytest.raises(TensorError, match="ValueError: nope"):
        inspect(remote(scaled, propagate=lambda x: x)(lost))
    assert inspect(x).sum() == 2


def test_a_function_without_tensors_in_its_result_waits(mesh: InProcess) -> None:
    def check(x: Any) -> str:
        assert x.sum() > 0, "not positive"
        return "fine"

    checked = remote(check, propagate=lambda x: "unknown")
    assert checked(torch.ones(2)) == "fine"
    with pytest.raises(TensorError, match="AssertionError: not positive"):
        checked(torch.zeros(2))


def test_names_that_are_not_defined_here_are_variables_of_the_rank(mesh: InProcess) -> None:
    source: dict[str, Any] = {"__name__": "__main__"}
    exec("def plus_rank(x):\n    return x + rank", source)
    add = remote(source["plus_rank"])
    assert [inspect(add(torch.zeros(())), r=rank).item() for rank in (0, 1)] == [0, 1]
    mesh.namespaces[1]["rank"] = 7
    assert inspect(add(torch.zeros(())), r=1).item() == 7


def test_values_of_all_ranks_or_one(mesh: InProcess) -> None:
    x = mesh.index()
    describe = remote(lambda x, what: {what: x, "n": int(x)})
    assert [each["n"] for each in describe.call(x, "a").result().values()] == [0, 1]
    assert call_on_shard_and_fetch(describe, x, "b", shard={"r": 1}).result() == {"b": torch.tensor(1), "n": 1}
    assert call_on_shard_and_fetch("operator.neg", x, shard={"r": 1}).result().item() == -1


def test_arguments_that_refer_to_distributed_tensors_are_resolved_after_earlier_operations(mesh: InProcess) -> None:
    many = remote(lambda values: sum(values), propagate="cached")
    x = torch.ones(2)
    assert inspect(many([x, x * 2, 3])).tolist() == [6, 6]


def test_wrong_use(mesh: InProcess) -> None:
    with pytest.raises(TypeError, match=r"remote\(\) takes a function, or its name"):
        remote("nodots")
    with pytest.raises(ValueError, match="propagate is a function or one of 'cached', 'inspect', 'mocked'"):
        remote(scaled, propagate="often")
    with pytest.raises(ValueError, match="runs the function here"):
        remote("operator.neg", propagate="mocked")
    with no_mesh.activate(), pytest.raises(TensorError, match="needs a mesh"):
        remote(scaled)(2)
    with pytest.raises(TensorError, match="ModuleNotFoundError"):
        remote("no_such_module.f")(torch.ones(1))
    with pytest.raises(Exception, match="the arguments of scaled can't be pickled"):
        remote(scaled)(torch.ones(1), iter([1]).__next__.__self__ and (i for i in ()))
    with pytest.raises(TensorError, match="more than 64 need propagate=function"):
        remote(lambda x: [x] * 65)(torch.ones(1))


def test_gradients_stop_at_a_function_that_may_use_autograd_inside(mesh: InProcess) -> None:
    @remote
    def gradient(x: Any) -> Any:
        x = x.clone().requires_grad_()
        (x * x).sum().backward()
        return x.grad

    made = gradient(torch.ones(2, requires_grad=True))
    assert not made.requires_grad
    assert inspect(made).tolist() == [2, 2]


def test_the_poison_of_one_rank_reaches_no_function(mesh: InProcess) -> None:
    calls = []
    matrix = torch.eye(2) * (0.5 - mesh.index())
    factor = torch.linalg.cholesky(matrix)
    made = remote(lambda x: calls.append(1) or x, propagate=lambda x: x)(factor)
    assert inspect(made, r=0).shape == (2, 2)
    assert isinstance(mesh.interpreters[1].tensors[made._part.id], Poison)
