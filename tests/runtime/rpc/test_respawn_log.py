"""Actors are spawned again in a process that replaces another, before it gets any other request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import rank_peer
from monarch_kernel.net.wire.codec import Packed, join, pack, split
from monarch_kernel.net.wire.messages import Failed, Payload, Ping, ProcessStatus, Result, Spawn
from monarch_kernel.runtime.rpc.ids import numbers, origin_of
from monarch_kernel.runtime.rpc.peer_requests import Connect, PeerEffect, Peers, Respawned
from monarch_kernel.runtime.rpc.requests import Send
from monarch_kernel.runtime.rpc.respawn_log import RespawnLog

ME = 1
DEATH = Failure("lost", "RankDied", "killed by SIGKILL")
STOPPED = Failure("stopped", "Stopped", "down")


def maker(actor: int) -> Any:
    def make(id: int, living: Sequence[int] | None = None) -> Packed:
        part = None if living is None else tuple((proc, proc) for proc in living)
        return pack(Spawn(id, actor, f"actor {actor}", (), Payload(), (), 0, part))

    return make


def of(kept: RespawnLog, *procs: int) -> list[tuple[int, tuple[int, ...]]]:
    return [(each.actor, having) for each, having in kept.of(procs)]


def test_spawns_are_listed_for_a_process_in_order() -> None:
    kept = RespawnLog()
    kept.add(7, (2, 3), "seven", maker(7), 1)
    kept.add(5, (3, 4), "five", maker(5), 2)
    assert of(kept, 3) == [(7, (3,)), (5, (3,))]
    assert of(kept, 4, 2) == [(7, (2,)), (5, (4,))]
    assert of(kept, 9) == []


def test_a_stopped_actor_is_forgotten_in_its_processes() -> None:
    kept = RespawnLog()
    kept.add(7, (2, 3), "seven", maker(7), 1)
    kept.add(5, (3,), "five", maker(5), 2)
    kept.forget((2,), 7)
    assert of(kept, 2, 3) == [(7, (3,)), (5, (3,))]
    kept.forget((3,))
    assert len(kept) == 0


def test_an_actor_that_was_never_made_is_not_made_again() -> None:
    kept = RespawnLog()
    kept.add(7, (2, 3), "seven", maker(7), 1)
    kept.refused(1, 2)
    kept.over(1)
    kept.refused(1, 3)  # a number that is no longer known
    assert of(kept, 2, 3) == [(7, (3,))]


# -- on a rank that has spawned actors


def spawned() -> Peers:
    """A rank that has spawned two actors on its peers 2 and 3, where they are up."""
    state = Peers(ME, rank_peer(ME), numbers(0, ME))
    for i, actor in enumerate((70, 71)):
        state.request(10 + i, (2, 3), maker(actor)(10 + i), 0.0, "note", (actor, maker(actor)))
    for proc in (2, 3):
        state.news(ProcessStatus(proc, 0, f"ipc://{proc}"), 0.0)
        for id in (10, 11):
            state.answered(proc, Result(id, Payload()), (), 0.0)
    return state


def sent(effects: list[PeerEffect]) -> list[tuple[bytes, Any]]:
    return [(e.peer, next(split(join([e.packed])))[0]) for e in effects if isinstance(e, Send)]


def test_a_successor_first_gets_the_spawns_of_the_former_process() -> None:
    state = spawned()
    state.news(ProcessStatus(2, 0, "", DEATH), 0.0)
    effects = state.news(ProcessStatus(2, 1, "ipc://2"), 0.0)
    assert effects[0] == Connect(rank_peer(2, 1), "ipc://2")
    assert [(e.actor, e.proc) for e in effects if isinstance(e, Respawned)] == [(70, 2), (71, 2)]
    messages = sent(effects)
    assert [(peer, type(m), m.actor, m.living) for peer, m in messages] == [
        (rank_peer(2, 1), Spawn, 70, ((3, 3),)),
        (rank_peer(2, 1), Spawn, 71, ((3, 3),)),
    ]
    assert all(origin_of(m.id) == ME for _, m in messages)
    assert len(state.requests) == 2
    for _, message in messages:
        state.answered(2, Result(message.id, Payload()), (), 0.0)
    assert len(state.requests) == 0


def test_waiting_messages_come_after_the_spawns() -> None:
    """The news of its death is missing, or arrives late."""
    state = spawned()
    state.request(12, (2,), pack(Ping(12)), 0.0)
    effects = state.news(ProcessStatus(2, 1, "ipc://2"), 0.0)
    assert [type(message) for _, message in sent(effects)] == [Spawn, Spawn]
    assert [type(message) for _, message in sent(state.request(13, (2,), pack(Ping(13)), 0.0))] == [Ping]


def test_nothing_is_made_again_in_the_first_known_process() -> None:
    state = Peers(ME, rank_peer(ME), numbers(0, ME))
    state.request(10, (2,), maker(70)(10), 0.0, "note", (70, maker(70)))
    effects = state.news(ProcessStatus(2, 4, "ipc://2"), 0.0)
    assert [(type(message), message.living) for _, message in sent(effects)] == [(Spawn, None)]


def test_dead_processes_are_not_listed_as_living() -> None:
    state = spawned()
    for proc in (2, 3):
        state.news(ProcessStatus(proc, 0, "", DEATH), 0.0)
    assert {message.living for _, message in sent(state.news(ProcessStatus(2, 1, "ipc://2"), 0.0))} == {()}
    assert {message.living for _, message in sent(state.news(ProcessStatus(3, 1, "ipc://3"), 0.0))} == {()}, (
        "2 is not up yet"
    )


def test_actors_that_are_made_again_do_not_ask_each_other() -> None:
    """Each would wait for the other."""
    state = spawned()
    state.news(ProcessStatus(2, 0, "", DEATH), 0.0)
    first = sent(state.news(ProcessStatus(2, 1, "ipc://2"), 0.0))
    assert {message.living for _, message in first} == {((3, 3),)}
    assert {message.living for _, message in sent(state.news(ProcessStatus(3, 1, "ipc://3"), 0.0))} == {()}
    for _, message in first:
        state.answered(2, Result(message.id, Payload()), (), 0.0)
    assert {message.living for _, message in sent(state.news(ProcessStatus(3, 2, "ipc://3"), 0.0))} == {((2, 2),)}


def test_stopped_actors_are_not_made_again_and_failed_ones_are() -> None:
    state = spawned()
    state.requests.respawn_log.forget((2,), 70)
    state.news(ProcessStatus(2, 0, "", DEATH), 0.0)
    ((_, again),) = sent(state.news(ProcessStatus(2, 1, "ipc://2"), 0.0))
    assert again.actor == 71
    state.answered(2, Failed(again.id, Failure("exception", "ValueError", "no")), (), 0.0)
    state.news(ProcessStatus(2, 1, "", DEATH), 0.0)
    ((_, again),) = sent(state.news(ProcessStatus(2, 2, "ipc://2"), 0.0))
    assert again.actor == 71


def test_a_process_without_its_actor_is_not_listed_as_living() -> None:
    state = spawned()
    state.requests.respawn_log.ended(70, 3)
    state.news(ProcessStatus(2, 0, "", DEATH), 0.0)
    again = {message.actor: message.living for _, message in sent(state.news(ProcessStatus(2, 1, "ipc://2"), 0.0))}
    assert again == {70: (), 71: ((3, 3),)}
    for id in list(state.requests):
        state.answered(2, Result(id, Payload()), (), 0.0)
    for _, message in sent(state.news(ProcessStatus(3, 1, "ipc://3"), 0.0)):
        assert message.living == ((2, 2),)
        state.answered(3, Result(message.id, Payload()), (), 0.0)
    again = {message.actor: message.living for _, message in sent(state.news(ProcessStatus(2, 2, "ipc://2"), 0.0))}
    assert again == {70: ((3, 3),), 71: ((3, 3),)}


def test_nothing_is_kept_for_processes_that_were_stopped() -> None:
    state = spawned()
    for proc in (2, 3):
        state.news(ProcessStatus(proc, 0, "", STOPPED), 0.0)
    assert len(state.requests.respawn_log) == 0
