"""Endpoints that answer once through a port, at any time and from any process; and calls whose answers go to a port."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import sys
import threading
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    Channel,
    Port,
    ProcMesh,
    SupervisionError,
    as_endpoint,
    concurrent_endpoint,
    endpoint,
    send,
    this_proc,
)
from tests.support.actors import Worker
from tests.support.waiting import LONG_S, wait_until


class Questions:
    """Handles questions for both kinds of desk."""

    ports: list[Port[Any]]

    def take(self, port: Port[Any], question: str) -> None:
        if question == "raise":
            raise ValueError("no good")
        if question == "at once":
            port.send("here")
        elif question == "twice":
            port.send("here")
            port.send("again")
        elif question == "exit":
            sys.exit(3)
        elif question == "lock":
            port.send(threading.Lock())
        elif question == "thread":
            thread = threading.Thread(target=port.send, args=["from a thread"])
            thread.start()
            thread.join()
        elif question != "forget":
            self.ports.append(port)


class Desk(Actor, Questions):
    """Collects questions, and answers them on demand."""

    def __init__(self) -> None:
        self.ports = []

    @endpoint(explicit_response_port=True)
    def ask(self, port: Port[str], question: str = "") -> None:
        self.take(port, question)

    @endpoint
    def answer(self, text: str) -> int:
        for port in self.ports:
            port.send(text)
        return len(self.ports)

    @endpoint
    def refuse(self) -> None:
        for port in self.ports:
            port.exception(KeyError("not today"))

    @endpoint
    def forget(self) -> None:
        self.ports.clear()
        gc.collect()

    def plain(self, port: Port[str], text: str) -> None:
        port.send(text)


async def let_questions_start() -> None:
    """Yield to the loop, so that each earlier question runs."""
    for _ in range(3):
        await asyncio.sleep(0)


class AsyncDesk(Actor, Questions):
    """The same, asynchronous, with questions that overlap."""

    def __init__(self) -> None:
        self.ports = []

    @concurrent_endpoint(explicit_response_port=True)
    async def ask(self, port: Port[str], question: str = "") -> None:
        await asyncio.sleep(0)
        self.take(port, question)

    @endpoint
    async def answer(self, text: str) -> int:
        await let_questions_start()
        for port in self.ports:
            port.send(text)
        return len(self.ports)

    @endpoint
    async def refuse(self) -> None:
        await let_questions_start()
        for port in self.ports:
            port.exception(KeyError("not today"))

    @endpoint
    async def forget(self) -> None:
        await let_questions_start()
        self.ports.clear()
        gc.collect()

    async def plain(self, port: Port[str], text: str) -> None:
        port.send(text)


class Clerk(Actor):
    """Answers the questions of other actors."""

    def __init__(self, next_one: Any = None) -> None:
        self.next_one = next_one

    @endpoint
    def answer_for(self, port: Port[Any], text: str) -> None:
        if self.next_one is None:
            port.send(text)
        else:
            self.next_one.answer_for.broadcast(port, f"{text} by way of")

    @endpoint
    def fail_for(self, port: Port[Any]) -> None:
        port.exception(KeyError("not mine"))


class Front(Actor):
    """Passes questions on."""

    def __init__(self, clerk: Any) -> None:
        self.clerk = clerk

    @endpoint(explicit_response_port=True)
    def ask(self, port: Port[str], text: str) -> None:
        self.clerk.answer_for.broadcast(port, text)

    @endpoint(explicit_response_port=True)
    def fail(self, port: Port[str]) -> None:
        self.clerk.fail_for.broadcast({"inside": [port]}["inside"][0])

    @endpoint(explicit_response_port=True)
    def ask_by_send(self, port: Port[str]) -> None:
        send(self.clerk.answer_for, (Channel.open()[0], "x"), {}, port)


both = pytest.mark.parametrize("kind", [Desk, AsyncDesk])


@both
def test_the_answer_comes_when_the_port_is_used(procs: ProcMesh, kind: type[Desk]) -> None:
    desk = procs.spawn("desk", kind)
    questions = [desk.ask.call(str(i)) for i in range(3)]
    with pytest.raises(TimeoutError):
        questions[0].get(0.05)
    assert desk.answer.call("yes").get(LONG_S).values() == (3, 3)
    assert [question.get(LONG_S).values() for question in questions] == [("yes", "yes")] * 3
    assert desk.ask.call("at once").get(LONG_S).values() == ("here", "here")
    assert desk.slice(r=1).ask.call_one("thread").get(LONG_S) == "from a thread"


@both
def test_an_error_can_be_the_answer(procs: ProcMesh, kind: type[Desk]) -> None:
    desk = procs.spawn("desk", kind)
    question = desk.ask.call()
    desk.refuse.call().get(LONG_S)
    with pytest.raises(ActorError, match="not today") as caught:
        question.get(LONG_S)
    assert isinstance(caught.value.exception, KeyError)
    with pytest.raises(ActorError, match="no good"):
        desk.ask.call("raise").get(LONG_S)  # the error is the answer, because the endpoint had not answered
    with pytest.raises(ActorError, match="the response can't be pickled"):
        desk.ask.call("lock").get(LONG_S)
    assert desk.ask.call("at once").get(LONG_S).values() == ("here", "here")


@both
def test_a_failure_after_the_answer_ends_the_actor(procs: ProcMesh, kind: type[Desk]) -> None:
    desk = procs.slice(r=0).spawn("desk", kind)
    open_question = desk.ask.call_one()
    assert desk.ask.call_one("twice").get(LONG_S) == "here"
    with pytest.raises(SupervisionError, match="takes one answer.*this ended actor 'desk'"):
        open_question.get(LONG_S)
    with pytest.raises(SupervisionError, match="this ended actor 'desk'"):
        desk.answer.call_one("").get(LONG_S)


@both
def test_a_port_that_is_dropped_without_an_answer_is_an_error(procs: ProcMesh, kind: type[Desk]) -> None:
    desk = procs.slice(r=0).spawn("desk", kind)
    with pytest.raises(ActorError, match="dropped its response port without an answer"):
        desk.ask.call_one("forget").get(LONG_S)
    question = desk.ask.call_one()
    desk.forget.call_one().get(LONG_S)
    with pytest.raises(ActorError, match="dropped its response port"):
        question.get(LONG_S)
    assert desk.answer.call_one("").get(LONG_S) == 0


@both
def test_the_end_of_an_actor_ends_its_open_questions(procs: ProcMesh, kind: type[Desk]) -> None:
    desk = procs.spawn("desk", kind)
    question = desk.ask.call()
    desk.stop("closed").get(LONG_S)
    with pytest.raises(SupervisionError, match="closed"):
        question.get(LONG_S)
    desk = procs.spawn("desk", kind)
    question = desk.ask.call()
    desk.ask.broadcast("exit")
    with pytest.raises(SupervisionError, match="SystemExit.*this ended actor 'desk'"):
        question.get(LONG_S)


@pytest.mark.parametrize("ends", ["stopped", "failed"])
def test_a_cleanup_can_answer(procs: ProcMesh, ends: str) -> None:
    class Closing(Desk):
        def __cleanup__(self, error: BaseException | None) -> None:
            for port in self.ports:
                port.send("closing time")

    desk = procs.slice(r=0).spawn("desk", Closing)
    question = desk.ask.call_one()
    desk.stop() if ends == "stopped" else desk.ask.broadcast("raise")
    assert question.get(LONG_S) == "closing time"


@both
def test_the_port_of_a_broadcast_drops_the_answer(procs: ProcMesh, kind: type[Desk]) -> None:
    desk = procs.slice(r=0).spawn("desk", kind)
    desk.ask.broadcast()
    desk.ask.broadcast("twice")
    assert desk.answer.call_one("nowhere").get(LONG_S) == 1


@both
def test_a_cancel_after_the_endpoint_has_returned_ends_the_wait(procs: ProcMesh, kind: type[Desk]) -> None:
    desk = procs.slice(r=0).spawn("desk", kind)
    question = desk.ask.call_one()
    question.cancel()
    with pytest.raises(ActorError, match="cancelled"):
        question.get(LONG_S)
    assert desk.answer.call_one("late").get(LONG_S) in (0, 1)


@both
def test_a_plain_method_can_take_a_port(procs: ProcMesh, kind: type[Desk]) -> None:
    desk = procs.spawn("desk", kind)
    answered = as_endpoint(desk.plain, explicit_response_port=True).call("well")
    assert answered.get(LONG_S).values() == ("well", "well")


def test_calls_are_checked_without_the_port(procs: ProcMesh) -> None:
    desk: Any = procs.spawn("desk", Desk)
    with pytest.raises(TypeError, match=r"ask\(question: 'str' = ''\): too many positional arguments"):
        desk.ask.call("a", "b")
    with pytest.raises(TypeError, match="must take the port that it answers through as its second parameter"):

        class Bad(Actor):
            @endpoint(explicit_response_port=True)  # type: ignore[arg-type]
            def ask(self) -> None: ...


# -- ports that are passed on


@pytest.mark.parametrize("where", ["the other rank", "the same rank", "the controller"])
def test_another_actor_can_answer(procs: ProcMesh, where: str) -> None:
    place = {"the other rank": procs.slice(r=1), "the same rank": procs.slice(r=0), "the controller": this_proc()}[
        where
    ]
    clerk = place.spawn("clerk", Clerk)
    front = procs.slice(r=0).spawn("front", Front, clerk)
    assert [front.ask.call_one(str(i)).get(LONG_S) for i in range(3)] == ["0", "1", "2"]
    with pytest.raises(ActorError, match="not mine"):
        front.fail.call_one().get(LONG_S)
    clerk.stop().get(LONG_S)


def test_a_port_can_be_passed_on_twice(procs: ProcMesh) -> None:
    last = procs.slice(r=0).spawn("last", Clerk)
    middle = procs.slice(r=1).spawn("middle", Clerk, last)
    front = procs.slice(r=0).spawn("front", Front, middle)
    assert front.ask.call_one("said").get(LONG_S) == "said by way of"


def test_no_port_is_left_open(procs: ProcMesh) -> None:
    class Count(Actor):
        @endpoint
        def count(self) -> int:
            from monarch_kernel.runtime.rpc.handles import PROCESS

            return len(PROCESS.client.ports)

    count = procs.slice(r=0).spawn("count", Count)
    before = count.count.call_one().get(LONG_S)
    front = procs.slice(r=0).spawn("front", Front, procs.slice(r=1).spawn("clerk", Clerk))
    for i in range(20):
        assert front.ask.call_one(str(i)).get(LONG_S) == str(i)
    assert count.count.call_one().get(LONG_S) == before


# -- calls whose answers go to a port


def test_send_directs_answers_and_errors_to_a_port(procs: ProcMesh) -> None:
    workers = procs.spawn("workers", Worker)
    port, receiver = Channel.open()
    send(workers.rank, (), {}, port=port)
    assert sorted(receiver.recv().get(LONG_S) for _ in range(2)) == [0, 1]
    send(workers.rank, (), {}, port, "choose")
    assert receiver.recv().get(LONG_S) in (0, 1)
    send(workers.fail, (), {}, port, "choose")
    with pytest.raises(ValueError, match="no good"):
        receiver.recv().get(LONG_S)
    assert workers.rank.call().get(LONG_S).values() == (0, 1)


def test_waits_that_time_out_lose_no_value(procs: ProcMesh) -> None:
    port, receiver = Channel.open()
    dropped = [receiver.recv() for _ in range(3)]
    for future in dropped:
        with pytest.raises(TimeoutError, match="no value arrived within 0.01 s"):
            future.get(0.01)
    for i in range(6):
        port.send(i)
    assert [receiver.recv().get(LONG_S) for _ in range(3)] == [0, 1, 2]
    assert dropped[1].get(LONG_S) == 3, "a new wait takes its turn"
    assert dropped[2].wait(LONG_S)
    assert dropped[2].get() == 4

    async def wait() -> Any:
        return await dropped[0]

    assert asyncio.run(wait()) == 5
    given_up = receiver.recv()
    with pytest.raises(TimeoutError):
        given_up.get(0.01)
    given_up.cancel()
    port.send(6)
    with pytest.raises(concurrent.futures.CancelledError):
        given_up.get(LONG_S)
    assert receiver.recv().get(LONG_S) == 6


def test_a_future_that_another_thread_waits_for_keeps_its_place(procs: ProcMesh) -> None:
    port, receiver = Channel.open()
    shared, heard = receiver.recv(), []
    waits = threading.Thread(target=lambda: heard.append(shared.get(LONG_S)))
    waits.start()
    wait_until(lambda: shared.is_waited_for, "the thread to wait")  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        shared.get(0.01)
    port.send("for both")
    waits.join(LONG_S)
    assert heard == ["for both"]
    assert shared.get(LONG_S) == "for both"


def test_a_cancelled_wait_at_a_receiver_takes_no_value(procs: ProcMesh) -> None:
    port, receiver = Channel.open()
    cancelled, waits = receiver.recv(), receiver.recv()

    async def wait() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(receiver.recv(), 0.02)  # type: ignore[arg-type]

    asyncio.run(wait())
    cancelled.cancel()
    with pytest.raises(concurrent.futures.CancelledError, match="goes to the next recv"):
        cancelled.get(LONG_S)
    with pytest.raises(TimeoutError):
        waits.get(0.02)
    for i in range(3):
        port.send(i)
    assert [waits.get(LONG_S), receiver.recv().get(LONG_S), receiver.recv().get(LONG_S)] == [0, 1, 2]


def test_a_receiver_lives_as_long_as_a_future_waits_for_it(procs: ProcMesh) -> None:
    port, receiver = Channel.open()
    waits = receiver.recv()
    del receiver
    gc.collect()
    port.send("still there")
    assert waits.get(LONG_S) == "still there"


def test_send_to_a_rank_can_answer_through_a_port_of_a_port(procs: ProcMesh) -> None:
    clerk = procs.slice(r=1).spawn("clerk", Clerk)
    front = procs.slice(r=0).spawn("front", Front, clerk)
    assert front.ask_by_send.call_one().get(LONG_S) is None
