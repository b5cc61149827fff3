"""Adoption of ranks that another controller has started: the state handles their messages in any order."""

from __future__ import annotations

import msgspec

from monarch_kernel.base.events import OutputEvent
from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import host_peer, rank_peer
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import (
    Attach,
    Backlog,
    Detach,
    Detached,
    Failed,
    Forget,
    Goodbye,
    Hello,
    HostHello,
    Lost,
    Message,
    OpenRequest,
    Output,
    OutputChunk,
    Payload,
    Ping,
    RankSpec,
    Release,
    Result,
    Rich,
    Run,
)
from monarch_kernel.runtime.controller.adoption import ASK_LATE_EVERY_S, Resumed
from monarch_kernel.runtime.controller.effects import Attached, BacklogEvent, Effect, RichEvent, Tell
from monarch_kernel.runtime.controller.state import ATTACH_RANKS_S, State
from monarch_kernel.runtime.rpc.requests import RELEASE_AFTER_S, Resolve
from monarch_kernel.testing import rank_spec
from tests.runtime.controller.states import sends

HOST = 1
ATTACH = Attach("t", 123, 1)
CELL = OpenRequest(7, "cell [3]", 60.0, 3)


def recorded(proc: int) -> RankSpec:
    """A rank of two, whose output is recorded."""
    return msgspec.structs.replace(rank_spec(proc, rank=proc - 1, world_size=2), record="/somewhere")


def hello(proc: int, *open_requests: OpenRequest) -> Hello:
    return Hello("t", proc, 100 + proc, "cpu", open_requests)


def agent(state: State, *chunks: OutputChunk, now: float = 0.0) -> list[Effect]:
    """The host agent answers."""
    effects = state.handle(HostHello("t", HOST, "box", 99, 2, 0), (), host_peer(HOST), now)
    return effects + state.handle(Backlog(chunks), (), host_peer(HOST), now)


def rank(state: State, proc: int, message: Message, now: float = 0.0) -> list[Effect]:
    return state.handle(message, (), rank_peer(proc), now)


def attaching() -> State:
    state = State()
    effects = state.attach({HOST: [recorded(1), recorded(2)]}, ATTACH, 0.0)
    assert sends(effects) == [(peer, ATTACH) for peer in (host_peer(HOST), rank_peer(1), rank_peer(2))]
    return state


def test_peers_are_asked_until_they_answer() -> None:
    state = attaching()
    assert [peer for peer, _ in sends(state.tick(0.2))] == [host_peer(HOST), rank_peer(1), rank_peer(2)]
    agent(state)
    rank(state, 1, hello(1))
    assert [peer for peer, _ in sends(state.tick(0.4))] == [rank_peer(2)]
    assert Attached(()) in rank(state, 2, hello(2))
    assert sends(state.tick(0.6)) == []
    assert [record.state for record in state.ranks.values()] == ["idle", "idle"]


def test_a_cell_is_resumed_with_all_its_ranks_whatever_comes_first() -> None:
    state = attaching()
    effects = rank(state, 2, hello(2, CELL))
    effects += rank(state, 2, Result(7, Payload(b"two")))  # the cell had ended there
    effects += agent(state, OutputChunk(1, "stdout", "text\n", 40), OutputChunk(2, "stdout", "", 41))
    assert [type(effect) for effect in effects] == [Tell]
    effects = rank(state, 1, hello(1, CELL), 10.0)
    assert effects == [Resumed(7, "cell [3]", 3, 60.0, (1, 2)), Attached(())]
    assert state.ranks[1].state == "running"
    assert state.ranks[1].busy_since == 10.0 - 60.0
    assert state.ranks[2].state == "idle"
    effects = rank(state, 1, Failed(7, Failure("exception", "ValueError", "no")), 11.0)
    (resolved,) = [effect for effect in effects if isinstance(effect, Resolve)]
    assert [getattr(answer, "payload", answer) for answer in resolved.answers] == [
        Failure("exception", "ValueError", "no"),
        Payload(b"two"),
    ]
    assert sends(effects) == [(rank_peer(1), Forget(7)), (rank_peer(2), Forget(7))]


def test_output_and_displays_wait_for_resumed_cells() -> None:
    state = attaching()
    effects = agent(state, OutputChunk(1, "stdout", "before\n", 0, 3))
    assert effects == [Tell(BacklogEvent((OutputChunk(1, "stdout", "before\n", 0, 3),), {1: 0}))]
    assert rank(state, 1, hello(1, CELL)) == []
    assert rank(state, 1, Rich(7, {"text/html": "x"}, {})) == []
    assert state.handle(Output((OutputChunk(1, "stdout", "after\n", 9),)), (), host_peer(HOST), 0.0) == []
    effects = rank(state, 2, hello(2))
    assert [type(effect) for effect in effects] == [Resumed, Attached, Tell, Tell]
    events = [effect.event for effect in effects if isinstance(effect, Tell)]
    assert isinstance(events[0], RichEvent)
    assert isinstance(events[1], OutputEvent)
    assert events[1].request == 7


