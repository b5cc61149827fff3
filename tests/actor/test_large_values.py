"""Large values go through shared memory: each receiver has its own value, also when a process dies meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from monarch_kernel.actor import Actor, ProcMesh, SupervisionError, endpoint, this_host
from monarch_kernel.net.transport import shared_frames
from tests.support.waiting import LONG_S

PROCS = {"gpus": 2}

COUNT = 1 << 20  # float32: 4 MiB


class Keeper(Actor):
    """Keeps its arguments."""

    def __init__(self) -> None:
        self.kept: Any = None

    @endpoint
    def keep(self, value: Any) -> float:
        self.kept = value
        return float(value.sum())

    @endpoint
    def add(self, number: float) -> float:
        self.kept += number
        return float(self.kept.sum())

    @endpoint
    def give(self) -> Any:
        return self.kept

    @endpoint
    def ask(self, other: Any) -> float:
        value = other.give.call_one().get()
        value += 1
        return float(value.sum())

    @endpoint
    def maps(self) -> int:
        return len({line.split()[4] for line in _block_lines()})

    @endpoint
    def flags(self) -> set[str]:
        self.kept = None
        return {line.split()[1] for line in _block_lines()}

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def _block_lines() -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "memfd:monarch-block" in line]


@pytest.fixture
def keepers(procs: ProcMesh) -> Iterator[Any]:
    keepers = procs.spawn("keepers", Keeper)
    yield keepers
    keepers.stop().get(LONG_S)


@pytest.mark.parametrize("make", [lambda: torch.ones(COUNT), lambda: np.ones(COUNT, "f4")], ids=["torch", "numpy"])
def test_each_rank_has_a_separate_value(keepers: Any, make: Any) -> None:
    value = make()
    assert list(keepers.keep.call(value).get(LONG_S).values()) == [COUNT, COUNT]
    one, two = keepers.slice(gpus=0), keepers.slice(gpus=1)
    assert one.add.call_one(1).get(LONG_S) == 2 * COUNT
    assert two.add.call_one(0).get(LONG_S) == COUNT
    assert value.sum() == COUNT
    given = one.give.call_one().get(LONG_S)
    given += 5
    assert one.add.call_one(0).get(LONG_S) == 2 * COUNT
    assert two.ask.call_one(one).get(LONG_S) == 3 * COUNT
    assert one.add.call_one(0).get(LONG_S) == 2 * COUNT


def test_a_value_can_be_changed_as_soon_as_it_is_sent(keepers: Any) -> None:
    value = torch.ones(COUNT)
    futures = []
    for _ in range(20):
        futures.append(keepers.keep.call(value))
        value += 1
    for i, future in enumerate(futures):
        assert list(future.get(LONG_S).values()) == [(i + 1) * COUNT] * 2


def test_blocks_are_reused(keepers: Any) -> None:
    def take_turns() -> int:
        for _ in range(20):
            keepers.keep.call(torch.ones(COUNT)).get(LONG_S)
            keepers.give.call().get(LONG_S)
        return len(shared_frames._blocks)

    first = take_turns()
    assert take_turns() <= first
    # Blocks of the controller stay mapped for reuse, and there are a few blocks that the rank itself has sent.
    assert max(keepers.maps.call().get(LONG_S).values()) <= len(shared_frames._blocks) + 5


SLOW = "import time, torch; time.sleep(0.5); torch.ones(3)"
"""Lasts longer than a wait that is reported (`PATIENCE_S`)."""


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_value_that_was_waited_for_is_freed_with_its_last_use(procs: ProcMesh, is_awaited: bool) -> None:
    async def wait() -> Any:
        return await procs.run(SLOW)

    values = (asyncio.run(wait()) if is_awaited else procs.run(SLOW).get(LONG_S)).values()
    of_each = [weakref.ref(value) for value in values]
    assert len(of_each) == 2
    del values
    if is_awaited:  # an await makes cycles
        gc.collect()
    assert [each() for each in of_each] == [None] * 2


def test_a_killed_rank_holds_no_block(procs: ProcMesh) -> None:
    killed = this_host().spawn_procs({"gpus": 2}, device="cpu")
    keepers = killed.spawn("keepers", Keeper)
    pids = list(keepers.pid.call().get(LONG_S).values())
    before = len(shared_frames._blocks)
    keepers.keep.call(torch.ones(COUNT)).get(LONG_S)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for _ in range(5):
        keepers.keep.broadcast(torch.ones(COUNT))  # a stopped process opens no block
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        keepers.pid.call().get(LONG_S)
    killed.stop().get(LONG_S)
    other = procs.slice(gpus=0).spawn("other", Keeper)
    for _ in range(10):
        other.keep.call_one(torch.ones(COUNT)).get(LONG_S)
    held = [segment for segment in shared_frames._blocks._segments if not segment.is_idle]
    assert len(held) <= 2  # the last value of the other rank, and the one before it
    assert len(shared_frames._blocks) <= before + 2


def test_a_value_that_cannot_be_opened_is_an_error_of_the_call(keepers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shared_frames._blocks.refer

    def missing(frame: memoryview, reader: Any) -> Any:
        reference = real(frame, reader)
        assert reference is not None
        return type(reference)(1 << 22, reference.fd, reference.inode, reference.nbytes, reference.turn)

    monkeypatch.setattr(shared_frames._blocks, "refer", missing)
    with pytest.raises(Exception, match="can't be read from shared memory: No such file"):
        keepers.keep.call(torch.ones(COUNT)).get(LONG_S)
    monkeypatch.undo()
    assert list(keepers.keep.call(torch.ones(COUNT)).get(LONG_S).values()) == [COUNT, COUNT]


def test_the_only_receiver_of_a_value_writes_to_it_without_a_copy(session: None, by_value: None) -> None:
    procs = this_host().spawn_procs({"gpus": 1}, device="cpu")
    keeper = procs.spawn("keeper", Keeper)
    value = torch.ones(COUNT)
    flags: set[str] = set()
    for i in range(1, 50):  # whether the sender has released the block when it arrives is a race of microseconds
        keeper.keep.call_one(value).get(LONG_S)
        assert keeper.add.call_one(i).get(LONG_S) == (i + 1) * COUNT
        assert value.sum() == COUNT
        flags = keeper.flags.call_one().get(LONG_S)
        if flags == {"rw-s"}:
            break
    assert flags == {"rw-s"}
    procs.stop().get(LONG_S)


class Fragile(Actor):
    """Keeps the argument of its constructor, and writes to it."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.first = float(value.sum())
        self.value.zero_()

    @endpoint
    def found(self) -> float:
        return self.first

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_heal_sends_the_original_value_again(session: None, by_value: None) -> None:
    procs = this_host().spawn_procs({"gpus": 1}, device="cpu")
    fragile = procs.spawn("fragile", Fragile, torch.ones(COUNT))
    assert fragile.found.call_one().get(LONG_S) == COUNT
    with pytest.raises(SupervisionError):
        fragile.die.call_one().get(LONG_S)
    procs.heal()
    assert fragile.found.call_one().get(LONG_S) == COUNT
    procs.stop().get(LONG_S)


class Passing(Keeper):
    """Keeps the value of another actor."""

    @endpoint
    def take_from(self, other: Any) -> None:
        self.kept = other.give.call_one().get()


def test_a_reader_keeps_the_value_of_a_killed_sender(session: None, by_value: None) -> None:
    procs = this_host().spawn_procs({"gpus": 2}, device="cpu")
    passing = procs.spawn("passing", Passing)
    sender, reader = passing.slice(gpus=0), passing.slice(gpus=1)
    sender.keep.call_one(torch.ones(COUNT)).get(LONG_S)
    reader.take_from.call_one(sender).get(LONG_S)
    os.kill(sender.pid.call_one().get(LONG_S), signal.SIGKILL)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        sender.pid.call_one().get(LONG_S)
    assert reader.add.call_one(1).get(LONG_S) == 2 * COUNT
    procs.stop().get(LONG_S)
