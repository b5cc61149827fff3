"""The contract of all transports: one class of tests that each transport passes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch_kernel.net.hosts.zmq import ZmqRank, ZmqRouter
from monarch_kernel.net.transport.base import CONTROLLER, Peer, Transport, host_peer, is_rank, proc_of, rank_peer
from monarch_kernel.net.transport.loopback import MemoryHub
from monarch_kernel.net.wire.codec import Frame
from tests.net.transport.pump import pump_until
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until

SOON_S = 5.0
"""Far longer than a wait that an event ends."""


class Net:
    """A controller and its peers on one kind of transport; closes the transports that it made."""

    def __init__(self, make: Callable[[Peer], Transport]) -> None:
        self._make = make
        self._made: list[Transport] = []
        self.controller = self.connect(CONTROLLER)

    def connect(self, name: Peer) -> Transport:
        self._made.append(self._make(name))
        return self._made[-1]

    def peer(self, name: Peer) -> Transport:
        """Connect a peer that the controller has heard of."""
        peer = self.connect(name)
        assert peer.send(CONTROLLER, [b"hello"])
        assert receive(self.controller) == (name, [b"hello"])
        return peer

    def wait_until_gone(self, name: Peer) -> None:
        """Return when the controller has noticed that a peer has left."""
        pump_until(
            lambda: not self.controller.send(name, [b"are you there"]),
            lambda: self.controller.wait(0.01),
            f"{name.decode()} to be known as gone",
        )

    def close(self) -> None:
        for transport in reversed(self._made):
            transport.close()


def receive(transport: Transport) -> tuple[Peer, list[bytes]]:
    """Return the next message; fails if the message did not end the wait, even if it is there afterwards."""
    while (received := transport.recv()) is None:
        wait_for_an_event(transport)
    return received[0], [bytes(part) for part in received[1]]


def wait_for_an_event(transport: Transport) -> None:
    """Wait, and fail if nothing but the timeout ended the wait."""
    deadline = time.monotonic() + LONG_S
    transport.wait(LONG_S)
    assert time.monotonic() < deadline, "no event ended the wait"


def make_memory(folder: Path) -> Callable[[Peer], Transport]:
    return MemoryHub().connect


def make_zmq(folder: Path) -> Callable[[Peer], Transport]:
    address = f"ipc://{folder}/c"

    def make(name: Peer) -> Transport:
        if name == CONTROLLER:
            return ZmqRouter(address)
        return ZmqRank(address, name, f"ipc://{folder}/{name.decode()}")

    return make


def make_lines(folder: Path) -> Callable[[Peer], Transport]:
    address = f"ipc://{folder}/c"

    def make(name: Peer) -> Transport:
        if name == CONTROLLER:
            return ZmqRouter(address)
        return ZmqRank(address, name, f"ipc://{folder}/{name.decode()}", has_line=is_rank(name))

    return make


KINDS: dict[str, Callable[[Path], Callable[[Peer], Transport]]] = {
    "memory": make_memory,
    "zmq": make_zmq,
    "lines": make_lines,
}


@pytest.mark.parametrize("kind", KINDS)
class TestTransport:
    @pytest.fixture
    def net(self, kind: str, tmp_path: Path) -> Iterator[Net]:
        net = Net(KINDS[kind](tmp_path))
        yield net
        net.close()

    def test_order_per_sender_and_receiver(self, net: Net) -> None:
        names = [rank_peer(i) for i in range(3)]
        peers = {name: net.peer(name) for name in names}
        count = 100  # more than the system keeps go on when the sender waits, which it does not do here
        for i in range(count):
            for name in random.Random(i).sample(names, 3):
                assert net.controller.send(name, [b"%d" % i])
                assert peers[name].send(CONTROLLER, [b"%d" % i, name])
        expected = [b"%d" % i for i in range(count)]
        for peer in peers.values():
            assert [receive(peer) for _ in expected] == [(CONTROLLER, [text]) for text in expected]
        came: dict[Peer, list[bytes]] = {name: [] for name in names}
        for _ in range(3 * count):
            sender, (text, name) = receive(net.controller)
            assert sender == name
            came[sender].append(text)
        assert came == dict.fromkeys(names, expected)
        assert net.controller.recv() is None

    @pytest.mark.parametrize(
        "parts", [[b""], [b"a", b""], [b"", b"", b"x"], [b"%d" % i for i in range(50)], [b"\0\xff", b"\n" * 1000]]
    )
    def test_messages_of_several_frames_arrive_whole(self, net: Net, parts: list[Frame]) -> None:
        peer = net.peer(b"R1")
        assert peer.send(CONTROLLER, parts)
        assert receive(net.controller) == (b"R1", parts)
        assert net.controller.send(b"R1", parts)
        assert receive(peer) == (CONTROLLER, parts)

    def test_large_frames(self, net: Net) -> None:
        peer = net.peer(b"H1")
        big = random.Random(0).randbytes(8 * 2**20)
        parts = [b"header", big, b"small", memoryview(big)[1:], bytearray(big[:100_000])]
        expected = [bytes(part) for part in parts]
        assert net.controller.send(b"H1", parts)  # type: ignore[arg-type]
        assert receive(peer) == (CONTROLLER, expected)
        assert peer.send(CONTROLLER, parts)  # type: ignore[arg-type]
        assert receive(net.controller) == (b"H1", expected)

    def test_frames_after_the_header_may_be_written_to(self, net: Net) -> None:
        """Arrays use their memory, and users change arrays in place."""
        peer = net.peer(b"R1")
        for sender, receiver, name in ((peer, net.controller, CONTROLLER), (net.controller, peer, b"R1")):
            assert sender.send(name, [b"header", b"array", b"more" * 50_000])
            while (received := receiver.recv()) is None:
                wait_for_an_event(receiver)
            header, *frames = received[1]
            assert isinstance(header, bytes)
            assert not any(memoryview(frame).readonly for frame in frames)

    def test_received_frames_are_copies(self, net: Net) -> None:
        peer = net.peer(b"R1")
        data = bytearray(b"before")
        assert peer.send(CONTROLLER, [b"header", memoryview(data)])
        assert receive(net.controller)[1] == [b"header", b"before"]
        data[:] = b"after."
        assert peer.send(CONTROLLER, [b"header", memoryview(data)])
        assert receive(net.controller)[1] == [b"header", b"after."]

    def test_sending_to_an_unknown_peer_fails(self, net: Net) -> None:
        peer = net.peer(b"R1")
        assert net.controller.send(b"R2", [b"x", b"y"]) is False
        assert peer.send(b"R2", [b"x"]) is False
        assert net.controller.send(b"R1", [b"next"])
        assert receive(peer) == (CONTROLLER, [b"next"])

    def test_sending_to_a_peer_that_has_left_fails(self, net: Net) -> None:
        net.peer(b"R1").close()
        net.wait_until_gone(b"R1")

    def test_a_peer_can_replace_one_that_has_left(self, net: Net) -> None:
        """It has another name: ZeroMQ takes a while to forget a name, and meanwhile ignores a new peer of that name."""
        net.peer(rank_peer(1)).close()
        net.wait_until_gone(rank_peer(1))
        another = net.peer(rank_peer(1, 1))
        assert net.controller.send(rank_peer(1, 1), [b"x"])
        assert receive(another) == (CONTROLLER, [b"x"])

    def test_nothing_to_receive(self, net: Net) -> None:
        assert net.controller.recv() is None
        assert net.controller.recv() is None

    @pytest.mark.parametrize("timeout_s", [0.0, 0.05])
    def test_timeouts(self, net: Net, timeout_s: float, bar: Bar) -> None:
        net.peer(b"R1")
        net.controller.wait(0)  # may return early once, for a message that was read already
        begin = time.monotonic()
        net.controller.wait(timeout_s)
        bar.check_above(time.monotonic() - begin, timeout_s * 0.9, "a wait for nothing")
        with bar.below(SOON_S, "a wait for nothing"):
            net.controller.wait(timeout_s)
        assert net.controller.recv() is None

    def test_wait_ends_when_a_message_arrives(self, net: Net, bar: Bar) -> None:
        peer = net.peer(b"R1")
        sender = threading.Thread(target=lambda: peer.send(CONTROLLER, [b"x"]))
        with bar.below(SOON_S, "a message"):
            sender.start()
            assert receive(net.controller) == (b"R1", [b"x"])
        sender.join()

    def test_wait_returns_while_a_message_is_unread(self, net: Net, bar: Bar) -> None:
        peer = net.peer(b"R1")
        for i in range(3):
            assert peer.send(CONTROLLER, [b"%d" % i])
        assert receive(net.controller)[1] == [b"0"]
        for i in (1, 2):
            # The messages arrived at about the same time, and one signal may stand for all.
            with bar.below(SOON_S, "a wait with a message there"):
                wait_for_an_event(net.controller)
            assert receive(net.controller)[1] == [b"%d" % i]

    def test_wake_ends_wait(self, net: Net, bar: Bar) -> None:
        about_to_wait = threading.Event()

        def wake() -> None:
            about_to_wait.wait(LONG_S)
            net.controller.wake()

        waker = threading.Thread(target=wake)
        waker.start()
        about_to_wait.set()
        with bar.below(SOON_S, "a wake"):
            wait_for_an_event(net.controller)
        waker.join()

    def test_wake_before_wait_is_not_lost_and_counts_once(self, net: Net, bar: Bar) -> None:
        for _ in range(3):
            net.controller.wake()
        with bar.below(SOON_S, "a wait after a wake"):
            wait_for_an_event(net.controller)
        begin = time.monotonic()
        net.controller.wait(0.05)
        bar.check_above(time.monotonic() - begin, 0.045, "the wait after that")

    @pytest.mark.parametrize("rounds", [300, pytest.param(3000, marks=pytest.mark.slow)])
    def test_no_wake_is_lost(self, net: Net, rounds: int) -> None:
        """The controller sees a flag that another thread sets before it calls wake(), in any interleaving."""
        asked, seen = [0], threading.Semaphore(0)

        def ask() -> None:
            for i in range(rounds):
                asked[0] = i + 1
                net.controller.wake()
                if not seen.acquire(timeout=2 * LONG_S):  # longer than a wait that has lost a wake-up
                    return

        client = threading.Thread(target=ask)
        client.start()
        try:
            for i in range(rounds):
                while asked[0] == i:
                    wait_for_an_event(net.controller)
                seen.release()
        finally:
            seen.release(rounds)
            client.join()

    def test_no_wait_misses_a_message(self, net: Net) -> None:
        """Peers run on separate threads, and the receiver sleeps whenever there is no message."""
        peers = [net.peer(rank_peer(i)) for i in range(3)]
        count = 500

        def echo(peer: Transport) -> None:
            for _ in range(count):
                peer.send(CONTROLLER, receive(peer)[1])

        threads = [threading.Thread(target=echo, args=[peer]) for peer in peers]
        for thread in threads:
            thread.start()
        for i in range(count):
            for j in range(3):
                assert net.controller.send(rank_peer(j), [b"%d" % i])
            assert {receive(net.controller)[0] for _ in range(3)} == {b"R0", b"R1", b"R2"}
        for thread in threads:
            thread.join()

    def test_close_twice_and_wake_after(self, net: Net) -> None:
        peer = net.peer(b"R1")
        for transport in (peer, net.controller):
            transport.close()
            transport.close()
            transport.wake()

    def test_messages_sent_before_close_arrive(self, net: Net) -> None:
        peer = net.peer(b"R1")
        for i in range(100):
            assert peer.send(CONTROLLER, [b"%d" % i])
        peer.close()
        assert [receive(net.controller)[1] for _ in range(100)] == [[b"%d" % i] for i in range(100)]

    def test_waking_while_closing_touches_no_other_descriptor(self, kind: str, tmp_path: Path) -> None:
        """The number of a closed descriptor goes to the next file that is opened; a late wake() must not write to it."""
        for i in range(30):
            folder = tmp_path / str(i)
            folder.mkdir()
            transport = KINDS[kind](folder)(CONTROLLER)
            over = threading.Event()

            def wake(transport: Transport = transport, over: threading.Event = over) -> None:
                while not over.is_set():
                    transport.wake()

            waker = threading.Thread(target=wake)
            waker.start()
            transport.close()
            reads, writes = zip(*[os.pipe2(os.O_NONBLOCK) for _ in range(20)], strict=True)
            over.set()
            waker.join()
            try:
                for read in reads:
                    with pytest.raises(BlockingIOError):
                        os.read(read, 8)
            finally:
                for descriptor in (*reads, *writes):
                    os.close(descriptor)

    def test_nothing_leaks(self, kind: str, tmp_path: Path) -> None:
        def held() -> tuple[int, int]:
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        def use(folder: Path) -> None:
            folder.mkdir()
            net = Net(KINDS[kind](folder))
            peer = net.peer(b"R1")
            net.controller.send(b"R1", [b"x", b"y" * 200_000])
            receive(peer)
            net.close()

        use(tmp_path / "first")  # libraries keep some files open after the first use
        descriptors, threads = held()
        for i in range(5):
            use(tmp_path / str(i))
        wait_until(lambda: held()[0] <= descriptors, "descriptors to be closed")
        wait_until(lambda: held()[1] <= threads, "threads to end")


class TestMemory:
    """Features of the memory transport only."""

    def test_manual_delivery(self) -> None:
        hub = MemoryHub(manual=True)
        controller, one, two = hub.connect(), hub.connect(b"R1"), hub.connect(b"R2")
        for peer in (b"R1", b"R2"):
            for text in (b"a", b"b"):
                assert controller.send(peer, [text])
        assert one.recv() is None
        assert hub.waiting == [(CONTROLLER, b"R1"), (CONTROLLER, b"R2")]
        hub.deliver(CONTROLLER, b"R2")
        assert two.recv() == (CONTROLLER, [b"a"])
        assert one.recv() is None
        hub.drop(CONTROLLER, b"R1")
        hub.deliver(CONTROLLER, b"R1")
        assert one.recv() == (CONTROLLER, [b"b"])
        assert hub.waiting == [(CONTROLLER, b"R2")]

    def test_a_disconnected_peer_loses_the_messages_in_transit(self) -> None:
        hub = MemoryHub(manual=True)
        controller, one = hub.connect(), hub.connect(b"R1")
        assert controller.send(b"R1", [b"a"])
        assert one.send(CONTROLLER, [b"b"])
        hub.cut(b"R1")
        assert hub.waiting == []
        assert controller.send(b"R1", [b"c"]) is False
        assert one.send(CONTROLLER, [b"d"]) is False
        again = hub.connect(b"R1")
        assert controller.send(b"R1", [b"e"])
        hub.deliver(CONTROLLER, b"R1")
        assert again.recv() == (CONTROLLER, [b"e"])


def test_names() -> None:
    assert rank_peer(12) == rank_peer(12, 0) == b"R12"
    assert rank_peer(12, 3) == b"R12+3"
    assert proc_of(rank_peer(12)) == proc_of(rank_peer(12, 3)) == 12
    assert proc_of(CONTROLLER) == 0
    with pytest.raises(ValueError, match="H3"):
        proc_of(host_peer(3))
    assert [is_rank(peer) for peer in (rank_peer(1), rank_peer(1, 2), host_peer(1), CONTROLLER)] == [
        True,
        True,
        False,
        False,
    ]
    assert host_peer(3) == b"H3"
    assert CONTROLLER not in {rank_peer(0), host_peer(0)}
