"""The state of the controller when processes replace ranks that died: messages of the two are never confused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from monarch_kernel.base.events import OutputEvent
from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import Peer, host_peer, proc_of, rank_peer
from monarch_kernel.net.wire.messages import (
    Attach,
    Failed,
    Hello,
    HostHello,
    Interrupt,
    KillRanks,
    Lost,
    Message,
    Names,
    Output,
    OutputChunk,
    Payload,
    Ping,
    Result,
    StartRanks,
    Stopped,
)
from monarch_kernel.runtime.controller.effects import Effect, Expired, HostGone, LostEvent, RestartDue, Tell
from monarch_kernel.runtime.controller.processes import RANK_DEADLINE_S
from monarch_kernel.runtime.controller.restart_policy import RestartPolicy
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.testing import rank_spec
from tests.runtime.controller.states import sends
from tests.runtime.controller.test_state import TOKEN, AnyOrder, RankModel, ask, resolves, running, text_of

AGENT = host_peer(1)


class AnyOrderWithHeals(AnyOrder):
    """As `AnyOrder`, and sometimes a process replaces a rank that died, or one that is ended for this."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: set[int] = set()
        self.unstarted: set[int] = set()  # processes whose predecessor has not ended
        self.started: dict[int, int] = {}
        self.gone: list[Peer] = []

    def sent(self, peer: bytes, message: Message) -> None:
        if isinstance(message, StartRanks):
            for spec in message.specs:
                assert spec.incarnation > self.started.get(spec.proc, -1)
                self.started[spec.proc] = spec.incarnation
                if spec.incarnation == self.ranks[spec.proc].incarnation:
                    assert spec.proc not in self.unstarted, "started beside the one before it"
        super().sent(peer, message)

    @rule(data=st.data())
    def stop_ranks(self, data: st.DataObject) -> None:
        super().stop_ranks(data)
        self.stopped = {proc for proc, record in self.state.ranks.items() if record.stopping}

    def replaced(self, proc: int, *, ended: bool) -> None:
        rank = self.ranks[proc]
        self.gone.append(self.peer(proc))
        host = rank.host
        self.ranks[proc] = RankModel(host, rank.incarnation + 1)
        (self.unstarted.discard if ended else self.unstarted.add)(proc)
        if self.hosts[host]:
            self.dies(proc, "its host agent has ended, so it was not started", releases_held=False)

    @rule(data=st.data())
    def heal(self, data: st.DataObject) -> None:
        procs = data.draw(st.lists(st.sampled_from(sorted(self.ranks)), unique=True, max_size=3))
        for proc in procs:
            if self.ranks[proc].dead and proc not in self.stopped:
                self.replaced(proc, ended=proc not in self.unstarted)
        self.absorb(self.state.processes.heal(procs, self.now))

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """End a live rank and replace it at once; the agent reports its end later."""
        proc = self.rank_ids(data)
        if self.ranks[proc].dead:
            return
        running_note = self.ranks[proc].up and self.owes(proc)
        self.dies(proc, "restarted" + ("; it was running note" if running_note else ""), releases_held=True)
        effects = self.state.processes.retire([proc], "restarted", 0.0, self.now)
        assert not any(isinstance(effect, Tell) and isinstance(effect.event, LostEvent) for effect in effects)
        self.absorb(effects)
        self.replaced(proc, ended=False)
        self.absorb(self.state.processes.heal([proc], self.now))

    def lost_at(self, proc: int) -> None:
        """An agent's report of the former process must not count for the new one."""
        if proc not in self.unstarted:
            super().lost_at(proc)
            return
        self.unstarted.discard(proc)
        message = Lost(proc, 1, 0, f"lost {proc}", (), 0)
        self.absorb(self.state.handle(message, (), host_peer(self.ranks[proc].host), self.now))

    def lose_host(self, host: int) -> None:
        self.unstarted -= {proc for proc, rank in self.ranks.items() if rank.host == host}
        super().lose_host(host)

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), kind=st.sampled_from([Result, Failed, Hello, Names, Stopped]))
    def one_that_is_gone_speaks(self, data: st.DataObject, kind: type[Message]) -> None:
        peer = data.draw(st.sampled_from(self.gone), label="gone")
        id = data.draw(st.sampled_from([*self.requests, 1]))
        messages = {
            Result: Result(id, Payload(b"from the grave")),
            Failed: Failed(id, Failure("exception", "E", "from the grave")),
            Hello: Hello(TOKEN, proc_of(peer), 1, "cpu"),
            Names: Names({"x": "int"}),
            Stopped: Stopped(id, 1, "here", "", ">", True),
        }
        assert self.state.handle(messages[kind], (), peer, self.now) == []


