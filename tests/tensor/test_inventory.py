"""What a program holds, by line and by name; on a rank in this process."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from monarch_kernel.errors import Failure, SupervisionError
from monarch_kernel.features.tensors.messages import ReportOps
from monarch_kernel.net.wire.codec import join, split
from monarch_kernel.tensor import TensorError, inspect
from monarch_kernel.tensor.inventory import holdings_of, names_of
from tests.tensor.in_process import InProcess


def test_tensors_are_listed_by_line_and_views_have_no_memory(active: InProcess) -> None:
    large = torch.zeros(1000)
    small = [torch.ones(2) for _ in range(3)]
    view = large.view(10, 100)
    listed = holdings_of(active.device)
    assert [(each.tensors, each.nbytes) for each in listed] == [(1, 4000), (3, 24), (1, 0)]
    assert "large = torch.zeros(1000)" in listed[0].line
    assert repr(listed).splitlines()[0].endswith("in 5 tensors on each rank")
    del small, view


def test_memory_counts_for_a_view_if_the_program_has_nothing_else_of_it(active: InProcess) -> None:
    """A parameter is a view of the tensor that it was made of."""
    model = nn.Linear(100, 10)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.ones(4, 100)
    model(x).sum().backward()
    optimizer.step()
    rows = torch.zeros(50, 20).unbind(0)[:2]
    part = x.view(-1)[3:]
    gc.collect()
    active.stream.free_dropped()
    listed = {each.line.partition(": ")[2]: each for each in holdings_of(active.device)}
    assert listed["model = nn.Linear(100, 10)"][1:] == (2, 4040)
    assert listed["rows = torch.zeros(50, 20).unbind(0)[:2]"].nbytes == 4000
    assert listed["part = x.view(-1)[3:]"].nbytes == 0
    assert sum(each.nbytes for each in listed.values()) == active.interpreters[0].memory().nbytes
    del part, rows


def test_what_is_dropped_is_not_listed_before_and_after_ranks_free_it(active: InProcess) -> None:
    kept, dropped = torch.zeros(10), torch.zeros(1000)
    del dropped
    for _ in range(2):
        assert [(each.tensors, each.nbytes) for each in holdings_of(active.device)] == [(1, 40)]
        active.stream.free_dropped()
    assert list(active.device.target.held) == [kept._part.id]  # type: ignore[attr-defined]


def test_a_view_has_the_tensors_of_all_ranks_and_the_outstanding_operations(mesh: InProcess) -> None:
    whole = torch.zeros(1000)
    part = whole.slice_mesh(r=1) + 1  # type: ignore[attr-defined]
    target = mesh.device.target
    view = mesh.stream.shown((0, 1), 0.0)
    assert view is not None
    assert [(each.tensors, each.nbytes, each.ranks) for each in view.lines] == [(1, 4000, (0, 1)), (1, 4000, (1,))]
    assert (view.tensors, view.nbytes) == (2, 8000)
    assert view.outstanding >= target.issued > target.acked
    assert mesh.stream.shown((5, 6), 0.0) is None
    del whole, part


def test_ranks_report_what_they_have_done_while_somebody_looks(mesh: InProcess) -> None:
    x = torch.zeros(1000)
    assert mesh.stream.tick(0.0) == []
    mesh.stream.shown((0, 1), 0.0)
    asks = mesh.stream.tick(1.0)
    assert [(effect.peer, next(iter(split(join([effect.packed]))))[0]) for effect in asks] == [  # type: ignore[union-attr]
        (peer, ReportOps(mesh.device.target.number)) for peer in (b"0", b"1")
    ]
    target = mesh.device.target
    mesh.stream.ops_done(0, target.number, 0)
    assert mesh.stream.tick(1.0) == []  # it has asked, and the other may hang
    mesh.stream.ops_done(1, target.number, 0)
    assert len(mesh.stream.tick(1.0)) == 2, "the operation was sent after the first question"
    for proc in (0, 1):
        mesh.stream.ops_done(proc, target.number, target.issued)
    assert mesh.stream.tick(1.0) == []
    x + 1
    assert mesh.stream.tick(60.0) == [], "the view is closed"


def test_the_names_of_variables_that_hold_tensors(active: InProcess) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(1, 2)
    model(x).sum().backward()
    optimizer.step()
    found = names_of(
        active.device, {"model": model, "opt": optimizer, "x": x, "_": x, "n": 3, "batch": {"x": [x, x + 1]}}
    )
    assert "model (2), opt (2), x, batch (2)" in found
    assert "gradients of model (2)" in found
    assert "no variable" not in found


def test_gradients_of_a_tensor_that_is_no_parameter_are_named(active: InProcess) -> None:
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    del_me = x * 1
    assert names_of(active.device, {"x": x}) == "3 tensors: x, gradients of x, 1 that no variable refers to directly"
    del del_me


def test_the_error_about_a_dead_rank_names_what_is_lost(active: InProcess) -> None:
    x = torch.ones(2)
    active.stream.rank_lost(0, Failure("lost", "RankDied", "killed by SIGKILL"))
    with pytest.raises(
        SupervisionError, match="its parts are lost of 1 tensor: 1 that no variable refers to directly; replace it"
    ):
        x + 1


def test_an_error_about_memory_lists_what_the_program_holds(active: InProcess) -> None:
    held = torch.zeros(1000)
    lost = torch.empty(1 << 50)
    with pytest.raises(
        TensorError, match=r"(?s)allocate memory.*the program holds .* in 2 tensors on each rank.*held = torch"
    ):
        inspect(lost)
    del held
