"""The names in the ranks' namespaces, and requests that do not count as work."""

from __future__ import annotations

import pytest

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import host_peer, rank_peer
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Complete, Hello, HostHello, Lost, Names, Payload, Result, Run
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.state import MAX_NAMES, State
from monarch_kernel.runtime.rpc.answers import Value
from monarch_kernel.runtime.rpc.requests import Resolve, Send
from monarch_kernel.testing import rank_spec

ASK = pack(Complete(7, "attributes", "x"))


@pytest.fixture
def state() -> State:
    """Two ranks, of which the first is up."""
    state = State()
    state.hosts.add(1, 0.0)
    state.processes.start(1, [rank_spec(1, rank=0, world_size=2), rank_spec(2, rank=1, world_size=2)], 0.0)
    state.handle(HostHello("t", 1, "node", 5, 4, 0), (), host_peer(1), 0.0)
    state.handle(Hello("t", 1, 77, "cpu"), (), rank_peer(1), 0.0)
    return state


def answers(effects: list[Effect]) -> list[object]:
    return [each for effect in effects if isinstance(effect, Resolve) for each in effect.answers]


def lose(state: State) -> list[Effect]:
    return state.handle(Lost(1, -1, 9, "", (), 0), (), host_peer(1), 1.0)


def test_names_are_kept_per_rank(state: State) -> None:
    assert state.handle(Names({"x": "int", "y": "str"}), (), rank_peer(1), 0.0) == []
    state.handle(Names({"x": "Tensor[2] float32"}, ("y", "unknown")), (), rank_peer(1), 0.0)
    assert state.ranks[1].names == {"x": "Tensor[2] float32"}
    assert state.ranks[2].names == {}


def test_names_are_bounded_and_only_ranks_may_send_them(state: State) -> None:
    for start in range(0, 3 * MAX_NAMES, 1000):
        state.handle(Names({f"v{i}": "int" for i in range(start, start + 1000)}), (), rank_peer(1), 0.0)
    assert len(state.ranks[1].names) == MAX_NAMES
    state.handle(Names({"v0": "str"}, ("v1",)), (), rank_peer(1), 0.0)
    assert state.ranks[1].names["v0"] == "str"
    state.handle(Names({"v0": "x" * 50_000_000, "y" * 50_000_000: "int"}), (), rank_peer(1), 0.0)
    assert state.ranks[1].names["v0"] == "str"
    assert len(state.ranks[1].names) == MAX_NAMES - 1
    before = state.dropped_messages
    state.handle(Names({"x": "int"}), (), host_peer(1), 0.0)
    state.handle(Names({"x": "int"}), (), rank_peer(9), 0.0)
    assert state.dropped_messages == before + 2


def test_a_dead_rank_has_no_names(state: State) -> None:
    state.handle(Names({"x": "int"}), (), rank_peer(1), 0.0)
    lose(state)
    assert state.ranks[1].names == {}


def test_an_out_of_band_request_does_not_count_as_work(state: State) -> None:
    state.request(5, [1], pack(Run(5, "", 1)), "cell [1]", 0.0)
    failure = Failure("exception", "ValueError", "no")
    state.ranks[1].open_requests.clear()
    state.ranks[1].last_error = failure.headline()
    before = state.ranks[1].busy_since, state.ranks[1].last_request
    assert state.ask(7, [1], ASK, 0.0) == [Send(rank_peer(1), ASK)]
    assert state.ranks[1].state == "failed"
    (answer,) = answers(state.handle(Result(7, Payload(b"x")), (), rank_peer(1), 1.0))
    assert isinstance(answer, Value)
    assert state.ranks[1].state == "failed", "it keeps its error"
    assert (state.ranks[1].busy_since, state.ranks[1].last_request) == before
    assert not state.ranks[1].out_of_band


def test_an_out_of_band_request_resolves_in_any_case(state: State) -> None:
    (answer,) = answers(state.ask(6, [2], ASK, 0.0))
    assert isinstance(answer, Failure), "it is not up"
    state.ask(7, [1], ASK, 0.0)
    state.cancel(7, 0.5)
    state.ask(8, [1], ASK, 0.0)
    assert [type(answer) for answer in answers(lose(state))] == [Failure]
    (answer,) = answers(state.ask(9, [1], ASK, 0.0))
    assert isinstance(answer, Failure)
    assert len(state.requests) == 0
