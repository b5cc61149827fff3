"""Hosts that join with other versions, and requests to their agents; without processes."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import host_peer
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Goodbye, HostHello, LogRead, ReadLog, Software, StartRanks
from monarch_kernel.runtime.controller.effects import GiveUp, HostGone
from monarch_kernel.runtime.controller.processes import RANK_DEADLINE_S
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.runtime.rpc.answers import Value
from monarch_kernel.runtime.rpc.requests import Resolve, Send
from monarch_kernel.testing import rank_spec

HERE = Software("3.11.4", "/here", {"torch": "2.9.0"})
THERE = Software("3.12.1", "/there", {"torch": "2.9.0"})


def hello(host: int, software: Software | None) -> HostHello:
    return HostHello("token", host, f"n{host}", 100 + host, 4, 0, software=software)


@pytest.fixture
def state() -> State:
    """A state that expects two hosts elsewhere, and a rank on each."""
    state = State()
    state.software = HERE
    for host in (1, 2):
        state.hosts.add(host, 0.0, timeout_s=600.0, lost_after_s=1.0)
        state.processes.start(host, [rank_spec(host, rank=host - 1, world_size=2)], 0.0)
    state.host_requests.await_up(50, (1, 2))
    return state


def of(effects: list[Any], kind: type) -> list[Any]:
    return [effect for effect in effects if type(effect) is kind]


def test_a_host_with_other_versions_is_refused_before_anything_runs_there(state: State) -> None:
    state.handle(hello(1, HERE), (), host_peer(1), 1.0)
    effects = state.handle(hello(2, THERE), (), host_peer(2), 1.0)
    assert of(effects, Send) == [Send(host_peer(2), pack(Goodbye()))]  # and no StartRanks
    assert of(effects, GiveUp) == [GiveUp(2)]
    assert [gone.proc for gone in of(effects, HostGone)] == [2]
    (resolved,) = of(effects, Resolve)
    assert isinstance(resolved.answers[0], Value)
    assert isinstance(resolved.answers[1], Failure)
    assert (
        resolved.answers[1].message
        == "can't be used: Python is 3.12.1 there and 3.11.4 here (/there there, /here here)"
    )
    assert state.hosts[2].software == THERE  # for the table


@pytest.mark.parametrize("software", [HERE, None])
def test_compatible_hosts_get_their_ranks(state: State, software: Software | None) -> None:
    effects = state.handle(hello(1, software), (), host_peer(1), 1.0)
    spec = state.ranks[1].spec
    assert of(effects, Send) == [Send(host_peer(1), pack(StartRanks((spec,))))]


def test_this_machine_is_not_compared() -> None:
    state = State()
    state.software = HERE
    state.hosts.add(1, 0.0)
    assert not of(state.handle(hello(1, THERE), (), host_peer(1), 1.0), Send)
    assert state.hosts[1].up


def test_the_deadline_of_a_rank_counts_from_the_hello_of_its_host(state: State) -> None:
    late = RANK_DEADLINE_S + 100.0
    state.handle(hello(1, HERE), (), host_peer(1), late)
    assert state.ranks[1].deadline == late + RANK_DEADLINE_S


def test_a_request_to_a_host_resolves_with_its_answer_or_its_end(state: State) -> None:
    for host in (1, 2):
        state.handle(hello(host, HERE), (), host_peer(host), 1.0)
    ask = pack(ReadLog(7, 1, 100))
    assert state.host_requests.ask(7, 1, ask) == [Send(host_peer(1), ask)]
    dropped_messages = state.dropped_messages
    assert state.handle(LogRead(7, b"not yours"), (), host_peer(2), 2.0) == []
    assert state.dropped_messages == dropped_messages + 1
    (resolved,) = state.handle(LogRead(7, b"log"), (), host_peer(1), 2.0)
    assert resolved.id == 7
    assert resolved.answers[0].payload.data == b"log"
    assert state.handle(LogRead(7, b"again"), (), host_peer(1), 2.0) == []
    state.host_requests.ask(8, 1, ask)
    state.host_requests.ask(9, 2, ask)
    ended = of(state.processes.host_gone(1, "it has died", (), 3.0), Resolve)
    assert [resolve.id for resolve in ended if resolve.id in (8, 9)] == [8]
    assert of(state.host_requests.ask(10, 1, ask), Resolve)[0].answers[0].message == "it has died"
    released = of(state.processes.release_host(2, "given back", 0.0, 3.0), Resolve)
    assert [resolve.id for resolve in released if resolve.id in (8, 9)] == [9]
