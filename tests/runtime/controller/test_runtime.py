"""The loop over an in-memory network that delivers in any order: futures of several threads resolve exactly once."""

from __future__ import annotations

import asyncio
import logging
import pickle
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from monarch_kernel.base.events import OutputEvent
from monarch_kernel.errors import Failure, MeshDownError
from monarch_kernel.net.transport.base import CONTROLLER
from monarch_kernel.net.wire.codec import Packed, dump, join, load, pack
from monarch_kernel.net.wire.messages import (
    Failed,
    Hello,
    HostHello,
    Interrupt,
    Payload,
    Ping,
    Push,
    Result,
    Rich,
    Run,
)
from monarch_kernel.runtime.controller.effects import LostEvent
from monarch_kernel.runtime.controller.output_order import OUTPUT_GRACE_S
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.testing import FakeAgent, FakeLauncher, FakePeer, FakeRank, MemoryHub, add_host, rank_spec
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until

TOKEN = "secret"


class Rank(FakeRank):
    """A fake rank that, like a real one, answers a request only after it has arrived."""

    def answer(self, id: int, value: object = None, **marks: Any) -> None:
        self._wait_for(id)
        super().answer(id, value, **marks)

    def fail(self, id: int, message: str, etype: str = "ValueError", **marks: Any) -> None:
        self._wait_for(id)
        super().fail(id, message, etype, **marks)

    def _wait_for(self, id: int) -> None:
        while not any(getattr(message, "id", 0) == id for message in self.seen):
            self.receive_some()


class Lab:
    """A runtime, its host and its ranks."""

    def __init__(self, hub: MemoryHub, count: int) -> None:
        self.hub = hub
        self.runtime = Runtime(hub.connect(), TOKEN)
        self.launcher = FakeLauncher()
        self.host = add_host(self.runtime, self.launcher)
        self.agent = FakeAgent(hub, self.host, TOKEN)
        self.procs = list(self.runtime.new_procs(count))
        specs = [rank_spec(proc, rank=i, world_size=count) for i, proc in enumerate(self.procs)]
        self.runtime.start_ranks(self.host, specs)
        self.ranks = {proc: Rank(hub, proc, TOKEN) for proc in self.procs}

    def up(self) -> Lab:
        self.agent.hello()
        for rank in self.ranks.values():
            rank.hello()
        until(lambda: sum(record.up for record in list(self.runtime._state.ranks.values())) == len(self.procs))
        return self

    def ask(self, *procs: int, code: str = "", finish: Callable[[Sequence[Answer]], Any] | None = None) -> Future[Any]:
        def make(id: int) -> Packed:
            return pack(Run(id, code, 0))

        return self.runtime.request(procs or tuple(self.procs), make, "a cell", finish or values)


def values(answers: Sequence[Answer]) -> list[Any]:
    """The values of the answers, and the texts of failures."""
    return [load(answer.payload, answer.frames) if isinstance(answer, Value) else answer.message for answer in answers]


def until(condition: Callable[[], object]) -> None:
    """Wait until the loop has done something."""
    wait_until(condition, "the loop")


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab(MemoryHub(), 2)
    yield lab.up()
    lab.runtime.close()


# -- futures


def test_an_answer_that_cannot_be_read_fails_the_call(lab: Lab) -> None:
    """Otherwise the caller would wait for ever. Displays of the request do not fail it."""
    future = lab.ask(code="x")
    one, two = lab.ranks.values()
    two.answer(future.id, 5)
    one._wait_for(future.id)
    for bad in (Rich(future.id, {5: 5}, {}), Result(future.id, Payload(), {5: 5})):  # type: ignore[dict-item]
        assert not future.done()
        one.send(bad)
    until(future.done)
    first, second = future.get(LONG_S)
    assert "not a message" in first
    assert second == 5
    assert lab.runtime.refused == 2


def test_a_request_and_its_answers(lab: Lab) -> None:
    future = lab.ask(code="x")
    one, two = lab.ranks.values()
    (run,) = one.receive_some()
    assert (type(run), run.code) == (Run, "x")  # type: ignore[attr-defined]
    two.fail(future.id, "did not work")
    assert not future.done()
    one.answer(future.id, {"a": [1]})
    assert future.get(LONG_S) == [{"a": [1]}, "did not work"]
    assert future.done()
    assert future.result() is future.get()
    assert future.exception() is None


