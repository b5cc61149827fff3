"""Handles of meshes work in the process that receives them: through ports, as results, folded, and nested in containers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from monarch_kernel.actor import (
    Accumulator,
    Actor,
    Channel,
    Future,
    HostMesh,
    Port,
    ProcMesh,
    endpoint,
    this_host,
    this_proc,
)
from tests.support.actors import Counter
from tests.support.waiting import LONG_S

PROCS = {"r": 2}


class Sender(Actor):
    """Sends and returns its arguments, as other processes do with their handles."""

    @endpoint
    def send(self, port: Port[Any], value: Any) -> None:
        port.send(value)

    @endpoint
    def give(self, value: Any) -> Any:
        return value

    @endpoint
    def host(self) -> HostMesh:
        return this_host()


class Receiver(Actor):
    """Receives a handle of counters, and uses it."""

    @endpoint
    def receive(self, sender: Any, counters: Any) -> list[int]:
        port, receiver = Channel[Any].open()
        sender.send.broadcast(port, [counters])
        (received,) = receiver.recv().get(LONG_S)
        return list(received.value.call().get(LONG_S).values())

    @endpoint
    def fold(self, sender: Any, counters: Any) -> list[int]:
        return list(folded(sender, counters).get(LONG_S).value.call().get(LONG_S).values())


class AsyncReceiver(Actor):
    """The same, on an event loop."""

    @endpoint
    async def receive(self, sender: Any, counters: Any) -> list[int]:
        port, receiver = Channel[Any].open()
        sender.send.broadcast(port, [counters])
        (received,) = await receiver.recv()
        return list((await received.value.call()).values())

    @endpoint
    async def fold(self, sender: Any, counters: Any) -> list[int]:
        return list((await (await folded(sender, counters)).value.call()).values())


def folded(sender: Any, counters: Any) -> Future[Any]:
    """Return a future of the handle that the last of the senders returns."""
    return Accumulator(sender.give, None, lambda before, last: last).accumulate(counters)


def through_a_port(sender: Any, value: Any) -> Any:
    port, receiver = Channel[Any].open()
    sender.slice(r=1).send.broadcast(port, value)
    return receiver.recv().get(LONG_S)


def folded_here(sender: Any, value: Any) -> Any:
    return folded(sender, value).get(LONG_S)


def as_a_result(sender: Any, value: Any) -> Any:
    return sender.slice(r=1).give.call_one(value).get(LONG_S)


def in_a_mesh_of_values(sender: Any, value: Any) -> Any:
    return sender.give.call(value).get(LONG_S).item(r=1)


def from_a_stream(sender: Any, value: Any) -> Any:
    return next(sender.give.stream(value)).get(LONG_S)


WAYS = [through_a_port, folded_here, as_a_result, in_a_mesh_of_values, from_a_stream]


@pytest.fixture(scope="module")
def sender(procs: ProcMesh) -> Sender:
    return procs.spawn("sender", Sender)


@pytest.fixture(scope="module")
def counters(procs: ProcMesh) -> Counter:
    return procs.spawn("counters", Counter, 5)


@pytest.mark.parametrize("way", WAYS)
def test_handles_of_meshes_work_where_they_arrive(
    procs: ProcMesh, sender: Sender, counters: Counter, way: Callable[[Any, Any], Any]
) -> None:
    sent = {"actors": counters, "nested": [(counters.slice(r=1), procs, {1: procs.slice(r=1)})]}
    received = way(sender, sent)
    assert received["actors"].value.call().get(LONG_S).values() == (5, 5)
    [(part, ranks, by_rank)] = received["nested"]
    assert part.value.call_one().get(LONG_S) == 5
    assert ranks.run("rank").get(LONG_S).values() == (0, 1)
    assert by_rank[1].spawn("another", Counter, 7).value.call_one().get(LONG_S) == 7


@pytest.mark.parametrize("way", WAYS)
def test_handles_of_hosts_spawn_processes_where_they_arrive(sender: Sender, way: Callable[[Any, Any], Any]) -> None:
    of_the_program, of_a_rank = way(sender, [this_host(), sender.slice(r=0).host.call_one().get(LONG_S)])
    for hosts in (of_the_program, of_a_rank):
        mesh = hosts.spawn_procs({"r": 1}, device="cpu")
        assert mesh.spawn("counter", Counter, 3).value.call().get(LONG_S).values() == (3,)
        mesh.stop(grace_s=0).get(LONG_S)


@pytest.mark.parametrize("kind", [Receiver, AsyncReceiver])
@pytest.mark.parametrize("is_here", [False, True])
def test_actors_receive_handles_through_ports_and_fold_them(
    procs: ProcMesh, sender: Sender, counters: Counter, kind: Any, is_here: bool
) -> None:
    receiver = (this_proc() if is_here else procs.slice(r=0)).spawn("receiver", kind)
    assert receiver.receive.call_one(sender.slice(r=1), counters).get(LONG_S) == [5, 5]
    assert receiver.fold.call_one(sender, counters).get(LONG_S) == [5, 5]
    receiver.stop().get(LONG_S)


def test_a_combination_of_answers_opens_channels_of_the_same_session(sender: Sender) -> None:
    def combine(before: Any, answer: Any) -> Any:
        return Channel[Any].open()

    port, receiver = Accumulator(sender.give, None, combine).accumulate(1).get(LONG_S)
    sender.slice(r=0).send.broadcast(port, 2)
    assert receiver.recv().get(LONG_S) == 2
