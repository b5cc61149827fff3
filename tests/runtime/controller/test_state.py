"""The state of the controller: each request resolves once, with one answer for each rank, for any events in any order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from monarch_kernel.base.events import OutputEvent
from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import host_peer, proc_of, rank_peer
from monarch_kernel.net.wire.codec import join, pack, split
from monarch_kernel.net.wire.messages import (
    CleansUp,
    Failed,
    Goodbye,
    Hello,
    HostEnding,
    HostHello,
    Interrupt,
    KillRanks,
    Lost,
    Message,
    Output,
    OutputChunk,
    Payload,
    Ping,
    Reading,
    Readings,
    Release,
    Result,
    Rich,
    Run,
    StartRanks,
)
from monarch_kernel.runtime.controller.effects import Effect, Expired, GiveUp, HostGone, LostEvent, Tell
from monarch_kernel.runtime.controller.exit_waits import EXIT_WAIT_S
from monarch_kernel.runtime.controller.host_tree import HOST_DEADLINE_S
from monarch_kernel.runtime.controller.output_order import MAX_OUTPUT_GRACE_S, OUTPUT_GRACE_S
from monarch_kernel.runtime.controller.process_queries import ProcessQueries
from monarch_kernel.runtime.controller.processes import CLEANUP_S, RANK_DEADLINE_S
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.requests import RELEASE_AFTER_S, Resolve, Send
from monarch_kernel.testing import rank_spec
from tests.runtime.controller.states import sends

TOKEN = "t"


def text_of(answer: Answer | None) -> str | None:
    """The text of an answer, for comparison: the payload of a value, the message of a failure."""
    if answer is None:
        return None
    return answer.payload.data.decode() if isinstance(answer, Value) else answer.message


@dataclass
class RankModel:
    """The expected state of one rank."""

    host: int
    incarnation: int = 0
    up: bool = False
    dead: str = ""
    addressed: list[int] = field(default_factory=list)
    inbox: list[Message] = field(default_factory=list)
    written: int = 0  # according to its answers
    read: int = 0  # according to the agent
    held: list[tuple[int, str, int, float]] = field(default_factory=list)  # id, answer, written, until
    quiet_at: float = 0.0  # held answers wait at least until then


@dataclass
class RequestModel:
    procs: tuple[int, ...]
    answers: dict[int, str] = field(default_factory=dict)


class AnyOrder(RuleBasedStateMachine):
    """Random interleavings of all events, against a model of the expected effects."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State()
        self.now = 100.0
        self.ranks: dict[int, RankModel] = {}
        self.hosts: dict[int, bool] = {}  # gone?
        self.requests: dict[int, RequestModel] = {}
        self.resolved: dict[int, list[str | None]] = {}
        self.serial = 0
        self.up_hosts: set[int] = set()

    # -- effects

    def absorb(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                for message, _ in split(join([effect.packed])):
                    self.sent(effect.peer, message)
            elif isinstance(effect, Resolve):
                assert effect.id in self.requests
                assert effect.id not in self.resolved, "a request was resolved twice"
                self.resolved[effect.id] = [text_of(answer) for answer in effect.answers]

    def sent(self, peer: bytes, message: Message) -> None:
        if peer[:1] == b"H":
            assert int(peer[1:]) in self.up_hosts, "sent to a host agent before it said hello"
            return
        proc = proc_of(peer)
        rank = self.ranks[proc]
        assert peer == self.peer(proc), "sent to a rank that was replaced"
        assert rank.up, "sent to a rank before it said hello"
        assert not rank.dead, "sent to a rank that is gone"
        if isinstance(message, (Interrupt, Release)):
            before = [m.id for m in rank.inbox if isinstance(m, Ping)]
            assert message.id in before, "interrupted or released before it was asked"
        rank.inbox.append(message)

    def peer(self, proc: int) -> bytes:
        return rank_peer(proc, self.ranks[proc].incarnation)

    def expect(self, id: int, proc: int, answer: str) -> None:
        """The first answer of a rank counts."""
        request = self.requests.get(id)
        if request is not None and proc in request.procs and id not in self.resolved:
            request.answers.setdefault(proc, answer)

    def dies(self, proc: int, why: str, *, releases_held: bool) -> None:
        rank = self.ranks[proc]
        if releases_held:
            for id, answer, _, _ in rank.held:
                self.expect(id, proc, answer)
        rank.dead = why
        for id in rank.addressed:
            self.expect(id, proc, why)

    def rank_ids(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.ranks)), label="proc")

    # -- events

    @initialize()
    def begin(self) -> None:
        self.add_host()
        self.start_ranks_on(1, 2)

    @rule()
    def add_host(self) -> None:
        if len(self.hosts) < 3:
            host = len(self.hosts) + 1
            self.hosts[host] = False
            self.state.hosts.add(host, self.now)

    def start_ranks_on(self, host: int, count: int) -> None:
        first = len(self.ranks) + 1
        specs = [rank_spec(first + i, rank=i, world_size=count) for i in range(count)]
        for spec in specs:
            self.ranks[spec.proc] = RankModel(host)
        self.absorb(self.state.processes.start(host, specs, self.now))
        if self.hosts[host]:
            for spec in specs:
                self.dies(spec.proc, "its host agent has ended, so it was not started", releases_held=False)

    @rule(data=st.data(), count=st.integers(1, 3))
    def start_ranks(self, data: st.DataObject, count: int) -> None:
        if len(self.ranks) < 8:
            self.start_ranks_on(data.draw(st.sampled_from(sorted(self.hosts))), count)

    @rule(data=st.data())
    def host_hello(self, data: st.DataObject) -> None:
        host = data.draw(st.sampled_from(sorted(self.hosts)))
        self.up_hosts.add(host)
        message = HostHello(TOKEN, host, f"machine{host}", 1, 1, 0)
        self.absorb(self.state.handle(message, (), host_peer(host), self.now))

    @rule(data=st.data())
    def hello(self, data: st.DataObject) -> None:
        """A rank says hello: early, late, again, or after it was given up."""
        proc = self.rank_ids(data)
        self.ranks[proc].up = True
        self.absorb(self.state.handle(Hello(TOKEN, proc, 1000 + proc, "cpu"), (), self.peer(proc), self.now))

    @rule(data=st.data())
    def request(self, data: st.DataObject) -> None:
        procs = tuple(data.draw(st.lists(st.sampled_from(sorted(self.ranks)), unique=True, max_size=4)))
        id = len(self.requests) + 1
        model = self.requests[id] = RequestModel(procs)
        if any(self.ranks[proc].dead for proc in procs):
            for proc in procs:
                model.answers[proc] = self.ranks[proc].dead or "not sent, because another rank is dead"
        else:
            for proc in procs:
                self.ranks[proc].addressed.append(id)
        self.absorb(self.state.request(id, procs, pack(Ping(id)), "note", self.now))

    @rule(data=st.data(), failed=st.booleans(), writes=st.sampled_from([0, 0, 0, 5]))
    def answer(self, data: st.DataObject, failed: bool, writes: int) -> None:
        """Ranks answer a request alike: at first, again, or after they were given up; or one that they did not get."""
        drawn = data.draw(st.lists(st.sampled_from(sorted(self.ranks)), unique=True, min_size=1, max_size=3))
        asked = [message.id for message in self.ranks[drawn[0]].inbox if isinstance(message, Ping)]
        id = data.draw(st.sampled_from([*asked, *asked, *asked, len(self.requests), 10_000]))
        procs = [proc for proc in drawn if self.ranks[proc].up]
        if not procs:
            return
        self.serial += 1
        answer = f"answer {self.serial}"
        mark = max(self.ranks[proc].written for proc in procs) + writes if writes else 0
        written = (mark, 0)
        message = (
            Failed(id, Failure("exception", "E", answer), written)
            if failed
            else Result(id, Payload(answer.encode()), {}, written)
        )
        for proc in procs:
            rank = self.ranks[proc]
            rank.written = max(rank.written, mark)
            if not rank.dead and mark > rank.read:
                rank.held.append((id, answer, mark, max(self.now + OUTPUT_GRACE_S, rank.quiet_at)))
            else:
                self.expect(id, proc, answer)
        if len(procs) > 1:
            self.absorb(self.state.handle_answers(message, (), [self.peer(proc) for proc in procs], self.now))
        else:
            self.absorb(self.state.handle(message, (), self.peer(procs[0]), self.now))

    @rule(data=st.data())
    def output(self, data: st.DataObject) -> None:
        proc = self.rank_ids(data)
        rank = self.ranks[proc]
        rank.read = data.draw(st.integers(rank.read, rank.written))
        chunk = OutputChunk(proc, "stdout", "text\n", rank.read)
        rank.held = [(*held[:3], max(held[3], self.now + OUTPUT_GRACE_S)) for held in rank.held]
        rank.quiet_at = self.now + OUTPUT_GRACE_S
        for held in list(rank.held):
            if held[2] <= rank.read:
                rank.held.remove(held)
                self.expect(held[0], proc, held[1])
        self.absorb(self.state.handle(Output((chunk,)), (), host_peer(rank.host), self.now))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), what=st.sampled_from(["cancel", "interrupt"]))
    def end_early(self, data: st.DataObject, what: str) -> None:
        id = data.draw(st.sampled_from(sorted(self.requests)))
        if what == "interrupt":
            self.absorb(self.state.requests.interrupt(id))
        else:
            for proc in self.requests[id].procs:
                self.expect(id, proc, "cancelled by the caller")
            self.absorb(self.state.cancel(id, self.now))

    @rule(data=st.data())
    def interrupt_ranks(self, data: st.DataObject) -> None:
        self.absorb(self.state.interrupt_ranks([self.rank_ids(data)]))

    @rule(data=st.data())
    def stop_ranks(self, data: st.DataObject) -> None:
        procs = data.draw(st.lists(st.sampled_from(sorted(self.ranks)), unique=True, max_size=2))
        for proc in procs:
            if not self.ranks[proc].dead:
                self.dies(proc, "stopped by the test", releases_held=False)
        self.absorb(self.state.processes.stop(procs, "stopped by the test", 1.0, self.now))

    @rule(data=st.data())
    def lost(self, data: st.DataObject) -> None:
        self.lost_at(self.rank_ids(data))

    def lost_at(self, proc: int) -> None:
        rank = self.ranks[proc]
        if not rank.dead:
            running = rank.up and self.owes(proc)
            why = f"lost {proc}" + ("; it was running note" if running else "")
            self.dies(proc, why, releases_held=True)
        message = Lost(proc, 1, 0, f"lost {proc}", (), 0)
        self.absorb(self.state.handle(message, (), host_peer(rank.host), self.now))

    @rule(data=st.data(), chance=st.integers(0, 5))
    def host_gone(self, data: st.DataObject, chance: int) -> None:
        host = data.draw(st.sampled_from(sorted(self.hosts)))
        if chance == 0 and not self.hosts[host]:
            self.lose_host(host)

    def lose_host(self, host: int) -> None:
        self.hosts[host] = True
        for proc, rank in self.ranks.items():
            if rank.host == host and not rank.dead:
                why = "host gone" + ("; it was running note" if rank.up and self.owes(proc) else "")
                self.dies(proc, why, releases_held=True)
        self.absorb(self.state.processes.host_gone(host, "host gone", (), self.now))

    def owes(self, proc: int) -> bool:
        """Whether the rank has open requests, as far as the state knows; answers that are held do not count yet."""
        record = self.state.ranks[proc]
        still = set(record.open_requests) - {id for id, *_ in self.ranks[proc].held}
        return bool(still)

    @rule(dt=st.sampled_from([0.0, 0.2, 0.3, 1.0]))
    def tick(self, dt: float) -> None:
        self.now += dt
        for proc, rank in self.ranks.items():
            for held in list(rank.held):
                if held[3] <= self.now:
                    rank.held.remove(held)
                    self.expect(held[0], proc, held[1])
        effects = self.state.tick(self.now)
        assert not any(isinstance(effect, Expired) for effect in effects) or self.now > 100 + HOST_DEADLINE_S
        self.absorb(effects)

    # -- invariants

    @invariant()
    def resolved_as_soon_as_all_have_answered(self) -> None:
        for id, request in self.requests.items():
            over = all(proc in request.answers for proc in request.procs)
            assert over == (id in self.resolved), (id, request)
            if over:
                assert self.resolved[id] == [request.answers[proc] for proc in request.procs]
        assert len(self.state.requests) == len(self.requests) - len(self.resolved)

    @invariant()
    def sent_in_the_order_of_the_requests(self) -> None:
        for rank in self.ranks.values():
            got = [message.id for message in rank.inbox if isinstance(message, Ping)]
            assert got == rank.addressed[: len(got)]
            if rank.up and not rank.dead:
                assert got == rank.addressed
            if not rank.up:
                assert not rank.inbox

    def teardown(self) -> None:
        """Check that nothing is pending once all processes are gone."""
        if not self.ranks:
            return
        for host, gone in list(self.hosts.items()):
            if not gone:
                self.lose_host(host)
        self.resolved_as_soon_as_all_have_answered()
        assert len(self.state.requests) == 0
        assert all(self.state.ranks[proc].death is not None for proc in self.ranks)