def test_a_request_to_a_rank_that_answers_at_once(lab: Lab) -> None:
    threads = [rank.serve() for rank in lab.ranks.values()]
    for _ in range(20):
        future = lab.ask()
        assert future.get(LONG_S) == [future.id] * 2
    for rank in lab.ranks.values():
        rank.transport.close()
    for thread in threads:
        thread.join()


def test_a_future_is_usable_after_a_timeout(lab: Lab) -> None:
    future = lab.ask()
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"0\.01 s"):
            future.get(0.01)
        with pytest.raises(TimeoutError):
            future.exception(0.01)
        assert future.wait(0.01) is False
    assert not future._callbacks  # else a program that polls for hours would fill it
    for rank in lab.ranks.values():
        rank.answer(future.id, 7)
    assert future.wait(LONG_S)
    assert future.get(0) == [7, 7]


def test_an_error_of_finish_is_raised_every_time(lab: Lab) -> None:
    calls: list[int] = []

    def finish(answers: Sequence[Answer]) -> None:
        calls.append(1)
        raise LookupError("no")

    future = lab.ask(finish=finish)
    for rank in lab.ranks.values():
        rank.answer(future.id)
    for _ in range(2):
        with pytest.raises(LookupError, match="no"):
            future.get(LONG_S)
        assert isinstance(future.exception(), LookupError)
    assert calls == [1]


def test_a_timeout_error_of_finish_is_no_timeout_of_the_wait(lab: Lab) -> None:
    def finish(answers: Sequence[Answer]) -> None:
        raise TimeoutError("the rank's own")

    future = lab.ask(finish=finish)
    for rank in lab.ranks.values():
        rank.answer(future.id)
    error = future.exception(LONG_S)
    assert isinstance(error, TimeoutError)
    assert str(error) == "the rank's own"


def test_a_cancel_ends_the_wait_and_interrupts(lab: Lab) -> None:
    future = lab.ask()
    future.cancel()
    assert future.get(LONG_S) == ["cancelled by the caller"] * 2
    for rank in lab.ranks.values():
        until(lambda rank=rank: rank.receive() and type(rank.seen[-1]) is Interrupt)  # type: ignore[misc]
        rank.answer(future.id, "late")
    until(lambda: lab.runtime._state.dropped_messages == 2)
    assert future.get() == ["cancelled by the caller"] * 2
    future.cancel()


def test_done_callbacks_are_called_once(lab: Lab) -> None:
    called: Counter[int] = Counter()
    lock = threading.Lock()

    def note(i: int) -> None:
        with lock:
            called[i] += 1

    total = 0
    for _ in range(30):
        future = lab.ask(lab.procs[0])
        first = total

        def add(future: Future[Any] = future, first: int = first) -> None:
            for i in range(first, first + 200):
                future.add_done_callback(lambda i=i: note(i))  # type: ignore[misc]

        adder = threading.Thread(target=add)
        adder.start()
        lab.ranks[lab.procs[0]].answer(future.id)
        assert future.wait(LONG_S)
        adder.join()
        total += 200
    until(lambda: len(called) == total)
    assert set(called.values()) == {1}


def test_a_failing_callback_does_not_stop_the_loop(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: object = None) -> None:
        raise ZeroDivisionError

    lab.runtime.watch(fail)
    future = lab.ask()
    future.add_done_callback(fail)
    after: list[int] = []
    future.add_done_callback(lambda: after.append(1))
    with caplog.at_level(logging.ERROR):
        lab.agent.output(lab.procs[0], "text", 4)
        for rank in lab.ranks.values():
            rank.answer(future.id)
        until(lambda: after)
    assert len(caplog.records) == 2
    future = lab.ask()
    for rank in lab.ranks.values():
        rank.answer(future.id, 1)
    assert future.get(LONG_S) == [1, 1]


def test_a_callback_that_is_added_during_resolve_is_called_once(lab: Lab) -> None:
    class Late(list[Any]):
        """The answers arrive just after the callback was added, before any thread looks for them."""

        def append(self, callback: Any) -> None:
            super().append(callback)
            future.resolve([], True)

    future = lab.ask(finish=len)
    future._callbacks = Late()
    called: list[int] = []
    future.add_done_callback(lambda: called.append(1))
    assert called == [1]


