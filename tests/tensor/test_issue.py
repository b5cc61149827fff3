"""Operations on distributed tensors, on ranks in this process: results, errors, mixing with plain tensors, and what is sent."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import math
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from monarch_kernel.features.tensors.messages import DefineOp, RunOps
from monarch_kernel.features.tensors.stream import MAX_OPS
from monarch_kernel.net.wire.codec import dump, load
from monarch_kernel.tensor import DistributedTensor, TensorError, fetch_shard, inspect, no_mesh, show
from monarch_kernel.tensor import device as device_module
from monarch_kernel.tensor.lines import MAX_WAITS
from monarch_kernel.tensor.on_mesh import activated, get_active_mesh
from monarch_kernel.tensor.propagation import info_of, propagate
from tests.tensor.in_process import InProcess


def count(session: InProcess, kind: type) -> int:
    return sum(isinstance(message, kind) for message in session.messages)


# -- where tensors are made


def test_new_tensors_are_distributed_in_the_context_only(one: InProcess) -> None:
    with activated(one.device):
        x = torch.ones(3, 4)
        with no_mesh.activate():
            assert type(torch.ones(1)) is torch.Tensor
            assert get_active_mesh() is None
        assert get_active_mesh() is one.mesh
    assert type(x) is DistributedTensor
    assert type(torch.ones(1)) is torch.Tensor
    assert get_active_mesh() is None
    assert inspect((x * 2).sum()).item() == 24


def test_the_innermost_context_counts(one: InProcess) -> None:
    other = InProcess(1)
    with activated(one.device):
        with activated(other.device):
            x = torch.zeros(1)
        y = torch.zeros(1)
    assert x.mesh is other.mesh
    assert y.mesh is one.mesh


def test_an_error_leaves_the_context(one: InProcess) -> None:
    with pytest.raises(ZeroDivisionError), activated(one.device):
        raise ZeroDivisionError
    assert get_active_mesh() is None
    assert type(torch.ones(1)) is torch.Tensor


def test_data_becomes_a_tensor_of_the_ranks_and_a_number_stays(active: InProcess) -> None:
    assert inspect(torch.tensor([1.0, 2.0])).tolist() == [1, 2]
    assert type(torch.tensor(2.0)) is torch.Tensor
    assert type(torch.empty(2, device="meta")) is torch.Tensor


# -- results


def test_tensors_can_be_unpickled_in_the_context(active: InProcess) -> None:
    with no_mesh.activate():
        plain = [torch.arange(100_000.0), torch.ones(2, 3).t()[1:], torch.ones(2, dtype=torch.complex64).conj()]
        data, saved = pickle.dumps(plain), io.BytesIO()
        torch.save(plain, saved)
    saved.seek(0)
    payload, frames = dump(plain)
    for loaded in (pickle.loads(data), torch.load(saved), load(payload, frames)):
        assert [type(each) for each in loaded] == [torch.Tensor] * 3
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(loaded, plain))
    assert torch.equal(inspect(torch.arange(100_000.0)), plain[0])


@pytest.mark.parametrize(
    "plain",
    [
        torch.tensor(2.5), torch.tensor([True, False]), torch.tensor([[-3], [4]], dtype=torch.int8), torch.empty(0, 3),
        torch.tensor([1.5, -2], dtype=torch.bfloat16), torch.tensor([1 + 2j, 3j]), torch.arange(6.0).view(2, 3).t(),
        torch.arange(6)[::2], torch.zeros(1024), torch.zeros(1025),
    ],
    ids=lambda plain: f"{str(plain.dtype)[6:]} {list(plain.shape)}",
)  # fmt: skip
def test_a_fetched_tensor_is_the_one_that_was_put(active: InProcess, plain: torch.Tensor) -> None:
    found = inspect(active.device.put(plain))
    assert (type(found), found.dtype, found.shape) == (torch.Tensor, plain.dtype, plain.shape)
    assert torch.equal(found, plain)
    found.zero_()  # its memory is not that of the message


def test_operations_follow_their_tensors(active: InProcess) -> None:
    x = torch.arange(6.0).view(2, 3)
    with no_mesh.activate():
        assert inspect(x @ x.T).tolist() == [[5, 14], [14, 50]]
        assert inspect(x[1]).tolist() == [3, 4, 5]


def test_results_of_several_tensors_keep_their_structure(active: InProcess) -> None:
    x = torch.arange(6.0)
    first, second = x.split(4)
    assert (inspect(first).tolist(), inspect(second).tolist()) == ([0, 1, 2, 3], [4, 5])
    values, indices = x.sort(descending=True)
    assert inspect({"v": values[:2], "i": [indices[:2]]}) == {"v": pytest.approx([5, 4]), "i": [pytest.approx([5, 4])]}


def test_numbers_travel_in_records_and_do_not_make_entries(active: InProcess) -> None:
    x = torch.zeros(2, dtype=torch.float64)
    for i in range(20):
        x.add_(0.5 * i)
        x = x + 2**40
    assert inspect(x).tolist() == [20 * 2.0**40 + 95] * 2
    assert count(active, DefineOp) == 3


def test_equal_numbers_of_other_kinds_differ(active: InProcess) -> None:
    assert [str(inspect(torch.full((1,), value))[0]) for value in (0.0, -0.0, True, 1, 1.0)] == [
        "tensor(0.)",
        "tensor(-0.)",
        "tensor(True)",
        "tensor(1)",
        "tensor(1.)",
    ]
    assert inspect(torch.full((1,), float("nan"))).isnan().all()


def test_a_number_of_this_process_mixes_in_with_its_dtype(active: InProcess) -> None:
    x = torch.ones(2, dtype=torch.int32)
    with no_mesh.activate():
        half, three = torch.tensor(0.5, dtype=torch.float64), torch.tensor(3)
    assert inspect(x * half).dtype == torch.float64
    assert inspect(x * three).tolist() == [3, 3]
    assert inspect(x * three).dtype == torch.int32


def test_the_default_dtype_of_the_program_counts(active: InProcess) -> None:
    x = torch.arange(3)
    assert inspect(x / 2).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert inspect(x / 2).dtype == inspect(torch.ones(1)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_many_operations_travel_in_few_messages() -> None:
    session = InProcess(1, is_held=True)
    with activated(session.device):
        x = torch.zeros(1)
        for _ in range(4 * MAX_OPS):
            x = x + 1
    assert inspect(x).item() == 4 * MAX_OPS
    assert count(session, RunOps) == 5


# -- mutation and views


def test_writes_through_views_reach_the_base(active: InProcess) -> None:
    x = torch.zeros(2, 3)
    x.view(6)[4] = 7
    x[0].add_(1)
    assert inspect(x).tolist() == [[1, 1, 1], [0, 7, 0]]


def test_an_operation_in_place_returns_its_argument(active: InProcess) -> None:
    x = torch.zeros(2)
    assert x.add_(1) is x
    out = torch.empty(2)
    assert torch.add(x, x, out=out) is out
    assert inspect(out).tolist() == [2, 2]


def test_an_operation_in_place_may_change_the_shape(active: InProcess) -> None:
    x = torch.arange(6.0).view(2, 3)
    assert x.t_() is x
    assert (x.shape, x.stride()) == ((3, 2), (1, 3))
    assert x.unsqueeze_(0).shape == (1, 3, 2)
    assert inspect(x.squeeze_() * 1).tolist() == [[0, 3], [1, 4], [2, 5]]
    part = torch.arange(6.0)[2:].view(2, 2).transpose_(0, 1)
    assert part.storage_offset() == 2
    assert inspect(part[0]).tolist() == [2, 4]
    w = torch.ones(3, requires_grad=True)
    (torch.ones(3, 2).t() @ w).unsqueeze(0).squeeze_(0).sum().backward()
    (w @ torch.ones(3, 2)).sum().backward()  # it squeezes its result
    assert inspect(w.grad).tolist() == [4, 4, 4]


def test_a_change_of_size_in_place_is_refused(active: InProcess) -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(TensorError, match=r"would change the size .* from \(2, 3\) to \(7,\)"):
        x.resize_(7)
    assert x.shape == (2, 3)


def test_statistics_of_batch_norm_change_and_the_result_is_new(active: InProcess) -> None:
    norm, x = nn.BatchNorm1d(3), torch.arange(6.0).view(2, 3)
    assert inspect(norm(x)).shape == (2, 3)
    assert inspect(norm.running_mean).tolist() == pytest.approx([0.15, 0.25, 0.35])


def test_data_of_a_tensor_can_be_replaced(active: InProcess) -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.data = torch.ones(2)
    assert inspect(weight).tolist() == [1, 1]
    assert weight.requires_grad
    weight.data = torch.arange(6.0).view(2, 3).t()[:, 1]
    assert (weight.shape, weight.stride(), inspect(weight).tolist()) == ((3,), (1,), [3, 4, 5])
    (weight * 2).sum().backward()
    assert weight.grad is not None
    assert inspect(weight.grad).tolist() == [2, 2, 2]
    with no_mesh.activate(), pytest.raises(TensorError, match=r"mesh\.put"):
        weight.data = torch.ones(2)


def test_a_module_changes_its_dtype_and_takes_parameters_of_a_vector(active: InProcess) -> None:
    linear = nn.Linear(3, 2)
    weight = linear.weight
    linear.half()
    assert linear.weight is weight
    assert inspect(linear(torch.ones(1, 3, dtype=torch.float16))).dtype == torch.float16
    linear.float()
    vector = nn.utils.parameters_to_vector(linear.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0 + 2, linear.parameters())
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    linear(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert inspect(linear.weight).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert inspect(linear.bias).tolist() == [1, 1]


def test_views_of_tensors_from_outside_work_in_inference_mode(active: InProcess) -> None:
    x = torch.arange(6.0).view(2, 3)
    model = nn.Linear(3, 1)
    with torch.inference_mode():
        assert inspect(x[1:] * 2).tolist() == [[6, 8, 10]]
        assert [inspect(row).tolist() for row in x] == [[0, 1, 2], [3, 4, 5]]
        assert inspect(x.split(2, dim=1)[1]).tolist() == [[2], [5]]
        y = model(x)
        assert not y.requires_grad
    assert inspect(y.t()[:, :1]).shape == (1, 1)


def test_views_that_conjugate_and_negate_are_views(active: InProcess) -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    conjugate = x.conj()
    assert conjugate.is_conj()
    assert inspect(conjugate.imag).tolist() == [-2, 1]
    conjugate.mul_(1j)
    assert inspect(x).tolist() == [2 - 1j, -1 - 3j]
    assert inspect(conjugate @ x).item() == 15
    assert inspect(torch.fft.hfft(x.real)).shape == (2,)


# -- autograd


def test_gradients_are_those_of_plain_tensors(active: InProcess) -> None:
    p = torch.ones(4, requires_grad=True)
    q = p * 2
    q.view(2, 2).mul_(3)
    q.sum().backward()
    assert p.grad is not None
    assert inspect(p.grad).tolist() == [6, 6, 6, 6]


def test_a_stale_saved_tensor_is_detected(active: InProcess) -> None:
    p = torch.ones(2, requires_grad=True)
    q = p.exp()
    q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()


# -- numbers and shapes that depend on values


def test_a_number_is_fetched(active: InProcess) -> None:
    x = torch.arange(4.0)
    assert (x.sum().item(), int(x[2]), float(x[1]), bool(x[0] == 0), torch.equal(x, x + 0)) == (6, 2, 1, True, True)
    assert f"{x.mean():.2f}" == "1.50"
    del x
    assert_nothing_is_held(active)


def test_ranks_must_agree_on_a_number(ranks: InProcess) -> None:
    with pytest.raises(TensorError, match=r"item\(\) returns another value on other ranks of t: \[0\] 0; \[1\] 1\n"):
        ranks.index().item()
    assert (ranks.index() * float("nan")).isnan().item()
    assert math.isnan((ranks.index() * float("nan")).item())


def test_shapes_that_depend_on_values_are_fetched(active: InProcess) -> None:
    x = torch.tensor([3.0, 0.0, 3.0])
    assert x.nonzero().shape == (2, 1)
    assert inspect(x[x > 0]).tolist() == [3, 3]
    values, counts = x.unique(return_counts=True)
    assert inspect([values, counts]) == [pytest.approx([0, 3]), pytest.approx([1, 2])]


def test_ranks_must_agree_on_a_shape(ranks: InProcess) -> None:
    match = r"torch\.nonzero returns another shape on other ranks of t: \[0\] \[\(0, 1\)\]; \[1\] \[\(1, 1\)\]"
    with pytest.raises(TensorError, match=match):
        ranks.index().view(1).nonzero()


# -- errors at the user's line, before anything is sent


def test_a_wrong_shape_raises_at_once_and_sends_nothing(one: InProcess) -> None:
    with activated(one.device):
        x = torch.ones(3, 4)
    before = len(one.messages)
    with pytest.raises(TensorError, match=r"must have same reduction dim, .*\n  of \(3, 4\) float32, \(3, 4\) float32"):
        x @ x
    with pytest.raises(TensorError, match="broadcastable"):
        x + x[:, :3]  # the view is sent
    assert count(one, RunOps) - sum(isinstance(message, RunOps) for message in one.messages[:before]) == 1


def test_errors_have_the_types_of_plain_tensors(active: InProcess) -> None:
    x = torch.ones(3)
    with pytest.raises(IndexError):
        x[5]
    with pytest.raises(RuntimeError):
        x.view(2)


@pytest.mark.parametrize(
    "use", [lambda x, y: x + y, lambda x, y: torch.stack([x, y]), lambda x, y: torch.add(x, other=y)]
)
def test_a_plain_tensor_is_refused(active: InProcess, use: object) -> None:
    x = torch.ones(2)
    with no_mesh.activate():
        y = torch.ones(2)
        with pytest.raises(TensorError, match=r"a tensor of this process, \(2,\) float32 on cpu, .* mesh\.put\(x\)"):
            use(x, y)  # type: ignore[operator]


def test_a_write_to_a_plain_tensor_names_the_way_out(one: InProcess) -> None:
    x = one.device.put(torch.ones(2))
    with pytest.raises(TensorError, match=r"write fetch_shard\(x\)\.result\(\) to it, or, .* in mesh\.activate\(\)"):
        torch.zeros(2).copy_(x)
    with pytest.raises(TensorError, match=r"in mesh\.activate\(\)"):
        nn.utils.rnn.pad_sequence([x, x[:1]])
    with activated(one.device):
        assert inspect(nn.utils.rnn.pad_sequence([x, x[:1]])).tolist() == [[1, 1], [1, 0]]


def test_an_operation_that_torch_compile_traces_names_the_way_out(one: InProcess) -> None:
    def traced(*args: Any) -> Any:
        raise AssertionError("Please convert all Tensors to FakeTensors first or instantiate FakeTensorMode with ...")

    info = dataclasses.replace(info_of(torch.ops.aten.relu.default), op=traced)
    with pytest.raises(TensorError, match=r"torch\.compile can't compile .* use record\(function\), or"):
        propagate(info, (one.device.put(torch.ones(2)),), {})


def test_plain_tensors_that_torch_makes_for_an_operation_are_put(active: InProcess) -> None:
    x = torch.arange(6.0).view(2, 3)
    with no_mesh.activate():
        assert inspect(x[[1, 0, 1], [0, 1, 2]]).tolist() == [3, 1, 5]
        assert inspect(x[:, np.array([2, 0])]).tolist() == [[2, 0], [5, 3]]
        assert inspect(x.quantile(0.5)).item() == 2.5
        assert torch.linalg.matrix_rank(x).item() == 2
        x[[0]] = 7.0
        assert inspect(x[0]).tolist() == [7, 7, 7]


def test_tensors_of_two_meshes_are_refused(one: InProcess) -> None:
    other = InProcess(2)
    with activated(one.device):
        x = torch.ones(2)
    with activated(other.device):
        y = torch.ones(2)
    with pytest.raises(TensorError, match=r"t \{'r': 1\} and t \{'r': 2\}: take the part on the smaller mesh"):
        x + y


def test_every_place_of_a_second_tensor_refuses_another_mesh(one: InProcess) -> None:
    other = InProcess(2)
    with activated(one.device):
        x = torch.ones(2, requires_grad=True)
    with activated(other.device):
        y, index, mask = torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    detached = x.detach()
    uses: list[Callable[[], object]] = [
        lambda: (x * 2).backward(y),
        lambda: setattr(x, "grad", y),
        lambda: setattr(x, "data", y),
        lambda: torch.add(detached, 1, out=y),
        lambda: detached.add_(y),
        lambda: detached.copy_(y),
        lambda: detached[index],
        lambda: detached[mask],
        lambda: detached.__setitem__(0, y[0]),
        lambda: torch.where(mask, detached, 0.0),
        lambda: torch.cat([detached, y]),
        lambda: torch.stack([detached, y]),
        lambda: torch._foreach_add([detached, detached], [y, y]),
        lambda: detached.clamp(max=y),
    ]
    for use in uses:
        with pytest.raises(TensorError, match="two meshes|of one mesh"):
            use()
    assert x.grad is None


def test_autograd_knows_the_writes_of_operations_on_lists(active: InProcess) -> None:
    x = torch.full((2, 3), 2.0, requires_grad=True)
    for _ in range(2):  # the second time, the operation is known
        view = x.clone().t()
        torch._foreach_mul_([view], 3.0)
        (gradient,) = torch.autograd.grad(view.sum(), x)
        assert inspect(gradient).tolist() == [[3.0] * 3] * 2
        saved = x.sigmoid()
        torch._foreach_zero_([saved])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()


def test_a_gradient_of_this_process_is_a_number_or_refused(active: InProcess) -> None:
    x = torch.ones(2, requires_grad=True)
    with no_mesh.activate():
        number, plain = torch.tensor(3.0), torch.ones(2)
    (x * 2).sum().backward(number)
    assert isinstance(x.grad, DistributedTensor)
    assert inspect(x.grad).tolist() == [6, 6]
    for use in (lambda: (x * 2).backward(plain), lambda: setattr(x, "grad", plain)):
        with pytest.raises(TensorError, match=r"can't take a plain tensor: .*mesh\.put\(x\)"):
            use()
    x.grad = None
    assert x.grad is None
    x.grad = x.detach() + 4
    del x.grad
    assert x.grad is None


def test_a_line_that_waits_very_often_gets_a_hint_once(active: InProcess) -> None:
    x = torch.ones(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2 * MAX_WAITS):
            x.sum().item()
        for _ in range(MAX_WAITS - 1):
            x.sum().item()
    (hint,) = caught
    assert re.search(
        rf"item\(\) has waited {MAX_WAITS} times for the ranks in .*test_issue.py, line \d+", str(hint.message)
    )


def test_what_needs_memory_here_is_refused_with_the_way_out(active: InProcess) -> None:
    x = torch.ones(2)
    for use in (x.numpy, x.tolist, lambda: np.asarray(x), x.data_ptr, lambda: pickle.dumps(x)):
        with pytest.raises(TensorError, match="on the ranks|fetch_shard"):
            use()
    with pytest.raises(TensorError, match="a generator of this process"):
        torch.rand(2, generator=torch.Generator())
    with pytest.raises(TensorError, match="strided"):
        x.to_sparse()
    with pytest.raises(TensorError, match="leave the device out"):
        x.to("meta")
    with pytest.raises(TypeError, match=r"fetch_shard\(\) takes distributed tensors, not a int"):
        fetch_shard(1)


@pytest.mark.parametrize(
    ("use", "way_out"),
    [
        (lambda x: x.untyped_storage(), "no storage here.*fetch_shard"),
        (lambda x: x.storage(), "no storage here"),
        (torch.from_dlpack, "no memory to share by DLPack here"),
        (np.from_dlpack, "DLPack"),
        (lambda x: x.share_memory_(), "no memory to share here"),
        (lambda x: x.pin_memory(), "no memory to pin here"),
        (lambda x: x.to_mkldnn(), "makes a tensor without strides"),
        (lambda x: x.apply_(float), r"use remote\(function\)"),
        (lambda x: x.map_(x, max), r"use remote\(function\)"),
        (lambda x: x.cuda(), "can't move to cuda: it is on the CPU of its ranks"),
        (lambda x: x.to("cuda:1"), "can't move to cuda:1"),
        (lambda x: x + np.ones(2), r"move it to the ranks with mesh\.put\(array\)"),
        (lambda x: np.ones(2) + x, r"move it to the ranks with mesh\.put\(array\)"),
        (np.sin, r"np\.sin needs the values.*fetch_shard"),
    ],
)
def test_what_would_read_memory_here_is_refused_and_ends_no_process(active: InProcess, use: Any, way_out: str) -> None:
    with pytest.raises(TensorError, match=way_out):
        use(torch.ones(2))


def test_numbers_of_numpy_are_numbers_on_both_sides(active: InProcess) -> None:
    x = torch.ones(2)
    assert inspect(np.float32(2) * x).tolist() == [2, 2]
    assert inspect(np.float64(3) - x).tolist() == [2, 2]
    assert inspect(x / np.int64(2)).tolist() == [0.5, 0.5]
    assert inspect(np.array(2.0) * x).tolist() == [2, 2]
    assert (x * np.float64(2)).dtype == torch.float32


def test_a_conversion_goes_by_dtype_and_by_another_tensor(active: InProcess) -> None:
    x = torch.ones(2)
    assert x.to("cpu") is x
    assert x.to(torch.float64).dtype == torch.float64
    assert x.to(x.int()).dtype == torch.int32
    assert x.to("cpu", torch.int64, copy=True).dtype == torch.int64


def test_only_tensors_of_ranks_are_shown(active: InProcess) -> None:
    with pytest.raises(TypeError, match=r"show\(\) takes distributed tensors, not a int"):
        show(3)  # type: ignore[arg-type]


def test_a_copy_is_a_separate_tensor(active: InProcess) -> None:
    linear = nn.Linear(2, 2)
    same = copy.deepcopy(linear)
    with torch.no_grad():
        linear.weight.zero_()
    assert inspect(same.weight).abs().sum() > 0
    assert isinstance(same.weight, nn.Parameter)
    assert same.weight.requires_grad


def test_a_shallow_copy_has_the_same_memory(active: InProcess) -> None:
    x = nn.Parameter(torch.ones(2))
    other = copy.copy(x)
    assert other is not x
    assert isinstance(other, nn.Parameter)
    with torch.no_grad():
        other.add_(1)
    assert inspect(x).tolist() == [2, 2]
    assert inspect(copy.copy({"x": x})["x"]).tolist() == [2, 2]


# -- failures on ranks


def test_a_failure_names_its_line_and_loses_only_what_depends_on_it(active: InProcess) -> None:
    x = torch.ones(2, 2)
    lost = torch.linalg.cholesky(-x) * 2
    fine = x + 1
    lost_too = fine.clone()
    lost_too.mul_(lost)
    with pytest.raises(TensorError) as caught:
        inspect(lost)
    text = str(caught.value)
    assert text.startswith("torch.linalg.cholesky failed on rank [0] of t; issued in ")
    assert "test_issue.py, line" in text
    assert "lost = torch.linalg.cholesky(-x) * 2" in text
    assert "not positive-definite" in text
    assert list(caught.value.reports) == [0]
    with pytest.raises(TensorError, match="cholesky failed"):
        inspect(lost_too)
    with pytest.raises(TensorError, match="cholesky failed"):
        lost.sum().item()
    assert inspect(fine).tolist() == [[2, 2], [2, 2]]


def test_a_failed_write_poisons_all_views(active: InProcess) -> None:
    x = torch.ones(4)
    view, other = x[:2], torch.ones(4)
    x.mul_(torch.linalg.inv(torch.zeros(4, 4))[0])
    for lost in (x, view):
        with pytest.raises(TensorError, match=r"torch\.linalg\.inv failed"):
            inspect(lost)
    assert inspect(other).tolist() == [1, 1, 1, 1]


# -- lifetime


def assert_nothing_is_held(session: InProcess) -> None:
    gc.collect()
    session.stream.free_dropped()
    session.go()
    assert [interpreter.memory() for interpreter in session.interpreters.values()] == [(0, 0)] * len(
        session.interpreters
    )


def test_ranks_drop_what_python_drops(one: InProcess) -> None:
    with activated(one.device):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(16, 4)
    for _ in range(3):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.item() >= 0
    assert one.interpreters[0].memory().tensors < 40
    del model, optimizer, x, loss
    assert_nothing_is_held(one)


def test_a_tensor_that_is_dropped_in_an_open_batch_is_used_first() -> None:
    session = InProcess(1, is_held=True)
    with activated(session.device):
        x = torch.ones(3)
        y = x + 1
        del x
        z = y * 2
        del y
    assert inspect(z).tolist() == [4, 4, 4]
    del z
    assert_nothing_is_held(session)


def test_entries_are_forgotten_when_there_are_too_many(active: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "MAX_ENTRIES", 5)
    x = torch.zeros(8)
    for start in range(20):
        x = x + torch.full((8,), start)
        assert x[start % 8 :].shape == (8 - start % 8,)
    assert inspect(x).tolist() == [190.0] * 8
    assert len(active.device.entries) <= 5


# -- what a person sees


def test_the_repr_says_where_a_tensor_comes_from_without_waiting(one: InProcess) -> None:
    with activated(one.device):
        x = torch.rand(3, 4, requires_grad=True)
    before = len(one.messages)
    first, second = repr(x).splitlines()
    assert first == (
        "DistributedTensor(shape=(3, 4), dtype=float32, device=cpu, mesh=t {'r': 1}, one per rank, requires_grad=True)"
    )
    assert second.startswith("  made by torch.rand in ")
    assert "x = torch.rand(3, 4, requires_grad=True); values: show(x) or fetch_shard(x).result()" in second
    assert len(one.messages) == before
    assert str(x) == f"{x}" == repr(x)