AnyOrderWithHeals.TestCase.settings = settings(stateful_step_count=40)
TestAnyOrderWithHeals = AnyOrderWithHeals.TestCase


# -- one thing at a time


def lose(state: State, proc: int, now: float = 0.0) -> None:
    state.handle(Lost(proc, 0, 9, "", (), 0), (), AGENT, now)


def test_heal_starts_a_process_for_a_dead_rank() -> None:
    state = running()
    lose(state, 2)
    ((peer, start),) = sends(state.processes.heal((1, 2), 1.0))
    assert peer == AGENT
    assert isinstance(start, StartRanks)
    (spec,) = start.specs
    assert (spec.proc, spec.rank, spec.incarnation) == (2, 1, 1)
    assert state.ranks[1].state == "idle"
    assert state.ranks[2].state == "starting"
    assert ask(state, 7) != [], "the other rank gets the request at once"
    came = sends(state.handle(Hello(TOKEN, 2, 300, "cpu"), (), rank_peer(2, 1), 2.0))
    assert came == [(b"R2+1", Ping(7))]
    assert state.processes.heal((1, 2), 3.0) == [], "nobody is dead"


def test_a_replaced_rank_counts_as_up_since_its_first_process_was() -> None:
    state = running()
    state.ranks[2].up_at = 0.5
    lose(state, 2)
    state.processes.heal((2,), 1.0)
    state.handle(Hello(TOKEN, 2, 300, "cpu"), (), rank_peer(2, 1), 2.0)
    assert (state.ranks[2].up, state.ranks[2].up_at) == (True, 0.5)


def test_a_rank_that_first_comes_up_as_a_replacement_counts_from_then() -> None:
    state = running()
    state.ranks[2].up_at = 0.0
    lose(state, 2)
    state.processes.heal((2,), 1.0)
    state.handle(Hello(TOKEN, 2, 300, "cpu"), (), rank_peer(2, 1), 2.0)
    assert state.ranks[2].up_at == 2.0


def test_requests_of_the_dead_process_are_not_repeated() -> None:
    state = running()
    ask(state, 1, (2,))
    lose(state, 2)
    state.processes.heal((2,), 0.0)
    assert sends(state.handle(Hello(TOKEN, 2, 300, "cpu"), (), rank_peer(2, 1), 0.0)) == []
    assert len(state.requests) == 0


def test_a_stopped_rank_is_not_replaced() -> None:
    state = running()
    state.processes.stop((2,), "down", 0.0, 0.0)
    assert state.processes.heal((1, 2), 0.0) == []
    assert state.ranks[2].state == "stopped"


def test_a_live_rank_is_ended_before_its_successor_starts() -> None:
    state = running()
    ask(state, 1, (2,))
    effects = state.processes.retire((2,), "ended by %mesh restart", 2.0, 0.0)
    (over,) = resolves(effects)
    assert text_of(over.answers[0]) == "ended by %mesh restart; it was running note 1"
    assert sends(effects) == [(AGENT, KillRanks((2,), 2.0, True))]
    assert state.processes.heal((2,), 0.0) == []
    assert ask(state, 2, (2,)) == []
    ((peer, start),) = sends(state.handle(Lost(2, 0, 15, "", (), 0), (), AGENT, 1.0))
    assert (peer, type(start)) == (AGENT, StartRanks)
    assert state.ranks[2].state == "starting"
    came = sends(state.handle(Hello(TOKEN, 2, 300, "cpu"), (), rank_peer(2, 1), 2.0))
    assert came == [(b"R2+1", Ping(2))]