def test_await(lab: Lab) -> None:
    async def main() -> None:
        future, theirs, error = lab.ask(), lab.ask(), lab.ask(finish=lambda answers: 1 / 0)
        as_asyncio = theirs.as_asyncio()
        for rank in lab.ranks.values():
            for one in (future, theirs, error):
                rank.answer(one.id, one.id)
        assert await future == [future.id] * 2
        assert await future == [future.id] * 2
        assert await asyncio.wait_for(as_asyncio, LONG_S) == [theirs.id] * 2
        with pytest.raises(ZeroDivisionError):
            await error
        with pytest.raises(ZeroDivisionError):
            await error.as_asyncio()
        ids = [lab.ask() for _ in range(50)]
        for one in ids:
            for rank in lab.ranks.values():
                rank.answer(one.id, one.id)
        assert await asyncio.gather(*[one.as_asyncio() for one in ids]) == [[one.id] * 2 for one in ids]

    asyncio.run(main())


def test_a_cancelled_await_interrupts_the_ranks(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    future = lab.ask()

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_await(future), 0.01)

    asyncio.run(main())
    for rank in lab.ranks.values():
        until(lambda rank=rank: rank.receive() and type(rank.seen[-1]) is Interrupt)  # type: ignore[misc]
        rank.answer(future.id, "after the loop was closed")
    assert future.get(LONG_S) == ["after the loop was closed"] * 2
    assert lab.runtime._driver._background.is_alive()
    assert not caplog.records


async def _await(future: Future[Any]) -> Any:
    return await future


def test_a_resolved_future() -> None:
    future = Future.resolved(5)
    called: list[int] = []
    future.add_done_callback(lambda: called.append(1))
    future.cancel()
    assert (future.get(), future.get(0), future.exception(), future.wait(), called) == (5, 5, None, True, [1])


# -- deaths and output of ranks


def test_a_death_resolves_its_requests(lab: Lab) -> None:
    events: list[object] = []
    unwatch = lab.runtime.watch(events.append)
    both, other = lab.ask(), lab.ask(lab.procs[1])
    lab.agent.lost(lab.procs[0], signal=9, last_lines=("bye",))
    lab.ranks[lab.procs[1]].answer(both.id, "fine")
    lab.ranks[lab.procs[1]].answer(other.id, "fine")
    death, fine = both.get(LONG_S)
    assert "SIGKILL" in death
    assert fine == "fine"
    assert other.get(LONG_S) == ["fine"]
    assert list(lab.runtime.deaths(lab.procs)) == [lab.procs[0]]
    (event,) = events
    assert isinstance(event, LostEvent)
    assert "not sent" in lab.ask().get(LONG_S)[1]
    unwatch()
    unwatch()


def test_the_end_of_a_host_ends_its_ranks(lab: Lab) -> None:
    future = lab.ask()
    lab.launcher.hosts[lab.host].end("the machine is on fire")
    assert all("on fire" in text for text in future.get(LONG_S))
    assert lab.runtime.host_pool.is_gone(lab.host)


def test_an_answer_comes_after_its_output(lab: Lab, bar: Bar) -> None:
    order: list[str] = []
    lab.runtime.watch(lambda event: order.append(event.text) if isinstance(event, OutputEvent) else None)
    proc = lab.procs[0]
    future = lab.ask(proc)
    future.add_done_callback(lambda: order.append("done"))
    lab.ranks[proc].answer(future.id, written=(5, 0))
    lab.agent.output(proc, "hello", 5)
    assert future.wait(LONG_S)
    assert order == ["hello", "done"]
    late = lab.ask(proc)
    begin = time.monotonic()
    lab.ranks[proc].answer(late.id, written=(500, 0))
    assert late.wait(LONG_S)
    bar.check_above(time.monotonic() - begin, OUTPUT_GRACE_S * 0.9, "the wait for output that never comes")


def test_stopped_ranks(lab: Lab) -> None:
    future = lab.ask()
    lab.runtime.stop_ranks(lab.procs, "enough", list)
    assert future.get(LONG_S) == ["enough"] * 2
    assert lab.ask().get(LONG_S) == ["enough"] * 2
    view = lab.runtime.view(lab.procs, "procs", {"ranks": 2})
    assert [row.state for row in view.ranks] == ["stopped"] * 2


