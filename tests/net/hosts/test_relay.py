"""The relay: messages arrive once and in order, on any path, however often connections lose what is in transit."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monarch_kernel.net.hosts import flow_control
from monarch_kernel.net.hosts.flow_control import MAX_FOLD_NBYTES, PIECE_NBYTES
from monarch_kernel.net.hosts.relay import Relay
from monarch_kernel.net.wire.codec import Frame, WireError
from monarch_kernel.net.wire.envelope import open_envelope

C = b"C"


class Net:
    """Relays, the connections between them, and all delivered messages."""

    def __init__(self, links: Sequence[tuple[int, int]], epoch: int = 0) -> None:
        hosts = {host for link in links for host in link} | {0}
        self.relays = {host: Relay(host, epoch, default=None if host == 0 else 0) for host in sorted(hosts)}
        self.wires: dict[tuple[int, int], list[list[Frame]]] = {}
        self.open = {frozenset(link) for link in links}
        self.got: list[tuple[int, bytes, bytes, tuple[bytes, ...]]] = []
        self.carried: list[tuple[int, int, list[Frame]]] = []

    def __getitem__(self, host: int) -> Relay:
        return self.relays[host]

    def flush(self) -> None:
        """Send the waiting messages; those without a connection are lost."""
        for host, relay in self.relays.items():
            for neighbour, parts in relay.flush():
                self.carried.append((host, neighbour, parts))
                if frozenset((host, neighbour)) in self.open:
                    self.wires.setdefault((host, neighbour), []).append(parts)

    def step(self) -> bool:
        """Deliver the messages in transit; returns False if there were none."""
        self.flush()
        wires, self.wires = self.wires, {}
        for (source, target), messages in wires.items():
            for parts in messages:
                for delivery in self.relays[target].receive(source, parts):
                    frames = tuple(bytes(frame) for frame in delivery.frames)
                    self.got += [(target, s, r, frames) for s in delivery.senders for r in delivery.receivers]
        return bool(wires)

    def settle(self, beats: int = 6) -> None:
        """Run until everything is sent, and lost messages were sent again."""
        for _ in range(beats):
            for relay in self.relays.values():
                relay.beat()
            for _ in range(100):
                if not self.step():
                    break

    def cut(self, one: int, other: int) -> None:
        """Break a connection, and drop the messages in transit."""
        self.open.discard(frozenset((one, other)))
        self.wires.pop((one, other), None)
        self.wires.pop((other, one), None)

    def join(self, one: int, other: int) -> None:
        """Make a connection."""
        self.open.add(frozenset((one, other)))

    def received(self, host: int, receiver: bytes, sender: bytes) -> list[bytes]:
        """Return what one process has received from another, in order."""
        return [frames[0] for at, s, r, frames in self.got if (at, s, r) == (host, sender, receiver)]

    def envelopes(self, source: int, target: int) -> list[Any]:
        """Return the envelopes that one host has sent to another."""
        return [open_envelope(parts) for s, t, parts in self.carried if (s, t) == (source, target)]


def star(*hosts: int) -> Net:
    """Make a controller, and hosts that have sent a beat."""
    net = Net([(0, host) for host in hosts])
    for host in hosts:
        net[host].greet(0)
    net.settle(1)
    net.carried.clear()
    return net


def test_a_broadcast_travels_once_per_host_and_reaches_each_rank_once() -> None:
    net = star(1, 2)
    frames = [b"hello"]
    for host, rank in [(1, b"R1"), (1, b"R2"), (2, b"R3"), (2, b"R4")]:
        net[0].send(C, rank, host, frames)
    net.settle()
    assert sorted(net.got) == [
        (host, C, rank, (b"hello",)) for host, rank in [(1, b"R1"), (1, b"R2"), (2, b"R3"), (2, b"R4")]
    ]
    assert sum(len(envelope.entries) for envelope in net.envelopes(0, 1)) == 1


def test_equal_answers_are_folded_and_keep_their_senders() -> None:
    net = star(1)
    for rank in (b"R1", b"R2", b"R3"):
        net[1].send(rank, C, 0, [b"the answer is 42"])
    net[1].send(b"R4", C, 0, [b"the answer is 43"])
    net.settle()
    assert [sender for _, sender, _, frames in net.got if frames == (b"the answer is 42",)] == [b"R1", b"R2", b"R3"]
    entries = [entry for envelope in net.envelopes(1, 0) for entry in envelope.entries]
    assert [entry.hops[0].senders for entry in entries] == [[b"R1", b"R2", b"R3"], [b"R4"]]


def test_folding_never_lets_a_message_overtake_another_of_the_same_sender() -> None:
    net = star(1)
    for rank, text in [(b"R1", b"a"), (b"R2", b"b"), (b"R2", b"a"), (b"R1", b"b"), (b"R1", b"a")]:
        net[1].send(rank, C, 0, [text])
    net.settle()
    assert net.received(0, C, b"R1") == [b"a", b"b", b"a"]
    assert net.received(0, C, b"R2") == [b"b", b"a"]


def test_the_same_frames_sent_twice_arrive_twice() -> None:
    net = star(1)
    frames = [b"again"]
    net[0].send(C, b"R1", 1, frames)
    net[0].send(C, b"R1", 1, frames)
    net.settle()
    assert net.received(1, b"R1", C) == [b"again", b"again"]


def test_messages_lost_with_a_connection_are_sent_again_in_order() -> None:
    net = star(1)
    net[0].send(C, b"R1", 1, [b"0"])
    net.step()
    net.flush()
    for i in range(1, 4):
        net[0].send(C, b"R1", 1, [b"%d" % i])
    net.flush()
    net.cut(0, 1)  # with the messages in transit
    net[0].send(C, b"R1", 1, [b"4"])
    net.flush()
    net.join(0, 1)
    net[0].send(C, b"R1", 1, [b"5"])
    net.settle()
    assert net.received(1, b"R1", C) == [b"%d" % i for i in range(6)]
    assert not net[0]._sessions[1].kept, "all of it is acknowledged"


def test_the_last_piece_of_a_large_message_costs_no_more_than_others() -> None:
    """Otherwise a host is silent for as long as it takes to join all pieces, and is considered dead."""
    net = star(1)
    large = os.urandom(1 << 20) * 256
    net[0].send(C, b"R1", 1, [b"head", large])
    costs: list[float] = []
    got: list[list[Frame]] = []
    for _ in range(len(large) // PIECE_NBYTES + 10):
        for _, parts in net[0].flush():
            start = time.process_time()
            got += [delivery.frames for delivery in net[1].receive(0, parts)]
            costs.append(time.process_time() - start)
        net[1].beat()
        for _, parts in net[1].flush():
            assert not list(net[0].receive(1, parts))
    assert got[0][1] == large
    assert costs[-1] < 0.1 * sum(costs)


def test_no_envelope_exceeds_the_limit_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_control, "MAX_NAMES", 100)
    net = star(1)
    for i in range(500):
        net[0].send(C, b"R1", 1, [b"%d" % i])
    net.settle()
    assert net.received(1, b"R1", C) == [b"%d" % i for i in range(500)]
    assert max(len(envelope.entries) for envelope in net.envelopes(0, 1)) == 25  # with four names each


def test_the_last_message_is_not_lost_either() -> None:
    net = star(1)
    net[1].send(b"R1", C, 0, [b"the only one"])
    net.flush()
    net.cut(0, 1)
    net.join(0, 1)
    net.settle()
    assert net.received(0, C, b"R1") == [b"the only one"]


def test_a_host_that_changes_its_path_loses_and_repeats_nothing() -> None:
    net = star(1, 2)
    net.join(1, 2)
    for i in range(20):
        net[2].send(b"R9", C, 0, [b"up %d" % i])
        net[0].send(C, b"R9", 2, [b"down %d" % i])
        if i == 5:  # it joins host 1
            net[2].lead_by(0, 1)
            net.cut(0, 2)
        if i == 12:  # which dies
            net.cut(1, 2)
            net.cut(0, 1)
            net.join(0, 2)
            net[2].lead_by(1, 0)
            net[2].beat()
        net.step()
    net.settle()
    assert net.received(0, C, b"R9") == [b"up %d" % i for i in range(20)]
    assert net.received(2, b"R9", C) == [b"down %d" % i for i in range(20)]


def test_answers_of_followers_are_folded_on_the_way_up() -> None:
    net = Net([(0, 1), (1, 2), (1, 3)])
    for host in (2, 3):
        net[host].lead_by(0, 1)
    for host in (1, 2, 3):
        net[host].greet(0)
    net.settle(3)
    net.carried.clear()
    for host in (1, 2, 3):
        net[host].send(b"R%d" % host, C, 0, [b"same"])
    for host in (2, 3):  # then host 1
        for neighbour, parts in net[host].flush():
            list(net[1].receive(host, parts)) if neighbour == 1 else None
    net.settle()
    assert sorted(sender for _, sender, _, _ in net.got) == [b"R1", b"R2", b"R3"]
    assert sum(len(envelope.entries) for envelope in net.envelopes(1, 0)) == 1


def test_forwarded_messages_are_folded_and_keep_the_order_of_each_host() -> None:
    net = Net([(0, 1), (1, 2), (1, 3)])
    for host in (2, 3):
        net[host].lead_by(0, 1)
    for host in (1, 2, 3):
        net[host].greet(0)
    net.settle(3)
    net.carried.clear()
    for host, texts in [(2, [b"a", b"b"]), (3, [b"b", b"a"])]:
        for text in texts:
            net[host].send(b"R%d" % host, C, 0, [text])
        for _, parts in net[host].flush():
            list(net[1].receive(host, parts))
    net.settle(1)
    entries = [entry for envelope in net.envelopes(1, 0) for entry in envelope.entries]
    assert len(entries) == 3
    for host in (2, 3):
        assert [hop.number for entry in entries for hop in entry.hops if hop.source == host] == [1, 2]


def test_ranks_of_two_hosts_communicate_through_the_controller_until_they_are_connected() -> None:
    net = star(1, 2)
    for i in range(3):
        net[1].send(b"R1", b"R2", 2, [b"%d" % i])
    net.step()
    net.join(1, 2)
    net[1].lead(2, 2)
    for i in range(3, 6):
        net[1].send(b"R1", b"R2", 2, [b"%d" % i])
    net.settle()
    assert net.received(2, b"R2", b"R1") == [b"%d" % i for i in range(6)]
    net.carried.clear()
    net[2].send(b"R2", b"R1", 1, [b"back"])
    net.settle(1)
    assert net.received(1, b"R1", b"R2") == [b"back"]
    assert all(not envelope.entries for envelope in net.envelopes(2, 0)), (
        "the answer takes the way that the question took"
    )


@pytest.mark.parametrize(
    "sizes",
    [
        [PIECE_NBYTES * 3 + 1],
        [10, PIECE_NBYTES, PIECE_NBYTES + 1, 0, 5],
        [0, 0],
        [PIECE_NBYTES],
        [PIECE_NBYTES - 10, 11, 3],
    ],
)
def test_a_large_message_travels_in_pieces_and_arrives_whole(sizes: list[int]) -> None:
    net = star(1)
    frames = [bytes([i]) * size for i, size in enumerate(sizes)]
    net[0].send(C, b"R1", 1, frames)
    net[0].send(C, b"R1", 1, [b"after"])
    net.settle()
    assert [frames_ for *_, frames_ in net.got] == [tuple(frames), (b"after",)]
    sent = [parts for s, t, parts in net.carried if (s, t) == (0, 1)]
    biggest = max(
        entry.nframes and sum(len(p) for p in parts[1:]) for parts in sent for entry in open_envelope(parts).entries
    )
    assert biggest >= min(sum(sizes), MAX_FOLD_NBYTES) or not sum(sizes)


def test_a_message_for_an_unknown_host_waits_for_a_path() -> None:
    net = Net([(0, 1)])
    net[0].send(C, b"R1", 1, [b"early"])
    net.flush()
    assert net.got == []
    net[1].greet(0)
    net.settle()
    assert net.received(1, b"R1", C) == [b"early"]


def test_a_host_that_was_given_up_is_ordered_to_end_and_its_messages_are_dropped() -> None:
    net = star(1)
    net[0].give_up(1)
    net[1].send(b"R1", C, 0, [b"I was only asleep"])
    net.settle(2)
    assert net.got == []
    assert net[1].is_given_up
    assert not star(1)[1].is_given_up


def test_a_new_controller_starts_a_new_epoch() -> None:
    net = star(1)
    net[0].send(C, b"R1", 1, [b"of the old one"])
    net[1].send(b"R1", C, 0, [b"for the old one"])
    net.settle()
    net[1].send(b"R1", C, 0, [b"nobody has heard this"])
    net.flush()
    net.wires.clear()
    net.got.clear()
    net.relays[0] = Relay(0, epoch=1)
    net[0].greet(1)
    net[0].send(C, b"R1", 1, [b"of the new one"])
    net.settle()
    net[1].send(b"R1", C, 0, [b"for the new one"])
    net.settle()
    assert net.received(1, b"R1", C) == [b"of the new one"]
    assert net.received(0, C, b"R1") == [b"for the new one"]


@pytest.mark.parametrize("parts", [[], [b""], [b"\xc1"], [b"\x92\x90"], [b"hello", b"world"]])
def test_garbage_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(WireError):
        list(Relay(0).receive(1, parts))


messages = st.tuples(
    st.sampled_from([0, 1, 2, 3]),
    st.integers(0, 3),
    st.sampled_from(["cut", "join", "move", "step", "beat", "send", "send", "send"]),
)


_GOES_AND_COMES_BACK = [(1, 2, "send"), (2, 0, "send"), (2, 1, "move"), (0, 0, "step"), (0, 0, "step"), (2, 0, "move")]


@example([(message, 0, 0) for message in _GOES_AND_COMES_BACK])
@given(st.lists(st.tuples(messages, st.integers(0, 3), st.integers(0, 2)), max_size=60))
def test_all_messages_arrive_once_and_in_order_whatever_breaks(
    script: list[tuple[tuple[int, int, str], int, int]],
) -> None:
    """A star of three hosts, each of which may change its path to go through another; connections break, and lose messages."""
    net = star(1, 2, 3)
    for one, other in [(1, 2), (2, 3), (1, 3)]:
        net.join(one, other)
    up = dict.fromkeys([1, 2, 3], 0)
    left: set[tuple[int, int]] = set()
    sent: dict[tuple[int, bytes, bytes], list[bytes]] = {}
    for (source, target, what), text, rank in script:
        if what == "send" and source != target:
            sender = C if source == 0 else b"R%d%d" % (source, rank)
            receiver = C if target == 0 else b"R%d0" % target
            net[source].send(sender, receiver, target, [b"%d" % text])
            sent.setdefault((target, receiver, sender), []).append(b"%d" % text)
        elif what == "cut" and source != target:
            net.cut(source, target)
            net.join(source, target)  # connected again, without the messages in transit
        elif what == "move" and source and target != source and (target == 0 or up[target] == 0):
            if all(way != source for way in up.values()):
                net.cut(source, up[source])  # like a gateway
                net.join(source, target)
                left.add((up[source], source))
                net[source].lead_by(up[source], target)
                up[source] = target
        elif what == "beat":
            net[source].beat()
        else:
            net.step()
    for former, host in left - {(0, host) for host in up}:
        if frozenset((former, host)) not in net.open:  # a gateway that has not heard from it for a while
            net[former].lead(host, up[former])
    net.settle(12)
    for (target, receiver, sender), texts in sent.items():
        assert net.received(target, receiver, sender) == texts
    assert sum(map(len, sent.values())) == len(net.got)
