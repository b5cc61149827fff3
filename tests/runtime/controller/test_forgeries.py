"""Whatever an agent or rank with the token sends, the loop goes on, and other processes are not harmed."""

from __future__ import annotations

import functools
import random
import types
import typing
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from monarch_kernel.errors import Failure, MeshFailure
from monarch_kernel.net.transport.base import Peer, host_peer, rank_peer
from monarch_kernel.net.wire import messages
from monarch_kernel.net.wire.codec import join, pack
from monarch_kernel.net.wire.messages import ActorEnded, Call, Goodbye, Message, Payload, Ping, Spawn, Unhandled
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.testing import FakeAgent, FakeLauncher, FakeRank, MemoryHub, add_host, rank_spec
from tests.support.waiting import wait_until

TOKEN = "secret"
KINDS = sorted(
    (
        kind
        for kind in (getattr(messages, name) for name in messages.__all__)
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    ),
    key=lambda kind: kind.__name__,
)
NUMBERS = [0, 1, 1, 2, 2, 3, 4, 5, 99, -1, 2**31, 2**62, 2**64 - 1]
TEXTS = ["", "x", "R1", "H1", "C", "stdout", "\x00", "é" * 100, TOKEN]


hints_of = functools.cache(typing.get_type_hints)


class Forger:
    """Makes messages of any kind, with random values of the right types."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def message(self, kind: type[Message]) -> Message:
        return self._struct(kind)

    def _struct(self, kind: Any) -> Any:
        hints = hints_of(kind)
        return kind(*[self._any(hints[name]) for name in kind.__struct_fields__])

    def _any(self, hint: Any) -> Any:
        pick = self._random.choice
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            return self._any(pick(args))
        if origin is typing.Literal:
            return pick(args)
        if origin is tuple and args[-1] is Ellipsis:
            return tuple(self._any(args[0]) for _ in range(pick([0, 1, 2])))
        if origin is tuple:
            return tuple(self._any(arg) for arg in args)
        if origin is dict:
            return {self._any(args[0]): self._any(args[1]) for _ in range(pick([0, 1, 2]))}
        if hint is Payload:
            return Payload(pick([b"", b"x", b"\x80\x05N."]), 0)
        if hint is Failure:
            return Failure(pick(["exception", "lost", "stopped"]), pick(TEXTS), pick(TEXTS))
        if hint is MeshFailure:
            return MeshFailure(pick(TEXTS), {pick([0, 1]): self._any(Failure)})
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return self._struct(hint)
        values: dict[Any, Sequence[Any]] = {
            int: NUMBERS,
            str: TEXTS,
            bytes: [b"", b"x", b"\x80\x05N.", bytes(1000)],
            bool: [True, False],
            float: [0.0, -1.0, 1e308, float("nan")],
            type(None): [None],
            Any: [None, 1, "x", [1], {}],
        }
        return pick(values[hint])


class Lab:
    """Two hosts, each with a rank; all are up."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.runtime = Runtime(self.hub.connect(), TOKEN)
        self.hosts = [add_host(self.runtime, FakeLauncher()) for _ in range(2)]
        self.procs = list(self.runtime.new_procs(2))
        for host, proc, rank in zip(self.hosts, self.procs, range(2), strict=True):
            self.runtime.start_ranks(host, [rank_spec(proc, rank=rank, world_size=2)])
        self.agents = [FakeAgent(self.hub, host, TOKEN) for host in self.hosts]
        self.ranks = [FakeRank(self.hub, proc, TOKEN) for proc in self.procs]
        for peer in (*self.agents, *self.ranks):
            peer.hello()
        wait_until(self._all_are_up, "the ranks")

    def _all_are_up(self) -> bool:
        view = self.runtime.view(self.procs, "procs", {"ranks": len(self.procs)})
        return all(rank.state == "idle" for rank in view.ranks)

    def say(self, peer: Peer, message: Message) -> None:
        """Deliver a message to the loop; raises the loop's exceptions."""
        self.runtime.run_on_io_thread(lambda: self.runtime._intake.take(peer, join([pack(message)])))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("sender", ["agent", "rank"])
def test_random_messages_neither_stop_the_loop_nor_harm_others(kind: type[Message], sender: str) -> None:
    if (kind, sender) == (Spawn, "rank"):
        pytest.skip("a rank may spawn any actors here")
    lab = Lab()
    forger = Forger(7)
    try:
        peer = host_peer(lab.hosts[0]) if sender == "agent" else rank_peer(lab.procs[0])
        for _ in range(200):
            lab.say(peer, forger.message(kind))
        record = lab.runtime._state.ranks[lab.procs[1]]
        assert record.death is None
        assert not lab.runtime._state.hosts[lab.hosts[1]].gone
    finally:
        lab.runtime.close()


@pytest.mark.parametrize(
    "message",
    [
        Call(1, 1, "take", None, Payload()),
        Ping(1),
        Unhandled(MeshFailure("m", {0: Failure("exception", "E", "m")})),
        ActorEnded(1, None),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_of_an_agent_about_actors_are_refused(message: Message) -> None:
    lab = Lab()
    try:
        before = lab.runtime.refused
        lab.say(host_peer(lab.hosts[0]), message)
        assert lab.runtime.refused == before + 1
    finally:
        lab.runtime.close()


def test_a_host_that_was_given_back_before_it_came_up_is_ended() -> None:
    lab = Lab()
    try:
        late = add_host(lab.runtime, FakeLauncher())
        lab.runtime.run_on_io_thread(
            lambda: lab.runtime._state.processes.release_host(late, "it is no longer needed", 0.0, 0.0)
        )
        agent = FakeAgent(lab.hub, late, TOKEN)
        agent.hello()
        assert [type(message) for message in agent.receive_some()] == [Goodbye]
        assert not lab.runtime._state.hosts[late].up
    finally:
        lab.runtime.close()