def test_a_process_that_replaces_another_belongs_to_the_same_view_of_hosts() -> None:
    state = running()
    state.processes.start(1, [rank_spec(9)], 0.0, view=3)
    state.handle(Lost(9, 0, 9, "", (), 0), (), AGENT, 1.0)
    former = state.ranks[9]
    state.processes.heal((9,), 2.0)
    assert state.ranks[9] is not former
    assert state.ranks[9].view == 3


def up_again(state: State, proc: int, incarnation: int) -> list[Effect]:
    """The new process says hello, and answers request 2 after writing something."""
    peer = rank_peer(proc, incarnation)
    state.handle(Hello(TOKEN, proc, 300, "cpu"), (), peer, 0.0)
    state.handle(Output((OutputChunk(proc, "stdout", "text", 5),)), (), AGENT, 0.0)
    assert state.handle(Result(2, Payload(b"answer"), {}, (6, 0)), (), peer, 0.0) == [], "not all output has arrived"
    return state.handle(Output((OutputChunk(proc, "stdout", "text", 6),)), (), AGENT, 0.0)


def test_output_of_the_former_process_does_not_count_for_the_new_one() -> None:
    """The new process counts its marks from the start, and the request that the former one wrote for is over."""
    state = running()
    ask(state, 1, (2,))
    state.processes.retire((2,), "restarted", 0.0, 0.0)
    state.processes.heal((2,), 0.0)
    ask(state, 2, (2,))
    last = Output((OutputChunk(2, "stdout", "last words", 10_000),))
    (told,) = state.handle(last, (), AGENT, 0.0)
    assert isinstance(told, Tell)
    assert isinstance(told.event, OutputEvent)
    assert (told.event.request, told.event.text) == (1, "last words")
    assert state.ranks[2].last_line == ""
    (over,) = resolves([*state.handle(Lost(2, 0, 9, "", (), 0), (), AGENT, 0.0), *up_again(state, 2, 1)])
    assert (over.id, text_of(over.answers[0])) == (2, "answer"), "its marks count from the start"


def test_no_successor_starts_after_the_mesh_was_stopped() -> None:
    state = running()
    state.processes.retire((2,), "restarted", 0.0, 0.0)
    state.processes.heal((2,), 0.0)
    assert sends(state.processes.stop((1, 2), "down", 0.0, 0.0)) == [(AGENT, KillRanks((1, 2), 0.0))]
    assert state.handle(Lost(2, 0, 9, "", (), 0), (), AGENT, 0.0) == []
    assert state.ranks[2].state == "stopped"


def test_ranks_of_a_lost_host_start_on_its_replacement() -> None:
    state = running()
    state.processes.host_gone(1, "killed", (), 0.0)
    state.processes.heal((1,), 0.0)
    assert state.ranks[1].state == "dead"
    assert text_of(state.ranks[1].death) == "its host agent has ended, so it was not started"
    state.hosts.add(2, 0.0)
    assert state.processes.heal((1, 2), 0.0, hosts={1: 2}) == []
    hello = state.handle(HostHello(TOKEN, 2, "machine1", 1, 1, 0), (), host_peer(2), 0.0)
    ((peer, start),) = sends(hello)
    assert isinstance(start, StartRanks)
    assert (peer, [spec.incarnation for spec in start.specs]) == (host_peer(2), [2, 1])


def test_a_rank_that_does_not_come_up_can_be_replaced_once_it_has_ended() -> None:
    state = running()
    lose(state, 2)
    state.processes.heal((2,), 0.0)
    late = RANK_DEADLINE_S + 1
    assert len(state.tick(late)) == 1
    state.processes.give_up(1, (2,), (), late)
    assert state.ranks[2].state == "dead"
    assert state.processes.heal((2,), late) == [], "the agent has the order to end it, but it may still live"
    ((_, start),) = sends(state.handle(Lost(2, 0, 9, "", (), 0), (), AGENT, late))
    assert isinstance(start, StartRanks)
    assert start.specs[0].incarnation == 2


def test_an_interrupt_of_a_request_of_the_former_process_is_not_sent() -> None:
    state = running()
    ask(state, 1)
    lose(state, 2)
    state.processes.heal((2,), 0.0)
    assert sends(state.requests.interrupt(1)) == [(b"R1", Interrupt(1))]