def test_a_message_does_not_wait_for_output_that_was_read_before() -> None:
    state = attaching()
    agent(state, OutputChunk(1, "stdout", "", 50), OutputChunk(1, "stderr", "", 51))
    rank(state, 2, hello(2))
    rank(state, 1, hello(1, CELL))
    effects = rank(state, 1, Result(7, Payload(), written=(50, 51)))
    assert any(isinstance(effect, Resolve) for effect in effects)


def test_a_request_that_is_no_cell_keeps_its_rank_busy_but_is_not_resumed() -> None:
    state = attaching()
    agent(state)
    rank(state, 1, hello(1, OpenRequest(5, "counter.add", 1.0)))
    assert rank(state, 2, hello(2)) == [Attached(())]
    assert state.ranks[1].state == "running"
    rank(state, 1, Result(5, Payload()))
    assert state.ranks[1].state == "idle"


def test_output_belongs_to_the_cell_even_if_an_actor_was_called_before() -> None:
    state = attaching()
    agent(state)
    rank(state, 1, hello(1, OpenRequest(5, "counter.add", 70.0), CELL))
    rank(state, 2, hello(2))
    (effect,) = state.handle(Output((OutputChunk(1, "stdout", "x\n", 9),)), (), host_peer(HOST), 0.0)
    assert isinstance(effect, Tell)
    assert isinstance(effect.event, OutputEvent)
    assert effect.event.request == 7


def test_a_rank_that_does_not_answer_delays_the_adoption_only_for_a_while() -> None:
    state = attaching()
    agent(state)
    rank(state, 1, hello(1, CELL))
    assert not any(isinstance(effect, Attached) for effect in state.tick(ATTACH_RANKS_S - 0.1))
    effects = state.tick(ATTACH_RANKS_S)
    assert Resumed(7, "cell [3]", 3, 60.0, (1,)) in effects
    assert Attached((2,)) in effects
    state.request(2**32, [2], pack(Ping(2**32)), "ping", 6.0)  # waits for it
    assert len(sends(state.tick(7.0))) == 1
    assert sends(state.tick(7.2)) == []  # if it is connected, the message is in its queue
    assert len(sends(state.tick(7.0 + ASK_LATE_EVERY_S))) == 1
    assert [message for _, message in sends(rank(state, 2, hello(2), 20.0))] == [Ping(2**32)]
    assert sends(state.tick(100.0)) == []


def test_adoption_does_not_wait_for_a_dead_rank_and_releases_its_peers() -> None:
    state = attaching()
    agent(state)
    rank(state, 1, hello(1, CELL))
    effects = state.handle(Lost(2, 0, 9, "", (), 0), (), host_peer(HOST), 1.0)
    assert Attached(()) in effects
    assert state.ranks[2].death is not None
    assert state.ranks[2].death.etype == "RankDied"  # it had started under the other controller
    assert (rank_peer(1), Release(7)) in sends(state.tick(1.0 + RELEASE_AFTER_S))


def test_forget_goes_only_to_ranks_with_a_record_and_only_for_cells() -> None:
    state = attaching()
    agent(state)
    rank(state, 1, hello(1))
    rank(state, 2, hello(2))
    state.tick(0.2)
    first = 2**32
    state.request(first, [1], pack(Run(first, "x", 1)), "cell [1]", 1.0, is_cell=True)
    assert sends(rank(state, 1, Result(first, Payload()))) == [(rank_peer(1), Forget(first))]
    state.request(first + 1, [1], pack(Ping(first + 1)), "ping", 1.0)
    assert sends(rank(state, 1, Result(first + 1, Payload()))) == []
    other = State()
    other.hosts.add(HOST, 0.0)
    other.processes.start(HOST, [rank_spec(1)], 0.0)
    other.handle(Hello("t", 1, 5, "cpu"), (), rank_peer(1), 0.0)
    other.request(1, [1], pack(Run(1, "x", 1)), "cell [1]", 1.0, is_cell=True)
    assert sends(other.handle(Result(1, Payload()), (), rank_peer(1), 0.0)) == []


def test_leave_all_and_end_all() -> None:
    state = attaching()
    agent(state)
    assert sends(state.host_requests.detach(7, HOST, 30.0)) == [(host_peer(HOST), Detach(7, 30.0))]
    assert [
        effect.id for effect in state.handle(Detached(7), (), host_peer(HOST), 0.0) if isinstance(effect, Resolve)
    ] == [7]
    assert sends(state.processes.leave_all(0.0)) == [(host_peer(HOST), Goodbye(keep=True))]
    assert sends(state.processes.end_all(0.0, 2.0))[-1] == (host_peer(HOST), Goodbye(grace_s=2.0))
