"""Distributed tensors on real ranks: order with cells, slices, failures, deaths, frees and random numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from monarch_kernel.actor import Actor, ProcMesh, ValueMesh, endpoint, this_host
from monarch_kernel.errors import SupervisionError
from monarch_kernel.features.tensors.stream import MAX_BEHIND
from monarch_kernel.tensor import TensorError, fetch_shard, get_active_mesh, inspect, manual_seed, remote, show
from tests.support.waiting import LONG_S, wait_until

PROCS = {"dp": 2, "tp": 2}
pytestmark = pytest.mark.usefixtures("tensors_dropped")


def listed(values: ValueMesh[torch.Tensor]) -> list[float]:
    return [value.item() for value in values.values()]


def test_operations_run_on_all_ranks(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.ones(3, 4)
        assert get_active_mesh() is not None
    assert fetch_shard((x * 2).sum(), dp=1, tp=1).result() == 24
    assert x.mesh.name == "t"


def test_each_rank_has_its_own_index(procs: ProcMesh) -> None:
    place = procs.rank_tensor("dp") * 10 + procs.rank_tensor("tp")
    assert listed(procs.values(place)) == [0, 1, 10, 11]
    assert inspect(place, dp=1) == 10
    assert inspect({"a": [place]}, dp=1, tp=1) == {"a": [torch.tensor(11)]}
    assert listed(procs.slice(dp=1).values(place)) == [10, 11]
    with pytest.raises(KeyError, match="pp"):
        procs.rank_tensor("pp")
    with pytest.raises(TypeError, match="pp"):
        inspect(place, pp=0)
    with pytest.raises(IndexError, match="2"):
        inspect(place, dp=2)


def test_operations_are_in_order_with_cells_calls_and_values(procs: ProcMesh) -> None:
    procs.run("import time; seen = []").get(LONG_S)
    with procs.activate():
        before = torch.tensor([1.0])
    first = procs.run("import torch; torch.manual_seed(7); seen.append(torch.initial_seed())")
    manual_seed(3, same=True, mesh=procs)
    second = procs.run("seen.append(torch.initial_seed())")
    manual_seed(5, mesh=procs)
    third = procs.run("seen.append(torch.initial_seed())")
    for cell in (first, second, third):
        cell.get(LONG_S)
    assert procs["seen"].values() == tuple([7, 3, 5 + rank] for rank in range(4))
    assert inspect(before).item() == 1


def test_the_view_shows_the_memory_of_tensors_by_line_and_what_is_outstanding(procs: ProcMesh, tmp_path: Path) -> None:
    assert procs.view().tensors is None
    x = procs.shard(torch.zeros(10, 1000), dp=Shard(0), tp=Shard(0))
    y = x + 1  # the first one waits for what the ranks return
    go = tmp_path / "go"
    waits = procs.run(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)")
    for _ in range(7):
        y = x + 1

    def outstanding() -> int:
        tensors = procs.view().tensors
        assert tensors is not None
        return tensors.outstanding

    assert outstanding() >= 7
    go.touch()
    waits.get(LONG_S)
    wait_until(lambda: outstanding() == 0, "the ranks to report what they have done")
    tensors = procs.view().tensors
    assert tensors is not None
    assert (tensors.tensors, tensors.nbytes) == (2, 24_000)  # parts of 3 rows
    assert [each.ranks for each in tensors.lines] == [(0, 1, 2, 3)] * 2
    assert {"x = procs.shard(", "y = x + 1"} <= {each.line.split(": ")[1][:16] for each in tensors.lines}
    assert max(use.nbytes for use in procs.memory().values()) == 24_000
    del x, y
    wait_until(lambda: procs.view().tensors is None, "the view to drop them")


def test_random_numbers_differ_by_rank_unless_seeds_are_equal(procs: ProcMesh) -> None:
    with procs.activate():
        manual_seed(1)
        own = torch.rand(2)
        manual_seed(1, same=True)
        equal = torch.rand(2)
    assert len({str(value) for value in procs.values(own).values()}) == 4
    torch.manual_seed(1)
    assert all(torch.equal(value, there) for there in [torch.rand(2)] for value in procs.values(equal).values())
    with pytest.raises(TensorError, match=r"call it in mesh\.activate\(\)"):
        manual_seed(1)


def test_data_of_the_program_reaches_all_ranks(procs: ProcMesh) -> None:
    large = torch.arange(1 << 18, dtype=torch.float64)[1:]
    x = procs.put(large)
    y = procs.put(np.array([[1, 2], [3, 4]]).T)
    x.add_(1)  # of memory that ranks share
    assert large[0] == 1
    assert torch.equal(inspect(x, dp=1), large + 1)
    assert inspect(x.as_strided((2,), (1,), 0)).tolist() == [2, 3]
    assert inspect(y, tp=1).tolist() == [[1, 3], [2, 4]]
    for wrong in ("text", x):
        with pytest.raises(TypeError, match=r"put\(\) takes a"):
            procs.put(wrong)


def test_a_slice_has_its_own_tensors_and_parts_of_others(procs: ProcMesh) -> None:
    whole = procs.rank_tensor("dp") * 2 + procs.rank_tensor("tp")
    part = procs.slice(dp=1)
    with part.activate():
        own = torch.full((), 10)
    there = whole.slice_mesh(dp=1)
    total = own + there
    assert listed(part.values(total)) == [12, 13]
    there.add_(100)  # the same memory
    assert listed(procs.values(whole)) == [0, 1, 102, 103]
    with pytest.raises(TensorError, match=r"two meshes, .*: take the part on the smaller mesh with x\.slice_mesh"):
        own + whole
    with pytest.raises(TensorError, match="has not all ranks of"):
        procs.values(own)
    del whole
    assert listed(part.values(there)) == [102, 103]


def test_show_prints_equal_ranks_once(procs: ProcMesh, capsys: pytest.CaptureFixture[str]) -> None:
    with procs.activate():
        large = torch.ones(40, 40)
        large[0, 0] = float("nan")
    show(procs.rank_tensor("tp"), large)
    assert capsys.readouterr().out.splitlines() == [
        "[0,2] tensor(0)",
        "[1,3] tensor(1)",
        "[0-3] shape (40, 40), float32, min 1, mean 1, max 1, 1 of 1,600 elements are not finite",
    ]
    ranks = procs.rank_tensors()
    assert list(ranks) == ["dp", "tp"]
    show(*ranks.values(), dp=1)
    show(ranks["dp"], shard={"dp": 1, "tp": 0})
    assert capsys.readouterr().out.splitlines() == [
        "[2-3] tensor(1)",
        "[2] tensor(0)",
        "[3] tensor(1)",
        "[2] tensor(1)",
    ]


def test_a_failure_on_one_rank_loses_what_depends_on_it_there(procs: ProcMesh) -> None:
    index = procs.rank_tensor("dp") * 2 + procs.rank_tensor("tp")
    with procs.activate():
        matrix = torch.eye(3)
    factor = torch.linalg.cholesky(matrix * (2.5 - index))
    lost = factor * 2
    with pytest.raises(TensorError) as caught:
        procs.values(lost)
    assert re.match(
        r"torch\.linalg\.cholesky failed on rank \[3\] of t; issued in .*test_mesh.py, line \d+, in test_a_f",
        str(caught.value),
    )
    assert "[3] _LinAlgError: linalg.cholesky: " in str(caught.value)
    assert "factor = torch.linalg.cholesky(matrix * (2.5 - index))" in str(caught.value)
    assert list(caught.value.reports) == [3]
    assert inspect(lost, dp=1, tp=0).shape == (3, 3)
    assert inspect(matrix, dp=1, tp=1).trace() == 3
    show(lost)


def test_a_model_trains_on_all_ranks(procs: ProcMesh) -> None:
    with procs.activate():
        manual_seed(0, same=True)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        x = torch.randn(32, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert losses[-1].item() < losses[0].item()  # item() compares the ranks


def test_ranks_report_what_they_have_done(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.zeros(1)
    for _ in range(MAX_BEHIND + 600):  # the last of them wait for reports
        x.add_(1)
    assert listed(procs.values(x)) == [MAX_BEHIND + 600] * 4


def test_dropped_tensors_go_without_another_operation(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.zeros(1000)
    assert all(use.nbytes >= 4000 for use in procs.memory().values())
    del x
    counts = "next(each for each in gc.get_objects() if type(each).__name__ == 'Interpreter').tensors"
    wait_until(lambda: procs.run(f"import gc; len({counts})").get(LONG_S).values() == (0, 0, 0, 0), "the tensor to go")


class Holder(Actor):
    """Tries to use its mesh as a device."""

    @endpoint
    def activate(self, mesh: ProcMesh) -> None:
        with mesh.activate():
            pass


def test_only_the_program_that_made_a_mesh_uses_it_as_a_device(procs: ProcMesh) -> None:
    holder = procs.spawn("holder", Holder)
    with pytest.raises(Exception, match="only the process that made mesh .* can do this"):
        holder.slice(dp=0, tp=0).activate.call_one(procs).get(LONG_S)
    holder.stop().get(LONG_S)


def test_the_death_of_a_rank_loses_tensors_and_a_healed_mesh_takes_new_ones(session: None) -> None:
    mesh = this_host().spawn_procs({"r": 2}, name="mortal", device="cpu")
    try:
        with mesh.activate():  # before the ranks are up
            x = torch.ones(2)
        assert listed(mesh.values(x.sum())) == [2, 2]
        kept = x.slice_mesh(r=0)
        mesh.process(1).run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").exception(LONG_S)
        with pytest.raises(
            SupervisionError, match=r"the tensors of mortal can't be used: \[1\] ended, .* of 1 tensor: "
        ):
            x + 1
        assert inspect(kept + 1).tolist() == [2, 2]
        with pytest.raises(
            SupervisionError, match=r"mortal can't hold tensors: replace its dead ranks with \.heal\(\)"
        ):
            mesh.activate()
        mesh.heal().get(LONG_S)
        with mesh.activate():
            y = torch.ones(2)
        assert listed(mesh.values((y + 1).sum())) == [4, 4]
        with pytest.raises(SupervisionError):
            x + y
        mesh.stop(grace_s=0).get(LONG_S)
        uses: list[Callable[[], object]] = [
            partial(show, y),
            partial(inspect, y),
            partial(mesh.values, y),
            partial(y.reduce, "r"),
            partial(remote(torch.abs), y),
            mesh.refill,
        ]
        for use in uses:
            with pytest.raises(SupervisionError, match="it was stopped; make tensors on another mesh"):
                use()
        with pytest.raises(
            SupervisionError, match="the tensors of mortal are gone: it was stopped; make tensors on another"
        ):
            y + 1
        with pytest.raises(
            SupervisionError, match="mortal can't hold tensors: it was stopped; make tensors on another mesh"
        ):
            mesh.activate()
        del x, y, kept, uses, use
    finally:
        mesh.stop(grace_s=0).get(LONG_S)