def test_a_controller_that_adopts_a_mesh_learns_the_current_incarnations() -> None:
    """The manifest lists the processes from the time when the mesh was started."""
    state = State()
    state.attach({1: [rank_spec(1, world_size=2), rank_spec(2, rank=1, world_size=2)]}, Attach(TOKEN, 9, 1), 0.0)
    hello = HostHello(TOKEN, 1, "machine1", 1, 1, 0, ((1, 0), (2, 3)))
    state.handle(hello, (), AGENT, 0.0)
    assert {peer for peer, _ in sends(state.tick(0.1), Attach)} == {AGENT, b"R1", b"R2+3"}
    assert state.handle(Hello(TOKEN, 2, 20, "cpu"), (), b"R2", 0.2) == []
    state.handle(Hello(TOKEN, 2, 20, "cpu"), (), b"R2+3", 0.2)
    assert state.ranks[2].up
    assert not state.ranks[1].up


def dues(effects: list[Effect]) -> list[tuple[int, ...]]:
    return [effect.procs for effect in effects if isinstance(effect, RestartDue)]


@pytest.mark.parametrize(("restart", "procs"), [("rank", (2,)), ("mesh", (1, 2))])
def test_an_automatic_restart_comes_when_it_is_due(restart: Any, procs: tuple[int, ...]) -> None:
    state = running()
    state.processes.restart_when_lost((1, 2), RestartPolicy(restart, backoff_s=5.0))
    assert dues(state.handle(Lost(2, 0, 9, "", (), 0), (), AGENT, 1.0)) == [procs]
    state.processes.heal((2,), 1.0)
    assert dues(state.handle(Lost(2, 0, 9, "", (), 0), (), AGENT, 2.0)) == []
    assert "in 5.0 s" in text_of(state.ranks[2].death)
    assert dues(state.tick(6.9)) == []
    assert dues(state.tick(7.0)) == [procs]
    assert dues(state.tick(8.0)) == []


@pytest.mark.parametrize("restart", ["rank", "mesh"])
def test_a_mesh_that_the_program_healed_is_not_restarted(restart: Any) -> None:
    state = running()
    state.processes.restart_when_lost((1, 2), RestartPolicy(restart, backoff_s=5.0))
    lose(state, 2)
    state.processes.heal((2,), 0.0)
    lose(state, 2, 1.0)
    state.processes.heal((2,), 2.0)
    assert dues(state.tick(100.0)) == []


def test_owners_get_a_failure_only_if_the_rank_is_not_restarted() -> None:
    state = running()
    state.processes.restart_when_lost((1, 2), RestartPolicy("rank", max_restarts=1))
    kinds = []
    for now in (1.0, 2.0):
        effects = state.handle(Lost(2, 0, 9, "", (), 0), (), AGENT, now)
        kinds += [effect.death.kind for effect in effects if isinstance(effect, HostGone)]
        state.processes.heal((2,), now)
    assert kinds == ["stopped", "lost"]


def test_ranks_that_are_stopped_are_not_restarted() -> None:
    state = running()
    state.processes.restart_when_lost((1, 2), RestartPolicy("rank", backoff_s=5.0))
    lose(state, 2)
    state.processes.heal((2,), 0.0)
    lose(state, 2, 1.0)
    state.processes.stop((1, 2), "down", 0.0, 2.0)
    assert dues(state.tick(100.0)) == []
    assert state.processes.heal((1, 2), 100.0) == []
    assert state.ranks[2].state == "stopped"


@pytest.mark.parametrize("peer", [b"R2", b"R2+2", b"R9+1"])
def test_only_the_current_incarnation_may_say_hello(peer: Peer) -> None:
    state = running()
    lose(state, 2)
    state.processes.heal((2,), 0.0)
    state.handle(Hello(TOKEN, 2, 300, "cpu"), (), peer, 0.0)
    assert state.dropped_messages == 1
    assert not state.ranks[2].up


def test_a_successor_that_does_not_come_up_is_lost() -> None:
    state = running(2)
    assert state.tick(5.0) == []
    state.handle(Lost(1, 1, 0, "", (), 0), (), AGENT, 10.0)
    state.processes.heal((1,), 10.0)
    assert state.tick(10.0 + RANK_DEADLINE_S - 1) == []
    assert state.tick(10.0 + RANK_DEADLINE_S) == [Expired(1, (1,))]
