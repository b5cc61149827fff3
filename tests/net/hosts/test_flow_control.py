"""Flow control to a neighbour: bytes in transit are limited to what the connection takes in a moment; beats never wait."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_kernel.net.hosts.flow_control import PIECE_NBYTES, Outbox
from monarch_kernel.net.hosts.links import MAX_FRAME_NBYTES
from monarch_kernel.net.hosts.relay import Relay
from monarch_kernel.net.wire.codec import Frame
from monarch_kernel.net.wire.envelope import Beat, Entry, Hop, open_envelope

C = b"C"
LEAST = 256 << 10


def filled(n: int) -> Outbox:
    """Make an outbox with this many pieces of a message."""
    box = Outbox()
    for i in range(n):
        box.put(Entry([Hop(1, 0, i + 1, 0, [b"R1"], [C])], 1, True, True), [bytes(PIECE_NBYTES)])
    return box


def numbers(messages: Sequence[Sequence[Frame]]) -> list[int]:
    return [hop.number for parts in messages for entry in open_envelope(parts).entries for hop in entry.hops]


def nbytes(messages: Sequence[Sequence[Frame]]) -> int:
    return sum(len(frame) for parts in messages for frame in parts[1:])


def test_pieces_are_separate_messages_and_only_some_go_before_the_first_is_received() -> None:
    box = filled(100)
    messages = list(box.messages())
    assert [len(parts) for parts in messages] == [2] * len(messages), "an envelope and a piece"
    assert nbytes(messages) == LEAST
    assert list(box.messages()) == []
    assert box.acknowledge(0, PIECE_NBYTES)
    more = list(box.messages())
    assert more
    assert numbers(messages) + numbers(more) == list(range(1, len(messages) + len(more) + 1))


def test_small_messages_share_one_envelope() -> None:
    box = Outbox()
    for i in range(50):
        box.put(Entry([Hop(1, 0, i + 1, 0, [b"R1"], [C])], 1), [b"%d" % i])
    (parts,) = box.messages()
    assert numbers([parts]) == list(range(1, 51))


def test_a_beat_overtakes_waiting_messages_and_does_not_count_them() -> None:
    box = filled(100)
    box.put_beat(Beat(1, 0, 0, 100, 7))
    first, *_ = box.messages()
    assert open_envelope(first).beats == [Beat(1, 0, 0, 0, 7)]
    box.put_beat(Beat(1, 0, 0, 100, 8, again=True))
    box.put_beat(Beat(1, 0, 0, 100, 9))
    (alone,) = box.messages()
    assert open_envelope(alone).beats == [Beat(1, 0, 0, 0, 9, again=True)]


def test_a_beat_follows_the_messages_it_counts_if_none_wait() -> None:
    box = filled(1)
    box.put_beat(Beat(1, 0, 0, 1, 0))
    (parts,) = box.messages()
    envelope = open_envelope(parts)
    assert len(envelope.entries) == 1
    assert envelope.beats == [Beat(1, 0, 0, 1, 0)]


def test_bytes_in_transit_are_limited_to_those_received_in_half_a_beat() -> None:
    box = filled(3000)
    given = taken = 0
    for rate in (40, 400, 400):  # pieces per beat
        box.tick()
        for _ in range(20):
            given += nbytes(list(box.messages()))
            taken = min(given, taken + rate * PIECE_NBYTES // 20)
            box.acknowledge(0, taken)
    given += nbytes(list(box.messages()))
    assert 100 * PIECE_NBYTES < given - taken <= 250 * PIECE_NBYTES
    box.tick()
    box.tick()  # nothing was taken
    assert list(box.messages()) == []


def test_lost_bytes_count_as_received_when_a_later_message_arrives() -> None:
    there, here = filled(100), Outbox()
    while there.waits:
        assert list(there.messages())  # all of it is lost with the connection
        there.put_beat(Beat(1, 0, 0, 0, 0))
        (beat,) = there.messages()
        envelope = open_envelope(beat)
        assert here.acknowledge(envelope.given, envelope.taken)
        (told,) = here.messages()
        there.acknowledge(open_envelope(told).given, open_envelope(told).taken)
    assert not there.waits


def test_acknowledging_more_than_was_sent_has_no_effect() -> None:
    box = filled(100)
    list(box.messages())
    box.acknowledge(10**15, 10**15)
    assert nbytes(list(box.messages())) < 1 << 20


def test_a_small_message_is_not_stuck_behind_a_large_one_of_another_host() -> None:
    controller, first, second = Relay(0), Relay(1, default=0), Relay(2, default=1)
    first.greet(0)
    second.greet(0)
    first.send(b"R1", C, 0, [bytes(50 << 20)])
    assert nbytes([parts for _, parts in first.flush()]) < 1 << 20
    second.beat()
    for _, parts in second.flush():
        list(first.receive(2, parts))
    passed_on = first.flush()
    assert nbytes([parts for _, parts in passed_on]) == 0
    for _, parts in passed_on:
        list(controller.receive(1, parts))
    assert 2 in controller.active


def test_waiting_messages_move_to_another_path() -> None:
    relay = Relay(1, default=0)
    relay.send(b"R1", b"R2", 2, [bytes(10 << 20)])
    went = numbers([parts for neighbour, parts in relay.flush() if neighbour == 0])
    relay.lead(2, 2)
    moved = numbers([parts for neighbour, parts in relay.flush() if neighbour == 2])
    assert moved[0] == went[-1] + 1
    assert not relay._outboxes[0].waits


def test_a_message_with_very_many_receivers_is_split_into_bounded_frames() -> None:
    box = Outbox()
    box.put(
        Entry([Hop(0, host, 1, 0, [C], [b"R%d" % rank for rank in range(500)]) for host in range(1, 401)], 1), [b"x"]
    )
    box.put(Entry([Hop(0, 1, 2, 0, [C], [b"R1"])], 1), [b"y"])
    messages = list(box.messages())
    assert max(len(frame) for parts in messages for frame in parts) < MAX_FRAME_NBYTES / 2
    hops = [hop for parts in messages for entry in open_envelope(parts).entries for hop in entry.hops]
    assert [(hop.target, hop.number) for hop in hops] == [*((host, 1) for host in range(1, 401)), (1, 2)]
