"""Transports of ranks among each other: one connects to the other, and related messages keep their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch_kernel.net.hosts.zmq import ZmqRank, ZmqRouter
from monarch_kernel.net.transport.base import CONTROLLER, Peer, PeerTransport, rank_peer
from monarch_kernel.net.transport.loopback import MemoryHub
from tests.net.transport.test_conformance import receive, wait_for_an_event

A, B = rank_peer(1), rank_peer(2)
Make = Callable[[Peer], PeerTransport]
BACKLOG = 1000
LONG = 50_000
"""For what takes a moment: a timeout is a failure, not a measurement."""


@pytest.fixture(params=["memory", "zmq"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes ranks of a session with a controller."""
    made: list[PeerTransport] = []
    hub = MemoryHub()
    address = f"ipc://{tmp_path}/c"
    controller = hub.connect(CONTROLLER) if request.param == "memory" else ZmqRouter(address)

    def rank(name: Peer) -> PeerTransport:
        if request.param == "memory":
            made.append(hub.connect(name))
        else:
            made.append(ZmqRank(address, name, f"ipc://{tmp_path}/{name.decode()}"))
        return made[-1]

    yield rank
    for each in made:
        each.close()
    controller.close()


@pytest.fixture
def pair(make: Make, tmp_path: Path) -> tuple[PeerTransport, PeerTransport]:
    """Two ranks; the first has connected to the second."""
    a, b = make(A), make(B)
    a.connect(B, f"ipc://{tmp_path}/{B.decode()}")
    return a, b


def test_an_answer_takes_the_connection_of_the_request(pair: tuple[PeerTransport, PeerTransport]) -> None:
    a, b = pair
    for i in range(200):
        assert a.send(B, [b"%d" % i, b"frame"])
    assert [receive(b) for _ in range(200)] == [(A, [b"%d" % i, b"frame"]) for i in range(200)]
    for i in range(200):
        assert b.send(A, [b"%d" % i])  # B has not connected to A
    assert [receive(a) for _ in range(200)] == [(B, [b"%d" % i]) for i in range(200)]


def test_both_ranks_may_send_requests(pair: tuple[PeerTransport, PeerTransport], tmp_path: Path) -> None:
    a, b = pair
    b.connect(A, f"ipc://{tmp_path}/{A.decode()}")
    assert a.send(B, [b"from a"])
    assert b.send(A, [b"from b"])
    assert receive(b) == (A, [b"from a"])
    assert receive(a) == (B, [b"from b"])


def test_a_message_to_itself_arrives_as_a_copy(make: Make) -> None:
    a = make(A)
    data = bytearray(b"as it was")
    assert a.send(A, [b"header", memoryview(data)])
    data[:] = b"changed!!"
    wait_for_an_event(a)
    assert receive(a) == (A, [b"header", b"as it was"])


def test_a_peer_that_is_not_connected_cannot_be_reached(make: Make) -> None:
    a, _ = make(A), make(B)
    assert not a.send(rank_peer(3), [b"x"])


def test_a_closed_connection_delays_nothing(make: Make, tmp_path: Path) -> None:
    a = make(A)
    nobody = rank_peer(9)
    a.connect(nobody, f"ipc://{tmp_path}/{nobody.decode()}")
    a.send(nobody, [b"never read"])
    a.disconnect(nobody)
    a.disconnect(nobody)
    assert not a.send(nobody, [b"x"])


def test_a_flood_of_one_does_not_starve_the_others(make: Make, tmp_path: Path) -> None:
    """Connections take turns, although one of them always has more messages."""
    third = rank_peer(3)
    a, b, c = make(A), make(B), make(third)
    for name, asked in ((B, b), (third, c)):
        a.connect(name, f"ipc://{tmp_path}/{name.decode()}")
        a.send(name, [b"hello"])
        receive(asked)
    for i in range(BACKLOG):
        b.send(A, [b"%d" % i])
    assert receive(a) == (B, [b"0"])
    c.send(A, [b"one"])
    for i in range(1, LONG):
        b.send(A, [b"%d" % (BACKLOG + i - 1)])
        came = receive(a)
        if came == (third, [b"one"]):
            break
        assert came == (B, [b"%d" % i])
    else:
        pytest.fail(f"it has not arrived after {LONG} messages of another")


def test_a_message_to_itself_arrives_before_messages_that_others_send_in_response(
    pair: tuple[PeerTransport, PeerTransport],
) -> None:
    """An actor that a rank spawns in its own process exists before a process that has learnt of it calls it."""
    a, b = pair
    for i in range(BACKLOG):
        a.send(B, [b"ask"])
        assert receive(b) == (A, [b"ask"])
        b.send(B, [b"own %d" % i])
        b.send(A, [b"told"])
        assert receive(a) == (B, [b"told"])
        a.send(B, [b"because of it"])
        assert receive(b) == (B, [b"own %d" % i])
        assert receive(b) == (A, [b"because of it"])
