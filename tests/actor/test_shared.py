"""Tensors of shared(): all processes that receive one have the same memory, for as long as any process has it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from monarch_kernel.actor import Actor, ProcMesh, SupervisionError, endpoint, this_host, this_proc
from monarch_kernel.net.transport import shared_frames
from monarch_kernel.rdma import RDMABuffer, shared
from tests.support.descriptors import Descriptor, open_descriptors
from tests.support.waiting import LONG_S

PROCS = {"gpus": 2}

LARGE = 1 << 20  # float32: 4 MiB


class Holder(Actor):
    """Has a tensor that it made, or one of another process."""

    def __init__(self) -> None:
        self.held: Any = None

    @endpoint
    def make(self, count: int) -> torch.Tensor:
        self.held = shared(torch.zeros(count))
        return self.held

    @endpoint
    def give(self) -> Any:
        return self.held

    @endpoint
    def hold(self, value: Any) -> None:
        self.held = value

    @endpoint
    def write(self, number: float) -> None:
        self.held.fill_(number)

    @endpoint
    def write_at(self, index: int, number: float) -> None:
        self.held[index] = number

    @endpoint
    def total(self) -> float:
        return float(self.held.sum())

    @endpoint
    def hold_of(self, other: Any) -> None:
        self.held = other.give.call_one().get()

    @endpoint
    def write_in_a_child(self, number: float) -> None:
        child = multiprocessing.get_context("fork").Process(target=lambda: self.held.fill_(number))
        child.start()
        child.join()
        assert child.exitcode == 0

    @endpoint
    def step(self) -> None:
        """Write in place, as an optimizer does."""
        with torch.no_grad():
            for parameter in self.held.parameters():
                parameter += 1

    @endpoint
    def drop(self) -> None:
        self.held = None

    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def holders(procs: ProcMesh) -> Iterator[Any]:
    holders = procs.spawn("holders", Holder)
    yield holders
    holders.stop().get(LONG_S)


def value_of(future: Any) -> Any:
    return future.get(LONG_S)


@pytest.mark.parametrize("count", [1, 1000, LARGE])  # unshared: in the pickle, the message or a block
def test_all_receivers_write_to_the_same_memory(holders: Any, count: int) -> None:
    mine = shared(torch.ones(count))
    value_of(holders.hold.call(mine))
    one, two = holders.slice(gpus=0), holders.slice(gpus=1)
    value_of(one.write.call_one(2))
    assert value_of(two.total.call_one()) == mine.sum() == 2 * count
    mine += 1
    assert list(value_of(holders.total.call()).values()) == [3 * count] * 2


@pytest.mark.parametrize("count", [1000, LARGE])
def test_a_result_shares_the_memory_of_the_rank(holders: Any, count: int) -> None:
    one, two = holders.slice(gpus=0), holders.slice(gpus=1)
    weights = value_of(one.make.call_one(count))
    value_of(one.write.call_one(5))
    assert weights.sum() == 5 * count
    value_of(two.hold_of.call_one(one))
    value_of(two.write.call_one(7))
    assert weights.sum() == value_of(one.total.call_one()) == 7 * count


def test_a_tensor_that_is_passed_on_is_a_copy(holders: Any) -> None:
    one, two = holders.slice(gpus=0), holders.slice(gpus=1)
    weights = value_of(one.make.call_one(LARGE))
    value_of(two.hold.call_one(weights))
    weights += 1
    assert value_of(two.total.call_one()) == 0
    value_of(two.write.call_one(9))
    assert weights.sum() == LARGE


def test_views_and_nested_tensors_share_the_memory_too(holders: Any) -> None:
    grid = shared(torch.zeros(30, 50))
    value_of(holders.hold.call({"t": [grid.T[5:10]]}))
    (seen,) = value_of(holders.slice(gpus=0).give.call_one())["t"]  # a copy of the value on the rank
    assert seen.shape == (5, 30)
    value_of(holders.hold.call(grid[3]))
    value_of(holders.slice(gpus=1).write.call_one(1))
    assert grid.sum() == 50
    assert grid[3].sum() == 50


def test_a_module_with_shared_parameters(holders: Any) -> None:
    model = nn.Linear(3, 4)
    for parameter in model.parameters():
        parameter.data = shared(parameter.data)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    value_of(holders.hold.call(model))
    value_of(holders.step.call())
    for parameter, old in zip(model.parameters(), before):
        assert parameter.requires_grad
        torch.testing.assert_close(parameter.detach(), old + 2)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.float8_e4m3fn],
)
def test_any_dtype(holders: Any, dtype: torch.dtype) -> None:
    mine = shared(torch.ones(3, 5).to(dtype))
    assert mine.dtype == dtype
    value_of(holders.hold.call(mine))
    value_of(holders.slice(gpus=0).write_at.call_one(1, 0))
    assert mine.float().sum().item() == 10 if not dtype.is_complex else mine.abs().sum().item() == 10


def test_shared_copies_its_argument() -> None:
    source = torch.arange(6.0, requires_grad=True).view(2, 3).T.detach().requires_grad_()
    mine = shared(source)
    assert mine.requires_grad
    assert mine.is_contiguous()
    torch.testing.assert_close(mine, source)
    with torch.no_grad():
        mine += 1
    assert source[0, 0] == 0
    assert shared(torch.zeros(0, 3)).shape == (0, 3)
    assert shared(torch.tensor(4.0)).item() == 4.0


def test_its_numpy_array_has_the_same_memory(holders: Any) -> None:
    mine = shared(torch.from_numpy(np.zeros(10)))
    array = mine.numpy()
    value_of(holders.hold.call(mine))
    value_of(holders.slice(gpus=0).write.call_one(1))
    assert array.sum() == 10


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (np.zeros(3), r"takes a tensor, not ndarray: .*torch.from_numpy"),
        ([1.0], "takes a tensor, not list"),
        (torch.eye(3).to_sparse(), "to_dense"),
        (torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch.zeros(3, device="meta"), "meta"),
    ],
    ids=["array", "list", "sparse", "conjugate", "meta"],
)
def test_other_types_are_refused(thing: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        shared(thing)


def test_it_can_be_sent_any_number_of_times(holders: Any) -> None:
    """There are slots for some 4,000 holders at the same time; a holder that drops the tensor frees its slot."""
    mine = shared(torch.zeros(4))
    one = holders.slice(gpus=0)
    for _ in range(9):
        for future in [one.hold.call_one(mine) for _ in range(500)]:
            value_of(future)
    value_of(one.write.call_one(1))
    assert mine.sum() == 4


def test_its_memory_is_reused_only_when_no_process_has_it(holders: Any) -> None:
    mine = shared(torch.full((LARGE,), 3.0))
    value_of(holders.hold.call(mine))
    del mine
    gc.collect()
    others = [shared(torch.zeros(LARGE)) for _ in range(3)]
    assert list(value_of(holders.total.call()).values()) == [3 * LARGE] * 2
    value_of(holders.write.call(4))
    assert sum(float(other.sum()) for other in others) == 0
    value_of(holders.drop.call())
    del others
    gc.collect()
    n_blocks = len(shared_frames._blocks)
    again = [shared(torch.zeros(LARGE)) for _ in range(4)]
    assert len(shared_frames._blocks) <= n_blocks
    assert sum(float(each.sum()) for each in again) == 0


def test_it_outlives_its_maker_and_its_readers(session: None, by_value: None) -> None:
    procs = this_host().spawn_procs({"gpus": 2}, device="cpu")
    pair = procs.spawn("pair", Holder)
    one, two = pair.slice(gpus=0), pair.slice(gpus=1)
    weights = value_of(one.make.call_one(LARGE))
    value_of(two.hold_of.call_one(one))
    os.kill(value_of(one.pid.call_one()), signal.SIGKILL)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        value_of(one.pid.call_one())
    weights += 1
    assert value_of(two.total.call_one()) == LARGE
    value_of(two.write.call_one(2))
    assert weights.sum() == 2 * LARGE
    value_of(procs.stop())
    assert weights.sum() == 2 * LARGE


def test_a_forked_child_shares_it_too(holders: Any) -> None:
    mine = shared(torch.zeros(LARGE))
    value_of(holders.hold.call(mine))
    value_of(holders.slice(gpus=0).write_in_a_child.call_one(1))
    assert mine.sum() == LARGE
    value_of(holders.slice(gpus=0).write.call_one(2))  # still
    assert list(value_of(holders.total.call()).values()) == [2 * LARGE] * 2


def test_a_replaced_rank_gets_it_again(session: None, by_value: None) -> None:
    class Starter(Holder):
        def __init__(self, value: torch.Tensor) -> None:
            self.held = value
            self.held += 1

    procs = this_host().spawn_procs({"gpus": 1}, device="cpu")
    mine = shared(torch.zeros(LARGE))
    starter = procs.spawn("starter", Starter, mine)
    assert value_of(starter.total.call_one()) == LARGE
    os.kill(value_of(starter.pid.call_one()), signal.SIGKILL)
    with pytest.raises(SupervisionError):
        value_of(starter.pid.call_one())
    procs.heal()
    assert value_of(starter.total.call_one()) == mine.sum() == 2 * LARGE
    value_of(procs.stop())


def test_an_actor_of_the_program_shares_it_with_the_program(session: None) -> None:
    holder = this_proc().spawn("here", Holder)
    mine = shared(torch.zeros(10))
    value_of(holder.hold.call_one(mine))
    value_of(holder.write.call_one(3))
    assert mine.sum() == 30
    value_of(holder.stop())


def test_it_can_be_lent(holders: Any) -> None:
    mine = shared(torch.zeros(LARGE))
    value_of(holders.hold.call(mine))
    value_of(holders.slice(gpus=0).write.call_one(6))
    buffer, seen = RDMABuffer(mine), torch.empty(LARGE)
    value_of(buffer.read_into(seen))
    assert seen.sum() == 6 * LARGE
    value_of(buffer.drop())


def test_a_child_of_its_maker_keeps_it_when_the_maker_drops_it() -> None:
    mine, (read, write), (said, say) = shared(torch.ones(LARGE)), os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.read(read, 1)
        os.write(say, b"1" if float(mine.sum()) == LARGE else b"0")
        mine.fill_(7)
        os._exit(0)
    try:
        del mine
        gc.collect()
        other = [shared(torch.zeros(LARGE)) for _ in range(3)]
        os.write(write, b"g")
        os.waitpid(child, 0)
        assert os.read(said, 1) == b"1"
        assert sum(float(each.sum()) for each in other) == 0
    finally:
        for fd in (read, write, said, say):
            os.close(fd)


def test_small_blocks_are_reused() -> None:
    def opened() -> frozenset[Descriptor]:
        for _ in range(50):
            shared(torch.zeros(4))
        return open_descriptors()

    first = opened()
    assert not opened() - first
