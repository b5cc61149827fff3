"""A runtime adopts ranks of an earlier one; the ranks are fakes that use the real protocol."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Attach, Backlog, Hello, Message, OpenRequest, Output, OutputChunk, Ping
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.rpc.answers import Value
from monarch_kernel.runtime.rpc.ids import first_number
from monarch_kernel.testing import FakeAgent, FakeHost, FakeRank, MemoryHub, rank_spec

SPECS = [rank_spec(proc, rank=proc - 1, world_size=2) for proc in (1, 2)]


class Left:
    """The ranks of an earlier controller: two, each of which runs another cell, and their agent."""

    def __init__(self, hub: MemoryHub, token: str) -> None:
        self.agent = FakeAgent(hub, 1, token)
        self.ranks = [FakeRank(hub, proc, token) for proc in (1, 2)]
        self.asked: list[Message] = []
        self._token = token
        self._agent_spoke = threading.Event()
        self._threads = [threading.Thread(target=self._say, args=[peer]) for peer in (self.agent, *self.ranks)]
        for thread in self._threads:
            thread.start()

    def _say(self, peer: FakeAgent | FakeRank) -> None:
        self.asked += peer.receive_some()[:1]
        if isinstance(peer, FakeRank):
            self._agent_spoke.wait(10)  # so that a message can be missed
            id = 10 + peer.proc
            peer.send(Hello(self._token, peer.proc, 99, "cpu", (OpenRequest(id, f"cell [{id}]", 5.0, id),)))
        else:
            peer.hello()
            peer.send(Backlog(tuple(OutputChunk(proc, "stdout", f"before {proc}\n", 0) for proc in (1, 2))))
            peer.send(Output(tuple(OutputChunk(proc, "stdout", f"after {proc}\n", 0) for proc in (1, 2))))
            self._agent_spoke.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@contextmanager
def attached(token: str = "t", timeout_s: float = 10.0) -> Iterator[tuple[Runtime, Left, bool]]:
    hub = MemoryHub()
    runtime = Runtime(hub.connect(), "t", epoch=3)
    left = Left(hub, token)
    try:
        answered = runtime.attachment.attach({1: SPECS}, {1: FakeHost("t")}, timeout_s)
        left.join()
        yield runtime, left, answered
    finally:
        runtime.close()


def test_attach_resumes_cells_and_output() -> None:
    with attached() as (runtime, left, answered):
        assert answered
        assert {(ask.token, ask.epoch) for ask in left.asked if isinstance(ask, Attach)} == {("t", 3)}
        assert len(left.asked) == 3
        assert runtime.attachment.silent == ()
        assert [chunk.text for event in runtime.listeners.backlog for chunk in event.chunks] == [
            "before 1\n",
            "before 2\n",
        ]
        assert [(cell.number, cell.procs) for cell, _ in runtime.attachment.resumed] == [(11, (1,)), (12, (2,))]
        assert [row.activity for row in runtime.view([1, 2], "m", {"ranks": 2}).ranks] == ["cell [11]", "cell [12]"]
        for rank, (_, future) in zip(left.ranks, runtime.attachment.resumed, strict=True):
            rank.answer(future.id)
            (answer,) = future.get(10)
            assert isinstance(answer, Value)


def test_output_since_then_reaches_a_later_listener() -> None:
    with attached() as (runtime, left, _):
        heard: dict[int, list[str]] = {}
        for cell, _ in runtime.attachment.resumed:  # one after the other: output of the second must wait
            texts = heard.setdefault(cell.number, [])
            runtime.listen(cell.id, lambda event, texts=texts: texts.append(event.text))
            assert texts == [f"after {cell.procs[0]}\n"]
        left.agent.output(1, "live\n", 0)
        left.ranks[0].answer(11)
        runtime.attachment.resumed[0][1].get(10)
        assert heard == {11: ["after 1\n", "live\n"], 12: ["after 2\n"]}


def test_ids_differ_from_those_of_the_earlier_controller() -> None:
    with attached() as (runtime, left, _):
        future = runtime.request([1], lambda id: pack(Ping(id)), "ping", len)
        assert future.id == first_number(3) > first_number(2) + 2**31
        assert left.ranks[0].receive_some() == [Ping(future.id)]


def test_peers_without_the_token_are_not_adopted() -> None:
    with attached("another", timeout_s=0.3) as (runtime, _, answered):
        assert not answered
        assert runtime.refused
        assert runtime.listeners.backlog == []