AnyOrder.TestCase.settings = settings(stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase


# -- one thing at a time


def running(count: int = 2) -> State:
    """A host with ranks that are up."""
    state = State()
    state.hosts.add(1, 0.0)
    state.processes.start(1, [rank_spec(i + 1, rank=i, world_size=count) for i in range(count)], 0.0)
    state.handle(HostHello(TOKEN, 1, "machine1", 1, 1, 0), (), host_peer(1), 0.0)
    for i in range(count):
        state.handle(Hello(TOKEN, i + 1, 100 + i, "cpu"), (), rank_peer(i + 1), 0.0)
    return state


def resolves(effects: Iterable[Effect]) -> list[Resolve]:
    return [effect for effect in effects if isinstance(effect, Resolve)]


def ask(state: State, id: int, procs: tuple[int, ...] = (1, 2), now: float = 0.0) -> list[Effect]:
    return state.request(id, procs, pack(Ping(id)), f"note {id}", now)


def test_messages_before_hello_wait_in_order() -> None:
    state = State()
    state.hosts.add(1, 0.0)
    assert state.processes.start(1, [rank_spec(1)], 0.0) == []
    for id in (1, 2, 3):
        assert ask(state, id, (1,)) == []
    assert state.requests.tell((1,), pack(Release(9))) == []
    hello = state.handle(HostHello(TOKEN, 1, "machine1", 1, 1, 0), (), host_peer(1), 0.0)
    assert [(peer, type(message)) for peer, message in sends(hello)] == [(b"H1", StartRanks)]
    came = sends(state.handle(Hello(TOKEN, 1, 9, "cpu"), (), rank_peer(1), 0.0))
    assert came == [(b"R1", Ping(1)), (b"R1", Ping(2)), (b"R1", Ping(3)), (b"R1", Release(9))]
    assert sends(state.handle(Hello(TOKEN, 1, 9, "cpu"), (), rank_peer(1), 0.0)) == []


def test_answers_are_in_the_order_of_the_requested_ranks() -> None:
    state = running(3)
    ask(state, 1, (3, 1, 2))
    assert state.handle(Result(1, Payload(b"one")), (b"f",), b"R1", 0.0) == []
    assert state.handle(Failed(1, Failure("exception", "E", "two")), (), b"R2", 0.0) == []
    (over,) = resolves(state.handle(Result(1, Payload(b"three"), {"text/plain": "3"}), (), b"R3", 0.0))
    assert [text_of(answer) for answer in over.answers] == ["three", "one", "two"]
    assert isinstance(over.answers[0], Value)
    assert isinstance(over.answers[1], Value)
    assert over.answers[0].bundle == {"text/plain": "3"}
    assert over.answers[1].frames == (b"f",)


def test_an_answer_of_several_ranks_counts_for_each_of_them_once() -> None:
    state = running(4)
    ask(state, 1, (3, 1, 2, 4))
    state.handle(Result(1, Payload(b"own")), (), b"R1", 0.0)
    peers = [b"R1", b"R2", b"R3", b"R9"]  # one that has answered, and one that is unknown
    assert state.handle_answers(Failed(1, Failure("exception", "E", "alike")), (), peers, 1.0) == []
    assert state.dropped_messages == 2
    assert [state.ranks[proc].last_error for proc in (1, 2, 3, 4)] == ["", "E: alike", "E: alike", ""]
    (over,) = resolves(state.handle_answers(Result(1, Payload(b"late")), (), [b"R4", b"R3"], 2.0))
    assert [text_of(answer) for answer in over.answers] == ["alike", "own", "alike", "late"]


def test_a_line_of_an_earlier_cell_is_not_shown_beside_the_next_one() -> None:
    state = running(2)
    for proc in (1, 2):
        state.handle(Output((OutputChunk(proc, "stdout", "step 7\n", 7),)), (), b"H1", 0.0)
    ask(state, 1)  # a call of an actor, say
    assert state.ranks[1].last_line == "step 7"
    state.request(2, (1,), pack(Run(2, "x", 1)), "cell [2]", 1.0, is_cell=True)
    assert [state.ranks[proc].last_line for proc in (1, 2)] == ["", "step 7"]
    state.handle(Output((OutputChunk(1, "stdout", "epoch 0\n", 15),)), (), b"H1", 1.0)
    assert state.ranks[1].last_line == "epoch 0"


def test_an_answer_waits_for_the_output_before_it() -> None:
    state = running(1)
    ask(state, 1, (1,))
    assert state.handle(Result(1, Payload(), {}, (10, 3)), (), b"R1", 0.0) == []
    some = Output((OutputChunk(1, "stdout", "hello", 10),))
    assert resolves(state.handle(some, (), b"H1", 0.1)) == []
    assert resolves(state.tick(0.2)) == []
    rest = state.handle(Output((OutputChunk(1, "stderr", "war", 3),)), (), b"H1", 0.3)
    assert [type(effect) for effect in rest] == [Tell, Resolve]  # shown first
    assert isinstance(rest[0], Tell)
    assert rest[0].event == OutputEvent(1, 0, "stderr", "war", mesh="procs")


def test_folded_output_of_several_ranks_comes_before_the_answer_of_each() -> None:
    state = running(3)
    ask(state, 1, (1, 2, 3))
    for proc in (1, 2, 3):
        assert state.handle(Result(1, Payload(), {}, (10 * proc, 0)), (), b"R%d" % proc, 0.0) == []
    alike = Output((OutputChunk(1, "stdout", "hello", 10, also=((3, 30), (2, 19))),))
    effects = state.handle(alike, (), b"H1", 0.1)
    assert effects == [Tell(OutputEvent(1, rank, "stdout", "hello", mesh="procs")) for rank in (0, 2, 1)]
    assert state.requests.waiting_for(1) == [2]  # its last line of output has not arrived
    assert len(resolves(state.handle(Output((OutputChunk(2, "stdout", "", 20),)), (), b"H1", 0.2))) == 1


def test_an_answer_waits_for_output_only_for_a_while() -> None:
    state = running(1)
    ask(state, 1, (1,))
    state.handle(Result(1, Payload(), {}, (10, 0)), (), b"R1", 5.0)
    assert resolves(state.tick(5.0 + OUTPUT_GRACE_S - 0.01)) == []
    assert len(resolves(state.tick(5.0 + OUTPUT_GRACE_S))) == 1


def test_an_answer_waits_as_long_as_output_arrives_but_not_for_ever() -> None:
    state = running(1)
    ask(state, 1, (1,))
    state.handle(Result(1, Payload(), {}, (10_000, 0)), (), b"R1", 5.0)
    now = 5.0
    while now < 5.0 + MAX_OUTPUT_GRACE_S:
        now += OUTPUT_GRACE_S / 2
        state.handle(Output((OutputChunk(1, "stdout", "x\n", int(now)),)), (), b"H1", now)
        assert resolves(state.tick(now)) == []
    assert len(resolves(state.tick(5.0 + OUTPUT_GRACE_S + MAX_OUTPUT_GRACE_S))) == 1


def test_an_answer_before_a_death_counts() -> None:
    state = running(1)
    ask(state, 1, (1,))
    ask(state, 2, (1,))
    state.handle(Result(1, Payload(b"done"), {}, (10, 0)), (), b"R1", 0.0)
    first, second = resolves(state.handle(Lost(1, 0, 9, "", ("last words",), 0), (), b"H1", 0.1))
    assert text_of(first.answers[0]) == "done"
    death = second.answers[0]
    assert isinstance(death, Failure)
    assert death.kind == "lost"
    assert "SIGKILL" in death.message
    assert "note 2" in death.message
    assert death.last_lines == ("last words",)
    assert (death.host, death.pid) == ("machine1", 100)


def test_a_request_of_a_dead_rank_is_not_sent_to_the_others() -> None:
    state = running(2)
    gone, effect = state.handle(Lost(1, 3, 0, "", (), 0), (), b"H1", 0.0)
    assert isinstance(gone, HostGone)
    assert (gone.proc, gone.death.exit_code, gone.is_reported) == (1, 3, False)
    assert isinstance(effect, Tell)
    assert isinstance(effect.event, LostEvent)
    (over,) = ask(state, 1)
    assert isinstance(over, Resolve)
    assert [answer.etype for answer in over.answers if isinstance(answer, Failure)] == ["RankDied", "NotSent"]
    assert len(state.requests) == 0


def test_stopped_ranks_cause_no_event() -> None:
    state = running(2)
    ask(state, 1)
    effects = state.processes.stop((1, 2), "mesh stopped", 2.0, 1.0)
    (over,) = resolves(effects)
    assert [text_of(answer) for answer in over.answers] == ["mesh stopped"] * 2
    assert sends(effects) == [(b"H1", KillRanks((1, 2), 2.0))]
    assert state.handle(Lost(1, 0, 15, "", (), 0), (), b"H1", 1.1) == []
    assert state.processes.stop((1, 2), "again", 2.0, 1.2) == []
    assert state.ranks[1].state == "stopped"


def test_a_stop_resolves_when_the_processes_have_ended() -> None:
    state = running(3)
    state.handle(Lost(3, 1, 0, "", (), 0), (), b"H1", 0.5)
    state.processes.stop((1, 2, 3), "mesh stopped", 2.0, 1.0)
    assert state.processes.await_ends(7, (1, 2, 3), 2.0, 1.0) == []
    assert state.handle(Lost(1, 0, 15, "", (), 0), (), b"H1", 1.1) == []
    (over,) = state.handle(Lost(2, 0, 15, "", (), 0), (), b"H1", 1.2)
    assert isinstance(over, Resolve)
    assert (over.id, [isinstance(answer, Failure) for answer in over.answers]) == (7, [False] * 3)
    assert state.processes.await_ends(8, (1, 2, 3), 2.0, 1.0) == [over._replace(id=8)]  # a second stop


def test_a_stop_resolves_if_the_host_is_gone_or_not_up_or_a_process_is_stuck() -> None:
    state = running(2)
    state.processes.stop((1, 2), "mesh stopped", 2.0, 1.0)
    assert state.processes.await_ends(7, (1,), 2.0, 1.0) == state.processes.await_ends(8, (1, 2), 50.0, 1.0) == []
    assert resolves(state.tick(1.0 + 2.0 + EXIT_WAIT_S - 0.1)) == []
    (stuck,) = resolves(state.tick(1.0 + 2.0 + EXIT_WAIT_S))
    assert stuck.id == 7
    assert [answer.etype for answer in stuck.answers if isinstance(answer, Failure)] == ["NotEnded"]
    (over,) = resolves(state.processes.host_gone(1, "the host agent ended", (), 14.0))
    assert (over.id, [isinstance(answer, Failure) for answer in over.answers]) == (8, [False] * 2)
    state.hosts.add(2, 15.0)
    state.processes.start(2, [rank_spec(5)], 15.0)
    state.processes.stop((5,), "mesh stopped", 2.0, 15.0)
    assert [effect.id for effect in resolves(state.processes.await_ends(9, (5,), 2.0, 15.0))] == [9]


def test_end_all_sends_goodbye() -> None:
    state = running(2)
    ask(state, 1)
    effects = state.processes.end_all(0.0)
    assert len(resolves(effects)) == 1
    assert [type(message) for _, message in sends(effects)] == [KillRanks, Goodbye]


def test_goodbye_gives_time_to_ranks_that_clean_up() -> None:
    state = running(2)
    state.handle(CleansUp(), (), rank_peer(2), 0.0)
    said = [message for _, message in sends(state.processes.end_all(0.0))]
    assert said == [KillRanks((1,), 0.0), KillRanks((2,), CLEANUP_S), Goodbye(grace_s=CLEANUP_S)]


def test_a_host_that_does_not_come_up_expires() -> None:
    state = State()
    state.hosts.add(7, 10.0)
    assert state.tick(10.0 + HOST_DEADLINE_S - 0.1) == []
    assert state.tick(10.0 + HOST_DEADLINE_S) == [Expired(7)]
    assert state.processes.host_gone(7, "no sign of it", (), 41.0) == [GiveUp(7)]
    assert state.tick(100.0) == []
    state.processes.start(7, [rank_spec(1)], 101.0)
    (over,) = ask(state, 1, (1,))
    assert isinstance(over, Resolve)
    assert text_of(over.answers[0]) == "its host agent has ended, so it was not started"


def test_a_rank_that_does_not_come_up_is_lost() -> None:
    state = State()
    state.hosts.add(1, 0.0)
    state.processes.start(1, [rank_spec(1)], 0.0)
    state.handle(HostHello(TOKEN, 1, "machine1", 1, 1, 0), (), b"H1", 0.0)
    ask(state, 1, (1,))
    assert resolves(state.tick(RANK_DEADLINE_S - 1)) == []
    assert state.tick(RANK_DEADLINE_S) == [Expired(1, (1,))]
    effects = state.processes.give_up(1, (1,), ("ImportError: no torch",), RANK_DEADLINE_S)
    (over,) = resolves(effects)
    assert isinstance(over.answers[0], Failure)
    assert over.answers[0].etype == "RankNotStarted"
    assert over.answers[0].last_lines == ("ImportError: no torch",)
    assert Send(b"H1", pack(KillRanks((1,), 0.0, True))) in effects  # in case it still comes up
    assert state.tick(RANK_DEADLINE_S + 1) == []


def test_ranks_that_wait_for_a_failed_one_are_released_once_a_second() -> None:
    state = running(3)
    ask(state, 1, (1, 2, 3), 10.0)
    state.handle(Result(1, Payload()), (), b"R3", 10.5)
    state.handle(Failed(1, Failure("exception", "E", "m")), (), b"R1", 11.0)
    assert sends(state.tick(11.0 + RELEASE_AFTER_S - 0.1)) == []
    assert sends(state.tick(11.0 + RELEASE_AFTER_S)) == [(b"R2", Release(1))]
    assert sends(state.tick(11.0 + RELEASE_AFTER_S + 0.5)) == []
    assert sends(state.tick(11.0 + 2 * RELEASE_AFTER_S)) == [(b"R2", Release(1))]


def test_ranks_that_wait_for_a_dead_one_are_released_at_once() -> None:
    state = running(3)
    ask(state, 1, (1, 2, 3), 10.0)
    ask(state, 2, (2, 3), 10.0)
    state.handle(Result(1, Payload()), (), b"R3", 10.5)
    spec = state.ranks[1].spec
    assert sends(state.handle(Lost(1, 0, 9, "", (), 0), (), b"H1", 11.0), Release) == [
        (b"R2", Release(1, spec.mesh, spec.rank))
    ]
    assert sends(state.tick(11.0 + RELEASE_AFTER_S), Release) == [(b"R2", Release(1))]


def test_stopping_one_rank_does_not_release_the_others_at_once() -> None:
    state = running(2)
    ask(state, 1, now=10.0)
    state.processes.stop((1,), "stopped", 1.0, 11.0)
    assert sends(state.tick(11.0 + RELEASE_AFTER_S / 2), Release) == []
    assert sends(state.tick(11.0 + RELEASE_AFTER_S), Release) == [(b"R2", Release(1))]


def test_a_cancel_answers_for_all_and_interrupts_them() -> None:
    state = running(2)
    ask(state, 1)
    state.handle(Result(1, Payload(b"one")), (), b"R1", 0.0)
    effects = state.cancel(1, 0.5)
    assert sends(effects) == [(b"R2", Interrupt(1))]
    (over,) = resolves(effects)
    assert [text_of(answer) for answer in over.answers] == ["one", "cancelled by the caller"]
    assert state.ranks[2].state == "running"  # until it answers
    assert state.cancel(1, 0.6) == []
    assert state.handle(Result(1, Payload(b"late")), (), b"R2", 0.7) == []
    assert state.ranks[2].state == "idle"


def test_an_interrupt_reaches_requests_of_ranks_that_are_not_up() -> None:
    state = running(1)
    state.processes.start(1, [rank_spec(2)], 0.0)
    ask(state, 1, (1,))
    ask(state, 2, (2,))
    assert sends(state.interrupt_ranks((1, 2))) == [(b"R1", Interrupt(1))]
    came = sends(state.handle(Hello(TOKEN, 2, 1, "cpu"), (), b"R2", 0.0))
    assert came == [(b"R2", Ping(2)), (b"R2", Interrupt(2))]


@pytest.mark.parametrize(
    ("counts", "in_step"),
    [((3, 3), True), ((-1, -1), True), ((3, 4), False), ((3, -1), False), ((-2, -2), False)],
)
def test_ranks_are_in_step_if_they_have_started_as_many_collectives(counts: tuple[int, int], in_step: bool) -> None:
    state = running(3)
    ask(state, 1)
    state.handle(Result(1, Payload(), {}, (0, 0), counts[0]), (), b"R1", 0.0)
    state.handle(Result(1, Payload(), {}, (0, 0), 99), (), b"R1", 0.0)  # again: does not count
    state.handle(Result(1, Payload(), {}, (0, 0), 98), (), b"R3", 0.0)  # was not asked
    (over,) = resolves(state.handle(Result(1, Payload(), {}, (0, 0), counts[1]), (), b"R2", 0.0))
    assert over.in_step is in_step


@pytest.mark.parametrize(
    ("reports", "share"),
    [
        (((5, 2), (5, 2)), True),
        (((5, 2), (9, 2)), True),  # messages between two ranks count, too
        (((5, 2), (5, 1)), False),
        (((5, 2), (-1, 0)), False),
        (((-2, 2), (-2, 2)), False),
        (((-1, -1), (5, 2)), True),  # the first answer does not say
    ],
)
def test_ranks_share_a_default_group(reports: tuple[tuple[int, int], tuple[int, int]], share: bool) -> None:
    state = running(2)
    for proc, (collectives, size) in enumerate(reports, 1):
        ask(state, proc, (proc,))
        state.handle(Result(proc, Payload(), {}, (0, 0), collectives, 0, size), (), rank_peer(proc), 0.0)
    assert ProcessQueries(state.ranks).share_group((1, 2)) is share
    assert ProcessQueries(state.ranks).share_group((2,)) is (reports[1][0] != -2)


FORBIDDEN_MESSAGES: list[tuple[bytes, Message]] = [
    (b"R1", Result(99, Payload())),
    (b"R1", Failed(99, Failure("exception", "E", "m"))),
    (b"R1", Hello(TOKEN, 2, 1, "cpu")),
    (b"R1", Hello(TOKEN, 99, 1, "cpu")),
    (b"R1", HostHello(TOKEN, 1, "h", 1, 1, 0)),
    (b"R1", Lost(2, 0, 9, "", (), 0)),
    (b"R1", Output((OutputChunk(1, "stdout", "x", 1),))),
    (b"R1", Ping(1)),
    (b"R1", Release(9)),
    (b"R1", HostEnding()),
    (b"H9", HostEnding()),
    (b"H1", Result(1, Payload())),
    (b"H1", Rich(1, {}, {})),
    (b"H1", Hello(TOKEN, 1, 1, "cpu")),
    (b"H1", HostHello(TOKEN, 9, "h", 1, 1, 0)),
    (b"H1", Lost(99, 0, 9, "", (), 0)),
    (b"H1", Output((OutputChunk(1, "stdout", "x", 1), OutputChunk(99, "stdout", "x", 1)))),
    (b"H1", Output((OutputChunk(1, "stdout", "x", 1, also=((99, 1),)),))),
    (b"H1", Readings((Reading(99, 1, 1.0),))),
    (b"H2", Lost(1, 0, 9, "", (), 0)),
    (b"H2", Readings((Reading(1, 1, 1.0),))),
]


@pytest.mark.parametrize(
    ("peer", "message"), FORBIDDEN_MESSAGES, ids=lambda x: x.decode() if isinstance(x, bytes) else type(x).__name__
)
def test_messages_that_a_peer_may_not_send_are_counted_and_dropped(peer: bytes, message: Message) -> None:
    state = running(2)
    state.hosts.add(2, 0.0)
    ask(state, 1)
    assert state.handle(message, (), peer, 0.0) == []
    assert state.dropped_messages == 1
    assert len(state.requests) == 1
    assert state.ranks[1].pid == 100
    assert state.ranks[1].death is None


def test_readings_and_output_are_kept_for_the_view() -> None:
    state = running(1)
    state.handle(Readings((Reading(1, 2**20, 50.0),)), (), b"H1", 0.0)
    state.handle(Output((OutputChunk(1, "stdout", "first\nlast\n", 11),)), (), b"H1", 0.0)
    record = state.ranks[1]
    assert (record.reading.rss_nbytes, record.reading.cpu_percent, record.last_line) == (2**20, 50.0, "last")
    ask(state, 1, (1,))
    assert record.state == "running"
    state.handle(Failed(1, Failure("exception", "E", "m")), (), b"R1", 0.0)
    assert (record.state, record.last_error) == ("failed", "E: m")


def test_little_is_kept_of_a_rank_that_was_stopped_and_has_ended() -> None:
    """A notebook may bring up thousands of meshes in one session."""
    for order in ("stop", "end"), ("end", "stop"):
        state = State()
        state.hosts.add(1, 0.0)
        spec = msgspec.structs.replace(rank_spec(1), env={"A": "1"}, sys_path=("/x",), bootstrap=b"b", unset=("B",))
        state.processes.start(1, [spec], 0.0)
        state.handle(HostHello(TOKEN, 1, "machine1", 1, 1, 0), (), host_peer(1), 0.0)
        state.handle(Hello(TOKEN, 1, 100, "cpu"), (), rank_peer(1), 0.0)
        ask(state, 1, (1,))
        for event in order:
            if event == "stop":
                state.processes.stop((1,), "no longer needed", 0.0, 1.0)
            else:
                assert state.ranks[1].spec == spec  # another process may replace it
                state.handle(Lost(1, 0, 9, "", (), 0), (), host_peer(1), 1.0)
        record = state.ranks[1]
        assert (record.spec.env, record.spec.sys_path, record.spec.bootstrap, record.spec.unset) == ({}, (), b"", ())
        assert record.state == "stopped"
        assert (record.spec.mesh, record.pid, record.death and record.death.kind) == (spec.mesh, 100, "stopped")
        (resolved,) = resolves(ask(state, 2, (1,)))
        assert text_of(resolved.answers[0]) == (record.death and record.death.message)


def test_a_host_agent_that_ends_starts_no_more_ranks() -> None:
    state = running(1)
    assert not state.hosts[1].is_ending
    assert state.handle(HostEnding(), (), host_peer(1), 0.0) == []
    assert state.hosts[1].is_ending
    assert not state.hosts[1].gone
