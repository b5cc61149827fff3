"""Requests to ranks that do not count as work: ranks that are up get them, and failures answer for the others at once."""

from __future__ import annotations

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import rank_peer
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import GetStacks, Interrupt, Payload, Result, Run
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.rpc.requests import Resolve, Send
from tests.runtime.controller.states import state_of_three

LOOK = pack(GetStacks(7))


def resolved(effects: list[Effect]) -> Resolve:
    (found,) = [effect for effect in effects if isinstance(effect, Resolve)]
    return found


def test_all_ranks_that_are_up_get_the_request_even_if_busy() -> None:
    state = state_of_three(1, 2)
    state.request(5, [1], pack(Run(5, "", 1)), "cell [1]", 0.0)
    assert state.ask(7, [1, 2, 3], LOOK, 1.0) == [Send(rank_peer(1), LOOK), Send(rank_peer(2), LOOK)]
    assert state.handle(Result(7, Payload(b"one")), (), rank_peer(1), 1.0) == []
    answers = resolved(state.handle(Result(7, Payload(b"two")), (), rank_peer(2), 1.0)).answers
    assert [type(answer).__name__ for answer in answers] == ["Value", "Value", "Failure"]
    assert [state.ranks[proc].state for proc in (1, 2, 3)] == ["running", "idle", "starting"]


def test_a_cancel_gives_up_ranks_that_do_not_answer() -> None:
    state = state_of_three(1, 2)
    state.ask(7, [1, 2], LOOK, 1.0)
    state.handle(Result(7, Payload(b"one")), (), rank_peer(1), 1.0)
    answers = resolved(state.cancel(7, 1.4)).answers
    assert isinstance(answers[1], Failure)
    assert answers[1].etype == "CancelledError"
    state.handle(Result(7, Payload(b"late")), (), rank_peer(2), 2.0)
    assert len(state.requests) == 0
    assert not state.ranks[2].out_of_band


def test_answers_so_far() -> None:
    state = state_of_three(1, 2)
    state.request(5, [1, 2], pack(Run(5, "", 1)), "cell [1]", 0.0)
    assert state.requests.answers(5) == [None, None]
    state.handle(Result(5, Payload(b"x")), (), rank_peer(2), 1.0)
    first, second = state.requests.answers(5)
    assert first is None
    assert second is not None
    state.handle(Result(5, Payload(b"y")), (), rank_peer(1), 1.0)
    assert state.requests.answers(5) == []


def test_an_abort_goes_to_the_ranks_that_have_not_answered() -> None:
    state = state_of_three(1, 2)
    state.request(5, [1, 2], pack(Run(5, "", 1)), "cell [1]", 0.0)
    state.handle(Result(5, Payload(b"x")), (), rank_peer(2), 1.0)
    assert state.requests.interrupt(5, abort=True) == [Send(rank_peer(1), pack(Interrupt(5, True)))]
    assert state.interrupt_ranks([1, 2], abort=True) == [Send(rank_peer(1), pack(Interrupt(5, True)))]