# -- the end


def test_close_resolves_pending_requests() -> None:
    lab = Lab(MemoryHub(), 2).up()
    futures = [lab.ask() for _ in range(5)]
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.append(futures[0].get(LONG_S)))
    waiter.start()
    lab.runtime.close()
    lab.runtime.close()
    waiter.join()
    assert got == [["the session was shut down"] * 2]
    for future in futures:
        assert future.get(0) == ["the session was shut down"] * 2
    assert lab.launcher.hosts[lab.host].closed
    with pytest.raises(MeshDownError):
        lab.ask()
    with pytest.raises(MeshDownError):
        add_host(lab.runtime, lab.launcher)
    with pytest.raises(MeshDownError):
        lab.runtime.stop_ranks(lab.procs, "late", list)
    lab.runtime.tell(lab.procs, pack(Ping(0)))
    futures[0].cancel()


@pytest.mark.parametrize("swept", [False, True], ids=["just before", "just after"])
def test_a_request_during_close_resolves(swept: bool) -> None:
    lab = Lab(MemoryHub(), 1).up()
    lab.runtime._driver.close()  # as far as close() has come on another thread
    lab.runtime._over = swept
    future = lab.ask()
    called: list[int] = []
    future.add_done_callback(lambda: called.append(1))
    if not swept:
        assert not future.done()
        lab.runtime.close()
    assert called == [1]
    assert isinstance(future.exception(), MeshDownError)
    with pytest.raises(MeshDownError):
        future.get(0)
    lab.runtime.close()


def test_concurrent_requests_during_close_all_resolve() -> None:
    for seed in range(20):
        lab = Lab(MemoryHub(), 1).up()
        all_started = threading.Barrier(4)
        ends: list[int] = []
        made: list[Future[Any]] = []

        def work(
            lab: Lab = lab,
            all_started: threading.Barrier = all_started,
            made: list[Future[Any]] = made,
            ends: list[int] = ends,
        ) -> None:
            all_started.wait(LONG_S)
            while True:
                try:
                    future = lab.ask()
                except MeshDownError:
                    return
                future.add_done_callback(lambda ends=ends: ends.append(1))  # type: ignore[misc]
                made.append(future)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        all_started.wait(LONG_S)
        for _ in range(random.Random(seed).randrange(2000)):
            pass
        lab.runtime.close()
        for thread in threads:
            thread.join()
        for future in made:
            assert future.done()
            error = future.exception(0)
            assert error is None or isinstance(error, MeshDownError)
        assert len(ends) == len(made)


# -- unauthenticated peers


class Bomb:
    went_off = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _go_off, ()


def _go_off() -> None:
    Bomb.went_off += 1


def bomb() -> Payload:
    return dump(Bomb())[0]


@pytest.mark.parametrize(
    "message",
    [
        Hello("wrong", 1, 1, "cpu"),
        Hello("", 1, 1, "cpu"),
        Hello(TOKEN, 2, 1, "cpu"),
        Hello(TOKEN, 99, 1, "cpu"),
        HostHello("wrong", 1, "h", 1, 1, 0),
        HostHello(TOKEN, 1, "h", 1, 1, 0),
        Result(1, bomb()),
        Failed(1, Failure("exception", "E", "m", exception=pickle.dumps(Bomb()))),
        Push(1, "x", bomb()),
        Ping(1),
    ],
    ids=lambda message: type(message).__name__,
)
@pytest.mark.parametrize("name", [b"R1", b"X", b"", b"Rx", b"H1"])
def test_unauthenticated_messages_are_refused_and_counted(name: bytes, message: Any) -> None:
    if name == b"H1" and message == HostHello(TOKEN, 1, "h", 1, 1, 0):
        pytest.skip("that is the agent itself")
    Bomb.went_off = 0
    hub = MemoryHub()
    lab = Lab(hub, 2)
    try:
        until(lambda: len(lab.runtime._state.ranks) == 2)
        future = lab.ask(1)
        stranger = FakePeer(hub, name)
        stranger.send(message)
        until(lambda: lab.runtime.refused == 1)
        stranger.send(message)
        until(lambda: lab.runtime.refused == 2)
        assert not lab.runtime._state.ranks[1].up
        assert stranger.receive() == []
        assert not future.done()
        assert Bomb.went_off == 0
    finally:
        lab.runtime.close()


