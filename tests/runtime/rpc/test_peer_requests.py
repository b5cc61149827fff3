"""Requests of a rank to its peers: each resolves once, and messages keep their order, for any events in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import CONTROLLER, rank_peer
from monarch_kernel.net.wire.codec import join, pack, split
from monarch_kernel.net.wire.messages import (
    Failed,
    Interrupt,
    Payload,
    Ping,
    ProcessStatus,
    Release,
    Result,
    WatchProcess,
)
from monarch_kernel.runtime.rpc.answers import Value
from monarch_kernel.runtime.rpc.ids import first_number, numbers, origin_of
from monarch_kernel.runtime.rpc.peer_requests import Connect, Disconnect, PeerEffect, Peers
from monarch_kernel.runtime.rpc.requests import Resolve, Send

ME = 1
DEATH = Failure("lost", "RankDied", "killed by SIGKILL")
STOPPED = Failure("stopped", "Stopped", "its owner ended")


def peers() -> Peers:
    return Peers(ME, rank_peer(ME), numbers(0, ME))


def sent(effects: list[PeerEffect]) -> list[tuple[bytes, Any]]:
    """The receivers and messages of the effects."""
    return [(e.peer, next(split(join([e.packed])))[0]) for e in effects if isinstance(e, Send)]


def resolved(effects: list[PeerEffect]) -> dict[int, list[Any]]:
    return {e.id: e.answers for e in effects if isinstance(e, Resolve)}


def up(proc: int, incarnation: int = 0) -> ProcessStatus:
    return ProcessStatus(proc, incarnation, f"ipc://{proc}")


def test_a_number_contains_the_process_that_made_it() -> None:
    for proc, incarnation in ((0, 0), (0, 7), (5, 0), (5, 4095), (1_000_000, 3)):
        assert origin_of(first_number(incarnation, proc)) == proc
    assert next(numbers(1, 5)) > first_number(0, 5) + 2**31


def test_a_peer_is_met_once_and_earlier_requests_wait_in_order() -> None:
    state = peers()
    assert sent(state.request(10, [2], pack(Ping(10)), 0.0)) == [(CONTROLLER, WatchProcess(2))]
    assert state.request(11, [2], pack(Ping(11)), 0.0) == []
    assert state.tell([2], pack(Ping(0))) == []
    effects = state.news(up(2), 0.0)
    assert effects[0] == Connect(rank_peer(2), "ipc://2")
    assert sent(effects) == [(rank_peer(2), Ping(10)), (rank_peer(2), Ping(11)), (rank_peer(2), Ping(0))]
    assert sent(state.request(12, [2], pack(Ping(12)), 0.0)) == [(rank_peer(2), Ping(12))]


def test_a_peer_may_send_messages_before_it_is_known_to_be_up() -> None:
    """Until then it must get no message that could overtake those that wait for it."""
    state = peers()
    assert not state.is_ahead(2, 0)
    state.meet(2)
    assert not state.is_ahead(2, 0)  # nothing waits
    state.request(10, [2], pack(Ping(10)), 0.0)
    assert state.is_ahead(2, 0)
    state.news(up(2), 0.0)
    assert not state.is_ahead(2, 0)
    assert state.is_ahead(2, 1)
    state.news(up(2, 1), 0.0)
    assert not state.is_ahead(2, 1)
    state.request(11, [3], pack(Ping(11)), 0.0)
    state.news(ProcessStatus(3, 0, "", DEATH), 0.0)
    assert not state.is_ahead(3, 0)


def test_the_controller_and_this_process_need_no_introduction() -> None:
    state = peers()
    assert sent(state.request(1, [0, ME], pack(Ping(1)), 0.0)) == [(CONTROLLER, Ping(1)), (rank_peer(ME), Ping(1))]


def test_a_request_resolves_with_the_last_answer_in_the_order_of_its_ranks() -> None:
    state = peers()
    state.request(1, [2, 3], pack(Ping(1)), 0.0)
    for proc in (2, 3):
        state.news(up(proc), 0.0)
    assert state.answered(3, Result(1, Payload(b"x")), (), 0.0) == []
    effects = state.answered(2, Failed(1, DEATH), (), 0.0)
    assert resolved(effects) == {1: [DEATH, Value(Payload(b"x"), (), {})]}
    assert state.answered(2, Result(1, Payload()), (), 0.0) == []  # only once
    assert len(state.requests) == 0


def test_a_death_answers_open_and_later_requests() -> None:
    state = peers()
    state.request(1, [2, 3], pack(Ping(1)), 0.0)
    state.news(up(2), 0.0)
    state.news(up(3), 0.0)
    state.answered(3, Result(1, Payload()), (), 0.0)
    effects = state.news(ProcessStatus(2, 0, "", DEATH), 0.0)
    assert Disconnect(rank_peer(2)) in effects
    assert resolved(effects)[1][0] == DEATH
    assert state.deaths([2, 3]) == {2: DEATH}
    later = resolved(state.request(2, [2, 3], pack(Ping(2)), 0.0))[2]
    assert later[0] == DEATH
    assert later[1].etype == "NotSent"
    assert state.tell([2], pack(Ping(0))) == []


def test_the_connection_to_a_process_that_is_stopped_stays_until_its_real_end() -> None:
    """Its actors may call actors here while they clean up."""
    state = peers()
    state.request(1, [2], pack(Ping(1)), 0.0)
    state.news(up(2), 0.0)
    stop = ProcessStatus(2, 0, "", STOPPED, is_retiring=True)
    effects = state.news(stop, 0.0)
    assert not [effect for effect in effects if isinstance(effect, Disconnect)]
    assert resolved(effects) == {1: [STOPPED]}
    assert resolved(state.request(2, [2], pack(Ping(2)), 0.0)) == {2: [STOPPED]}
    assert state.news(stop, 0.0) == []
    assert state.news(up(2), 0.0) == []
    end = ProcessStatus(2, 0, "", STOPPED)
    assert state.news(end, 0.0) == [Disconnect(rank_peer(2))]
    assert state.news(end, 0.0) == []


def test_a_process_that_is_stopped_before_it_is_known_to_be_up_may_have_connected() -> None:
    state = peers()
    state.meet(2)
    assert state.news(ProcessStatus(2, 0, "", STOPPED, is_retiring=True), 0.0) == []
    assert state.news(ProcessStatus(2, 0, "", STOPPED), 0.0) == [Disconnect(rank_peer(2))]


def test_other_processes_of_a_request_are_released_at_once_by_a_death() -> None:
    state = peers()
    state.request(1, [2, 3], pack(Ping(1)), 0.0)
    state.news(up(2), 0.0)
    state.news(up(3), 0.0)
    effects = state.news(ProcessStatus(2, 0, "", DEATH, mesh="t", rank=5), 0.0)
    assert sent(effects) == [(rank_peer(3), Release(1, "t", 5))]


def test_the_death_of_a_process_that_is_not_up_answers_its_requests() -> None:
    state = peers()
    state.request(1, [2], pack(Ping(1)), 0.0)
    assert resolved(state.news(ProcessStatus(2, 0, "", DEATH), 0.0)) == {1: [DEATH]}


def test_a_successor_gets_only_new_requests() -> None:
    state = peers()
    state.news(up(2), 0.0)
    state.news(ProcessStatus(2, 0, "", DEATH), 0.0)
    effects = state.news(up(2, 1), 0.0)
    assert Connect(rank_peer(2, 1), "ipc://2") in effects
    assert state.deaths([2]) == {}
    assert sent(state.request(1, [2], pack(Ping(1)), 0.0)) == [(rank_peer(2, 1), Ping(1))]
    assert state.news(ProcessStatus(2, 0, "", DEATH), 0.0) == []  # late news of the former process


def test_news_of_a_successor_answers_the_requests_of_the_former_process() -> None:
    state = peers()
    state.news(up(2), 0.0)
    state.request(1, [2], pack(Ping(1)), 0.0)
    effects = state.news(up(2, 1), 0.0)
    assert resolved(effects)[1][0].kind == "lost"
    assert Disconnect(rank_peer(2)) in effects


def test_a_new_controller_gets_the_met_peers_and_owes_no_answers() -> None:
    state = peers()
    state.request(1, [0], pack(Ping(1)), 0.0)
    state.request(2, [2], pack(Ping(2)), 0.0)
    state.news(up(2), 0.0)
    effects = state.controller_is_new(0.0)
    assert resolved(effects)[1][0].etype == "ProgramEnded"
    assert sent(effects) == [(CONTROLLER, WatchProcess(2))]
    assert state.news(up(2), 0.0) == []  # this is known already
    assert len(state.requests) == 1
    assert 2 in resolved(state.news(ProcessStatus(2, 0, "", DEATH), 0.0))
    assert sent(state.request(3, [0], pack(Ping(3)), 0.0)) == [(CONTROLLER, Ping(3))]


def test_interrupts_go_to_processes_that_have_not_answered() -> None:
    state = peers()
    for proc in (2, 3):
        state.news(up(proc), 0.0)
    state.request(1, [2, 3], pack(Ping(1)), 0.0)
    state.answered(2, Result(1, Payload()), (), 0.0)
    assert sent(state.requests.interrupt(1)) == [(rank_peer(3), Interrupt(1))]
    effects = state.cancel(1, 0.0)
    assert sent(effects) == [(rank_peer(3), Interrupt(1))]
    assert resolved(effects)[1][1].etype == "CancelledError"
    assert state.cancel(1, 0.0) == []


def test_processes_that_wait_for_a_failed_one_are_released() -> None:
    state = peers()
    for proc in (2, 3):
        state.news(up(proc), 0.0)
    state.request(1, [2, 3], pack(Ping(1)), 0.0)
    assert not state.requests.has_failed
    state.answered(2, Failed(1, DEATH), (), 5.0)
    assert state.requests.has_failed
    assert state.requests.release_waiting(5.5) == []
    assert sent(state.requests.release_waiting(6.1)) == [(rank_peer(3), Release(1))]
    assert state.requests.release_waiting(6.5) == []


Step = st.one_of(
    st.tuples(st.just("ask"), st.lists(st.integers(2, 4), min_size=1, max_size=3, unique=True)),
    st.tuples(st.just("answer"), st.integers(0, 10)),
    st.tuples(st.just("die"), st.integers(2, 4)),
    st.tuples(st.just("stop"), st.integers(2, 4)),
    st.tuples(st.just("come"), st.integers(2, 4)),
    st.tuples(st.just("cancel"), st.integers(0, 10)),
)


@given(st.lists(Step, max_size=40))
def test_every_request_resolves_once(steps: list[tuple[str, Any]]) -> None:
    state = peers()
    alive: dict[int, bool] = {}
    incarnation = dict.fromkeys((2, 3, 4), -1)
    asked: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    order: dict[bytes, list[int]] = {}
    connected: set[bytes] = set()

    def took(effects: list[PeerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Connect):
                assert effect.peer not in connected
                connected.add(effect.peer)
            elif isinstance(effect, Disconnect):
                connected.discard(effect.peer)
        for id in resolved(effects):
            ends[id] = ends.get(id, 0) + 1
        for peer, message in sent(effects):
            if isinstance(message, Ping):
                order.setdefault(peer, []).append(message.id)

    for kind, what in steps:
        if kind == "ask":
            id = len(asked) + 1
            asked[id] = what
            took(state.request(id, what, pack(Ping(id)), 0.0))
        elif kind == "come" and not alive.get(what):
            incarnation[what] += 1
            alive[what] = True
            took(state.news(up(what, incarnation[what]), 0.0))
        elif kind == "die" and alive.get(what):
            alive[what] = False
            took(state.news(ProcessStatus(what, incarnation[what], "", DEATH), 0.0))
        elif kind == "stop" and alive.get(what):
            alive[what] = False
            was_connected = rank_peer(what, incarnation[what]) in connected
            took(state.news(ProcessStatus(what, incarnation[what], "", STOPPED, is_retiring=True), 0.0))
            assert (rank_peer(what, incarnation[what]) in connected) == was_connected
        elif asked and kind == "answer":
            id = what % len(asked) + 1
            for proc in asked[id]:
                if alive.get(proc):
                    took(state.answered(proc, Result(id, Payload()), (), 0.0))
        elif asked and kind == "cancel":
            took(state.cancel(what % len(asked) + 1, 0.0))
    for proc in (2, 3, 4):
        took(state.news(ProcessStatus(proc, incarnation[proc] + 1, "", DEATH), 0.0))
    assert not connected
    assert ends == dict.fromkeys(asked, 1)
    assert len(state.requests) == 0
    assert all(ids == sorted(ids) for ids in order.values())
