"""Connections within a host: messages of any size arrive whole and in order, and no sender waits for a reader."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from monarch_kernel.net.hosts.zmq import ZmqRank
from monarch_kernel.net.transport.base import CONTROLLER, rank_peer
from monarch_kernel.net.transport.unix_packets import (
    FLUSHED_AT_ONCE,
    MAX_BUFFERS,
    PACKET_NBYTES,
    PacketListener,
    PacketSocket,
)
from monarch_kernel.net.wire.codec import Frame, WireError
from tests.net.transport.pump import pump_until
from tests.net.transport.test_conformance import receive, wait_for_an_event
from tests.support.descriptors import none_left
from tests.support.timing import Bar

ME, OTHER = rank_peer(1), rank_peer(9)

MESSAGES = [
    [b"one"],
    [b"", b"", b""],
    [b"head", b"x" * PACKET_NBYTES],
    [b"head", b"odd", os.urandom(3 * PACKET_NBYTES + 1), b"", os.urandom(PACKET_NBYTES), b"end"],
    [b"%d" % i for i in range(MAX_BUFFERS + 1)],
    [b"%d" % i for i in range(3 * PACKET_NBYTES // 4)],
]


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[PacketListener]:
    listener = PacketListener(f"{tmp_path}/listener")
    yield listener
    listener.close()


@pytest.fixture
def pair(tmp_path: Path, listener: PacketListener) -> Iterator[tuple[PacketSocket, PacketSocket]]:
    a = PacketSocket.connect(f"{tmp_path}/listener")
    b = listener.accept()
    assert b is not None
    yield a, b
    a.close()
    b.close()


def next_of(end: PacketSocket, other: PacketSocket | None = None) -> list[bytes]:
    """Return the next message, while the other end continues to send."""

    def go_on() -> None:
        assert not end.is_over
        if other is not None:
            other.flush()

    return [bytes(part) for part in pump_until(end.recv, go_on, "a message") or ()]


@pytest.mark.parametrize(
    "parts", MESSAGES, ids=["one", "empty", "just too long", "long", "many", "a table that is long"]
)
def test_a_message_of_any_size_arrives_whole(pair: tuple[PacketSocket, PacketSocket], parts: list[bytes]) -> None:
    a, b = pair
    for sender, receiver in ((a, b), (b, a)):
        sender.send(parts)
        assert next_of(receiver, sender) == parts
        assert not sender.has_unsent


def test_a_sender_does_not_wait_for_the_reader_and_order_is_kept(pair: tuple[PacketSocket, PacketSocket]) -> None:
    a, b = pair
    sent = [parts for _ in range(2) for parts in MESSAGES]
    for parts in sent:
        a.send(parts)
    assert a.has_unsent
    assert 0 < a.unsent_nbytes < sum(len(part) + 100 for parts in sent for part in parts)
    assert [next_of(b, a) for _ in sent] == sent
    assert a.unsent_nbytes == 0
    assert b.recv() is None
    assert not b.is_over


def test_a_fast_reader_does_not_occupy_the_sender(
    pair: tuple[PacketSocket, PacketSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    large = bytes(64 << 20)
    really, sent = PacketSocket._send, 0

    def send(self: PacketSocket, packet: Sequence[Frame]) -> bool:
        nonlocal sent
        while not really(self, packet):
            b.recv()  # there is always room
        sent += 1
        return True

    monkeypatch.setattr(PacketSocket, "_send", send)
    a.send([b"head", b"", large])
    assert sent <= FLUSHED_AT_ONCE + 1
    while a.has_unsent:
        sent = 0
        a.flush()
        assert sent <= FLUSHED_AT_ONCE


def test_frames_may_be_written_to_and_those_of_long_messages_are_aligned(
    pair: tuple[PacketSocket, PacketSocket],
) -> None:
    a, b = pair
    for nbytes in (10, 3 * PACKET_NBYTES):
        a.send([b"to", b"head", b"odd", b"x" * nbytes])
        while (parts := b.recv()) is None:
            a.flush()
        to, head, _, frame = parts
        assert isinstance(to, bytes)
        assert isinstance(head, bytes)
        assert isinstance(frame, memoryview)
        frame[0] = 1
        assert ctypes.addressof(ctypes.c_char.from_buffer(frame)) % 16 == 0


def test_the_end_of_a_connection_is_reported_after_its_last_message(pair: tuple[PacketSocket, PacketSocket]) -> None:
    a, b = pair
    a.send([b"the last"])
    a.close()
    assert next_of(b) == [b"the last"]
    assert not b.is_over
    assert b.recv() is None
    assert b.is_over
    b.send([b"unread"])


@pytest.mark.parametrize("has_unread", [False, True], ids=["closed", "reset"])
def test_a_connection_that_ends_in_the_middle_of_a_message_is_over(
    pair: tuple[PacketSocket, PacketSocket], has_unread: bool
) -> None:
    a, b = pair
    if has_unread:  # then the system reports ECONNRESET, and sent data is lost
        b.send([b"unread"])
    a.send([b"head", bytes(50 * PACKET_NBYTES)])
    assert a.has_unsent
    a.close()

    def look() -> None:
        assert b.recv() is None

    pump_until(lambda: b.is_over, look, "the end to be known")


def test_what_was_sent_arrives_also_if_the_sender_ended_with_messages_unread(
    pair: tuple[PacketSocket, PacketSocket],
) -> None:
    """The system reports ECONNRESET first, and the messages after that."""
    a, b = pair
    b.send([b"unread"])
    for i in range(3):
        a.send([b"%d" % i])
    a.close()
    came: list[bytes] = []

    def look() -> None:
        came.extend(bytes(part) for part in b.recv() or ())

    pump_until(lambda: b.is_over, look, "the end to be known")
    assert came == [b"0", b"1", b"2"]


def test_a_connection_waits_until_a_descriptor_is_free(tmp_path: Path, listener: PacketListener) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        with none_left():
            other.connect(f"{tmp_path}/listener")
            assert listener.accept() is None
        accepted = listener.accept()
        assert accepted is not None
        accepted.close()


def test_an_invalid_packet_raises_a_wire_error(tmp_path: Path, listener: PacketListener) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"{tmp_path}/listener")
        end = listener.accept()
        assert end is not None
        stranger.send(b"short")
        with pytest.raises(WireError, match="not a packet"):
            end.recv()
        stranger.send(b"\xff" * 100)
        with pytest.raises(WireError, match="not a packet"):
            end.recv()
        end.close()


def test_only_the_same_user_can_connect_and_only_to_a_listener(tmp_path: Path, listener: PacketListener) -> None:
    assert stat.S_IMODE(os.stat(tmp_path / "listener").st_mode) == 0o600
    assert listener.accept() is None
    with pytest.raises(FileNotFoundError):
        PacketSocket.connect(f"{tmp_path}/nobody")


# -- a rank whose agent is the test


@pytest.fixture
def rank(tmp_path: Path, listener: PacketListener) -> Iterator[tuple[ZmqRank, PacketSocket]]:
    rank = ZmqRank("", ME, f"ipc://{tmp_path}/R1", f"ipc://{tmp_path}/listener")
    agent = listener.accept()
    assert agent is not None
    assert next_of(agent) == [ME]
    yield rank, agent
    agent.close()
    rank.close()


def test_a_rank_of_another_host_reaches_the_controller_through_its_agent(rank: tuple[ZmqRank, PacketSocket]) -> None:
    end, agent = rank
    assert end.send(CONTROLLER, [b"hello", b"frame"])
    assert next_of(agent) == [CONTROLLER, b"hello", b"frame"]
    for i in range(100):
        agent.send([CONTROLLER, b"%d" % i])
    assert [receive(end) for _ in range(100)] == [(CONTROLLER, [b"%d" % i]) for i in range(100)]
    assert not end.send(OTHER, [b"nobody knows it"])
    agent.send([OTHER, b"asks"])
    assert receive(end) == (OTHER, [b"asks"])
    assert end.send(OTHER, [b"answer"])  # on the same path
    assert next_of(agent) == [OTHER, b"answer"]
    assert end.recv() is None


def test_packets_that_the_agent_does_not_read_at_once_are_sent_while_the_rank_waits(
    rank: tuple[ZmqRank, PacketSocket], bar: Bar
) -> None:
    end, agent = rank
    large = os.urandom(20 * PACKET_NBYTES)
    for i in range(3):
        assert end.send(CONTROLLER, [b"%d" % i, large])

    def go_on() -> None:
        end.wait(0.01)
        assert end.recv() is None

    for i in range(3):
        parts = pump_until(agent.recv, go_on, "what the rank sends") or ()
        assert [bytes(part) for part in parts] == [CONTROLLER, b"%d" % i, large]
    begin = time.monotonic()
    end.wait(0.05)
    bar.check_above(time.monotonic() - begin, 0.04, "a wait of a rank that can write, and has nothing to write,")


def test_a_rank_whose_agent_has_ended_sleeps(rank: tuple[ZmqRank, PacketSocket], bar: Bar) -> None:
    end, agent = rank
    agent.close()
    wait_for_an_event(end)
    assert end.recv() is None
    assert end.send(CONTROLLER, [b"unread"])
    begin = time.monotonic()
    end.wait(0.05)
    bar.check_above(time.monotonic() - begin, 0.04, "a wait of a rank whose agent is gone")