def test_garbage_is_refused_and_other_messages_are_handled(lab: Lab) -> None:
    Bomb.went_off = 0
    rank = lab.ranks[lab.procs[0]]
    future = lab.ask(lab.procs[0])
    garbage: list[tuple[bytes, ...]] = [
        (b"",),
        (b"\xff" * 100,),
        (pickle.dumps(Bomb()),),
        (bytes(join([pack(Ping(1))])[0]), pickle.dumps(Bomb())),
        (b"\x91" * 1000,),
        (),
    ]
    for i, parts in enumerate(garbage):
        rank.send_raw(*parts)
        until(lambda i=i: lab.runtime.refused + lab.runtime._state.dropped_messages > i)  # type: ignore[misc]
    assert not future.done()
    assert Bomb.went_off == 0
    rank.answer(future.id, "fine")
    assert future.get(LONG_S) == ["fine"]


def test_a_hello_without_the_token_does_not_admit_the_rest_of_its_batch(lab: Lab) -> None:
    stranger = FakePeer(lab.hub, b"R77")
    stranger.send_raw(*join([pack(Hello(TOKEN, 77, 1, "cpu")), pack(Result(1, bomb()))]))
    until(lambda: lab.runtime.refused == 1)
    assert lab.runtime._state.dropped_messages == 0


# -- all at once


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_delivery_from_several_threads(seed: int) -> None:
    """Three callers, four ranks that answer, fail, repeat answers and die, and a network with delays."""
    source = random.Random(seed)
    hub = MemoryHub(manual=True)
    lab = Lab(hub, 4)
    ended: Counter[int] = Counter()
    lock = threading.Lock()
    futures: list[Future[Any]] = []
    requested: dict[tuple[int, int], list[str]] = {}
    over = threading.Event()

    def count_end(id: int) -> None:
        with lock:
            ended[id] += 1

    def call(thread: int) -> None:
        mine = random.Random(seed * 100 + thread)
        for i in range(60):
            procs = tuple(mine.sample(lab.procs, mine.randrange(1, 5)))
            code = f"{thread}:{i}"
            for proc in procs:
                requested.setdefault((thread, proc), []).append(code)
            future = lab.ask(*procs, code=code)
            future.add_done_callback(lambda id=future.id: count_end(id))  # type: ignore[misc]
            with lock:
                futures.append(future)
            if mine.random() < 0.1:
                future.cancel()
            elif mine.random() < 0.3:
                assert len(future.get(LONG_S)) == len(procs)
            elif mine.random() < 0.1:
                future.wait(0.001)

    def network() -> None:
        lab.agent.hello()
        unborn = list(lab.ranks.values())
        while not over.is_set():
            links = hub.waiting
            if links:
                hub.deliver(*source.choice(links))
            else:
                lab.runtime._driver._alarm.set(0)
                over.wait(0.0002)
            if unborn and source.random() < 0.05:
                unborn.pop(source.randrange(len(unborn))).hello()
            rank = source.choice(list(lab.ranks.values()))
            for message in rank.receive():
                if isinstance(message, Run):
                    chance = source.random()
                    if chance < 0.2:
                        rank.fail(message.id, "no")
                    else:
                        rank.answer(message.id, message.code)
                    if chance < 0.1:
                        rank.answer(message.id, "again")
            if source.random() < 0.003:
                lab.agent.lost(rank.proc, signal=9)

    callers = [threading.Thread(target=call, args=[i]) for i in range(3)]
    carrier = threading.Thread(target=network)
    for thread in (*callers, carrier):
        thread.start()
    for thread in callers:
        thread.join()
    try:
        for future in futures:
            future.get(LONG_S)
    finally:
        over.set()
        carrier.join()
        lab.runtime.close()
    assert len(futures) == 180
    assert ended == Counter({future.id: 1 for future in futures})
    for rank in lab.ranks.values():
        rank.receive()
        for thread in range(3):
            got = [m.code for m in rank.seen if isinstance(m, Run) and m.code.startswith(f"{thread}:")]
            asked = requested.get((thread, rank.proc), [])
            order = [code for code in asked if code in got]
            assert got == order, "not in the order of the calls, or twice"
    assert (CONTROLLER, b"R99") not in hub.waiting
