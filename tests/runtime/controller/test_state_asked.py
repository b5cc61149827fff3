"""Requests to ranks that do not count as work: ranks that are up get them, and failures answer for the others at once."""

from __future__ import annotations

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import host_peer, rank_peer
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import (
    GetStacks,
    Hello,
    HostHello,
    Interrupt,
    Lost,
    Payload,
    ProcessStatus,
    Result,
    Run,
    WatchProcess,
)
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.rpc.requests import Resolve, Send
from monarch_kernel.testing import rank_spec
from tests.runtime.controller.states import sends, state_of_three

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


def test_a_rank_that_was_stopped_reaches_others_until_it_has_ended() -> None:
    state = state_of_three(1, 2)
    state.processes.stop((1,), "mesh stopped", 2.0, 1.0)
    answer = pack(Result(9, Payload(b"of an actor here")))

    def reached() -> list[tuple[int, bool]]:
        news = state.handle(WatchProcess(2), (), rank_peer(1), 1.1)
        return [(status.proc, status.death is None) for _, status in sends(news, ProcessStatus)]  # type: ignore[attr-defined]

    assert (reached(), state.answer_to(1, answer)) == ([(2, True)], [Send(rank_peer(1), answer)])
    (news,) = sends(state.processes.stop((2,), "it, too", 2.0, 1.2), ProcessStatus)
    assert news[0] == rank_peer(1)
    state.handle(Lost(1, 0, 15, "", (), 0), (), host_peer(1), 1.3)
    assert (reached(), state.answer_to(1, answer)) == ([], [])


def test_ranks_get_news_of_the_stop_of_a_process_and_of_its_real_end() -> None:
    state = state_of_three(1, 2)
    state.handle(WatchProcess(1), (), rank_peer(2), 1.0)

    def news(effects: list[Effect]) -> list[tuple[bytes, bool, bool]]:
        return [
            (peer, status.death.kind == "stopped", status.is_retiring)  # type: ignore[attr-defined]
            for peer, status in sends(effects, ProcessStatus)
        ]

    assert news(state.processes.stop((1,), "mesh stopped", 2.0, 1.1)) == [(rank_peer(2), True, True)]
    end = Lost(1, 0, 15, "", (), 0)
    assert news(state.handle(end, (), host_peer(1), 1.2)) == [(rank_peer(2), True, False)]
    assert news(state.handle(end, (), host_peer(1), 1.3)) == []


def test_the_end_of_a_host_is_the_real_end_of_the_processes_that_were_stopped_there() -> None:
    state = state_of_three(1)
    state.hosts.add(2, 0.0)
    state.handle(HostHello("token", 2, "there", 7, 1, 0), (), host_peer(2), 0.0)
    state.processes.start(2, [rank_spec(9)], 0.0)
    state.handle(Hello("token", 9, 70, "cpu"), (), rank_peer(9), 0.0)
    state.handle(WatchProcess(9), (), rank_peer(1), 1.0)
    state.processes.stop((9,), "mesh stopped", 2.0, 1.1)
    (news,) = sends(state.processes.host_gone(2, "it was unplugged", (), 1.2), ProcessStatus)
    assert news[0] == rank_peer(1)
    assert not news[1].is_retiring  # type: ignore[attr-defined]


def test_a_host_that_was_given_back_need_not_report_the_end_of_its_processes() -> None:
    state = state_of_three(1, 2)
    state.handle(WatchProcess(1), (), rank_peer(2), 1.0)
    state.processes.release_host(1, "given back", 2.0, 1.1)
    (news,) = sends(state.processes.given_back(1, 1.2), ProcessStatus)
    assert news[0] == rank_peer(2)
    assert not news[1].is_retiring  # type: ignore[attr-defined]
    assert state.processes.given_back(1, 1.3) == []
