"""The controller's part of debugging, without processes."""

from __future__ import annotations

import pytest

from monarch_kernel.base.events import StopEvent
from monarch_kernel.errors import Failure
from monarch_kernel.features.debugging.controller import DebuggingExtension
from monarch_kernel.net.transport.base import host_peer, rank_peer
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import (
    Continued,
    DebugInput,
    Failed,
    Hello,
    HostHello,
    Lost,
    Message,
    Output,
    OutputChunk,
    Payload,
    Ping,
    Result,
    SkipBreakpoint,
    Stopped,
)
from monarch_kernel.runtime.controller.effects import Effect, Halt, Tell
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.testing import rank_spec
from tests.runtime.controller.states import sends

NOW = 100.0


def debugging(state: State) -> DebuggingExtension:
    extension = state.extensions[DebuggingExtension]
    assert isinstance(extension, DebuggingExtension)
    return extension


@pytest.fixture
def state() -> State:
    """Two ranks, 1 and 2, that run request 7."""
    state = State()
    debugging(state).attendant = lambda future: None
    state.hosts.add(1, NOW)
    state.processes.start(1, [rank_spec(proc, rank=proc - 1, world_size=2, mesh="t") for proc in (1, 2)], NOW)
    state.handle(HostHello("", 1, "here", 1, 1, 0), (), host_peer(1), NOW)
    for proc in (1, 2):
        state.handle(Hello("", proc, 10 + proc, "cpu"), (), rank_peer(proc), NOW)
    state.request(7, [1, 2], pack(Ping(7)), "cell [3]", NOW)
    return state


def stop_events(effects: list[Effect]) -> list[StopEvent]:
    return [effect.event for effect in effects if isinstance(effect, Tell) and isinstance(effect.event, StopEvent)]


def sent(effects: list[Effect]) -> list[Message]:
    return [message for _, message in sends(effects)]


def stop(state: State, *, turn: int = 1, written: tuple[int, int] = (0, 0)) -> list[Effect]:
    message = Stopped(7, turn, "cell [3], line 2", "said\n", "(Pdb) ", True, written)
    return state.handle(message, (), rank_peer(1), NOW + turn)


def test_a_stop_is_reported_and_takes_one_line(state: State) -> None:
    (event,) = stop_events(stop(state))
    assert event == StopEvent(1, 0, "t", 7, "cell [3]", 1, "cell [3], line 2", "said\n", "(Pdb) ", True, NOW + 1)
    assert debugging(state).stops([1]) == [event]
    assert sent(debugging(state).answer(event, "n\n")) == [DebugInput(7, 1, "n\n")]
    assert not debugging(state).stops(request=7)[0].is_waiting
    assert debugging(state).answer(event, "n\n") == []
    assert debugging(state).skip(event, "why") == []
    (second,) = stop_events(stop(state, turn=2))
    assert debugging(state).answer(event, "n\n") == []
    assert sent(debugging(state).skip(second, "why")) == [SkipBreakpoint(7, 2, "why")]
    assert state.handle(Continued(7), (), rank_peer(1), NOW) == []
    assert debugging(state).stops([1]) == []


def test_a_stop_waits_for_the_output_before_it(state: State) -> None:
    assert stop(state, written=(5, 5)) == []
    assert debugging(state).stops([1]) == []
    chunks = tuple(OutputChunk(1, stream, "text\n", 5) for stream in ("stdout", "stderr"))
    (event,) = stop_events(state.handle(Output(chunks), (), host_peer(1), NOW))
    assert event.where == "cell [3], line 2"


@pytest.mark.parametrize(
    "end",
    [Result(7, Payload()), Failed(7, Failure("exception", "E", "m")), Lost(1, 0, 9, "", (), 0)],
    ids=["answer", "failure", "death"],
)
def test_a_stop_ends_with_its_request(state: State, end: Message) -> None:
    (event,) = stop_events(stop(state))
    state.handle(end, (), host_peer(1) if isinstance(end, Lost) else rank_peer(1), NOW)
    assert debugging(state).stops([1]) == []
    assert debugging(state).answer(event, "n\n") == []


def test_a_stop_of_a_request_that_is_not_open_is_dropped(state: State) -> None:
    state.handle(Result(7, Payload()), (), rank_peer(1), NOW)
    dropped_messages = state.dropped_messages
    assert stop(state) == []
    assert state.dropped_messages == dropped_messages + 1
    assert debugging(state).stops([1]) == []


def test_a_quiet_request_leaves_the_last_error(state: State) -> None:
    state.handle(Failed(7, Failure("exception", "E", "m")), (), rank_peer(1), NOW)
    assert state.ranks[1].state == "failed"
    state.request(8, [1], pack(Ping(8)), "", NOW, quiet=True)
    state.handle(Result(8, Payload()), (), rank_peer(1), NOW)
    assert state.ranks[1].state == "failed"


def test_without_a_user_to_ask_the_code_continues(state: State) -> None:
    debugging(state).attendant = None
    assert sent(stop(state)) == [
        SkipBreakpoint(7, 1, "code can stop only in a notebook, where a user can answer the prompt")
    ]
    assert not debugging(state).stops()[0].is_waiting


def test_a_thread_that_waits_is_woken_before_views_show_the_stop(state: State) -> None:
    halt, tell = stop(state)
    assert halt == Halt(7)
    assert isinstance(tell, Tell)


def test_a_cancelled_request_stays_stopped_until_its_rank_ends_it(state: State) -> None:
    (event,) = stop_events(stop(state))
    state.cancel(7, NOW)
    assert debugging(state).stops() == [event]
    state.handle(Failed(7, Failure("interrupted", "KeyboardInterrupt", "")), (), rank_peer(1), NOW)
    assert debugging(state).stops() == []
