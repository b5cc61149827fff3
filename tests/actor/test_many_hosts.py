"""Ranks of several hosts: agents on this machine that behave like remote ones, over TCP and CURVE."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from monarch_kernel.actor import (
    Actor,
    HostMesh,
    ProcMesh,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)
from monarch_kernel.base.events import OutputEvent
from monarch_kernel.errors import ActorError
from monarch_kernel.launch.local import LocalLauncher
from monarch_kernel.rdma import shared
from monarch_kernel.runtime.controller.session import current_session
from tests.support.actors import host_agent
from tests.support.ranks import light_hosts
from tests.support.waiting import LONG_S, wait_until


class Noting(Actor):
    """Records values, and calls other actors."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    def note(self, value: int) -> int:
        self.seen.append(value)
        return len(self.seen)

    @endpoint
    def notes(self) -> list[int]:
        return self.seen

    @endpoint
    def flood(self, other: Any, count: int) -> list[int]:
        for i in range(count):
            other.note.broadcast(i)
        seen: list[int] = other.notes.call_one().get(LONG_S)
        return seen

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def ask(self, other: Any, value: Any) -> Any:
        return other.echo.call_one(value).get(LONG_S)

    @endpoint
    def where(self) -> tuple[int, int]:
        return current_rank().rank, host_agent()


def passed_on() -> int:
    return int(current_session()._transport._relay.passed_on)


@pytest.fixture(scope="module")
def hosts(session: None, by_value: None) -> Iterator[HostMesh]:
    mesh = light_hosts(LocalLauncher(), 3, lost_after_s=20.0)
    mesh.initialized.get(LONG_S)
    yield mesh
    mesh.shutdown().get(LONG_S)


@pytest.fixture(scope="module")
def procs(hosts: HostMesh) -> ProcMesh:
    """Two processes on each host; they end with the hosts."""
    mesh = hosts.spawn_procs({"gpus": 2}, device="cpu")
    mesh.initialized.get(LONG_S)
    return mesh


@pytest.fixture
def counters(procs: ProcMesh) -> Iterator[Any]:
    mesh = procs.spawn("counters", Noting)
    yield mesh
    mesh.stop().get(LONG_S)


def at(mesh: Any, host: int, gpu: int = 0) -> Any:
    return mesh.slice(hosts=host, gpus=gpu)


@pytest.mark.slow
def test_ranks_are_numbered_across_hosts_and_each_host_has_an_agent(counters: Any) -> None:
    found = counters.where.call().get(LONG_S).values()
    assert [rank for rank, _ in found] == list(range(6))
    parents = [parent for _, parent in found]
    assert parents[0::2] == parents[1::2]
    assert len(set(parents)) == 3


def test_a_rank_calls_a_rank_of_another_host_without_the_controller(counters: Any) -> None:
    one, other = at(counters, 0), at(counters, 2)
    assert one.ask.call_one(other, "first").get(LONG_S) == "first"

    def went_straight() -> bool:  # as soon as the two agents are connected
        before = passed_on()
        assert one.ask.call_one(other, 1).get(LONG_S) == 1
        return passed_on() == before

    wait_until(went_straight, "a way past the controller")
    before = passed_on()
    for i in range(50):
        assert one.ask.call_one(other, i).get(LONG_S) == i
    assert passed_on() == before


def test_calls_stay_in_order_while_the_path_changes(hosts: HostMesh) -> None:
    procs = hosts.spawn_procs({"gpus": 1}, device="cpu")  # the agents of these ranks are not connected yet
    counters: Any = procs.spawn("counters", Noting)
    for source, target in [(0, 1), (1, 0), (2, 0)]:
        seen = at(counters, source).flood.call_one(at(counters, target), 2000).get(LONG_S)
        assert seen[-2000:] == list(range(2000))
    procs.stop().get()


def test_ranks_of_this_machine_and_of_other_hosts_call_each_other(counters: Any) -> None:
    here = this_host().spawn_procs({"gpus": 1}, device="cpu", name="here")
    local: Any = here.spawn("local", Noting)
    mine, far = local.slice(gpus=0), at(counters, 1, 1)
    assert mine.ask.call_one(far, "out").get(LONG_S) == "out"
    assert far.ask.call_one(mine, "in").get(LONG_S) == "in"
    assert far.flood.call_one(mine, 500).get(LONG_S) == list(range(500))
    here.stop().get()


def test_other_hosts_call_an_actor_of_the_program(counters: Any) -> None:
    here: Any = this_proc().spawn("mine", Noting)
    assert at(counters, 2).ask.call_one(here, [1, 2]).get(LONG_S) == [1, 2]
    here.stop().get()


@pytest.mark.parametrize("nbytes", [100_000, 5 << 20, 20 << 20])
def test_large_values_arrive_complete(counters: Any, nbytes: int) -> None:
    value = np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8)
    got = counters.slice(gpus=0).echo.call(value).get(LONG_S)
    assert all(np.array_equal(each, value) for each in got.values())
    assert np.array_equal(at(counters, 0).ask.call_one(at(counters, 1), value).get(LONG_S), value)


def test_shared_memory_is_refused_on_another_host(counters: Any) -> None:
    mine = shared(torch.zeros(4))
    with pytest.raises(ActorError, match=r"made by shared\(\) .* such as one on another host: send it a .clone\(\)"):
        at(counters, 1).echo.call_one(mine).get(LONG_S)
    assert at(counters, 1).echo.call_one(mine.clone()).get(LONG_S).sum() == 0


def test_equal_answers_are_folded_and_have_separate_values(counters: Any) -> None:
    first, second, *_ = counters.echo.call([1, [2]]).get(LONG_S).values()
    first[1].append(3)
    assert second == [1, [2]]


def test_output_of_all_hosts_arrives(procs: ProcMesh) -> None:
    ranks: list[int] = []

    def note(event: object) -> None:
        if isinstance(event, OutputEvent) and "said" in event.text:
            ranks.append(event.rank)

    stop = current_session().runtime.watch(note)
    procs.run("print('said', flush=True)").get(LONG_S)
    wait_until(lambda: sorted(ranks) == list(range(6)), "the output of six ranks")
    stop()


def test_a_dead_rank_is_replaced_on_its_host(hosts: HostMesh) -> None:
    procs = hosts.spawn_procs({"gpus": 2}, device="cpu")
    pid = procs.run("import os; os.getpid()").get(LONG_S).item(hosts=1, gpus=0)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: procs.deaths(), "the death")
    (death,) = procs.deaths().values()
    assert death.signal == "SIGKILL"
    assert procs.heal().get(LONG_S) == (2,)
    assert len(procs.run("1").get(LONG_S)) == 6
    procs.stop().get()
