"""Ranks that have made fewer process groups than others continue from the highest count, when no rank of the mesh works."""

from __future__ import annotations

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import Peer, rank_peer
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Failed, Message, Payload, Ping, Result, SkipGroupNames
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.testing import rank_spec
from tests.runtime.controller.states import sends, state_of_three


def ask(state: State, id: int, *procs: int) -> None:
    state.request(id, procs, pack(Ping(id)), "", 0.0)


def skips(state: State, proc: int, message: Result | Failed) -> list[tuple[Peer, Message]]:
    """What the answer of a rank makes the controller send."""
    return sends(state.handle(message, (), rank_peer(proc), 0.0), SkipGroupNames)


def result(id: int, groups: int = -1) -> Result:
    return Result(id, Payload(), groups=groups)


def failed(id: int, groups: int) -> Failed:
    return Failed(id, Failure("exception", "ValueError", ""), groups=groups)


def test_ranks_that_are_behind_catch_up_at_the_end_of_a_request() -> None:
    state = state_of_three(1, 2, 3)
    ask(state, 10, 1, 2, 3)
    assert skips(state, 1, result(10, 5)) == []
    assert skips(state, 2, failed(10, 3)) == []
    assert skips(state, 3, result(10, 5)) == [(rank_peer(2), SkipGroupNames(5))]
    ask(state, 11, 1, 2, 3)
    assert [each for proc in (1, 2, 3) for each in skips(state, proc, result(11, 5))] == []


def test_ranks_outside_of_the_request_catch_up_too() -> None:
    state = state_of_three(1, 2, 3)
    ask(state, 10, 1, 2, 3)
    assert [each for proc in (1, 2, 3) for each in skips(state, proc, result(10, 1))] == []
    ask(state, 11, 2)
    assert skips(state, 2, result(11, 2)) == [(rank_peer(proc), SkipGroupNames(2)) for proc in (1, 3)]


def test_nothing_is_sent_while_a_rank_of_the_mesh_works() -> None:
    """It may be making a group under the next name, together with ranks that have made theirs."""
    state = state_of_three(1, 2, 3)
    ask(state, 9, 1, 2, 3)
    for proc in (1, 2, 3):
        assert skips(state, proc, result(9, 1)) == []
    ask(state, 10, 1, 2)
    ask(state, 11, 3)
    assert skips(state, 1, result(10, 2)) == skips(state, 2, result(10, 2)) == []
    assert skips(state, 3, result(11)) == [(rank_peer(3), SkipGroupNames(2))]


def test_ranks_without_groups_and_other_meshes_are_left_alone() -> None:
    state = state_of_three(1, 2, 3)
    state.processes.start(1, [rank_spec(4, rank=0, world_size=1, mesh="other")], 0.0)
    ask(state, 10, 1, 2, 3)
    assert skips(state, 1, result(10, 4)) == skips(state, 2, result(10, -1)) == skips(state, 3, result(10, 4)) == []
