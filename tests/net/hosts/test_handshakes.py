"""Connections whose handshake is not complete: how many may wait, for how long, and what happens to the descriptors."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import psutil
import pytest
import zmq

from monarch_kernel.net.hosts import handshakes, tcp
from monarch_kernel.net.hosts.handshakes import (
    BACKLOG,
    HANDSHAKE_MS,
    MAX_WAITING,
    PATIENCE_S,
    HandshakeGuard,
    read_event,
)
from monarch_kernel.net.hosts.links import new_keys
from monarch_kernel.net.wire.config import LinkKeys
from tests.failures.strangers import besieged
from tests.net.transport.pump import pump_until
from tests.support.ports import free_ports
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until


class Door:
    """A listener that the test runs, and that serves a peer with the keys."""

    def __init__(self, handshake_ms: int) -> None:
        self.keys = new_keys()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.listener = self.context.socket(zmq.ROUTER)
        self.listener.linger = 0
        self.listener.curve_secretkey = self.keys.secret.encode()
        self.listener.curve_publickey = self.keys.public.encode()
        self.listener.curve_server = True
        self.listener.setsockopt(zmq.HANDSHAKE_IVL, handshake_ms)
        self.listener.setsockopt(zmq.BACKLOG, BACKLOG)
        self.guard = HandshakeGuard(self.context, self.listener)
        (self.port,) = free_ports(1)  # no client of another test that has lost its server dials it
        self.listener.bind(f"tcp://127.0.0.1:{self.port}")
        self.heard: list[bytes] = []
        self.senders: set[bytes] = set()  # by connection

    def turn(self) -> None:
        poller = zmq.Poller()
        for each in (self.listener, self.guard.monitor):
            poller.register(each, zmq.POLLIN)
        poller.poll(10)
        self.guard.tend()
        while self.listener.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
            sender, word = self.listener.recv_multipart()
            self.heard.append(word)
            self.senders.add(sender)

    def turn_until(self, condition: Callable[[], object]) -> None:
        pump_until(condition, self.turn, "connections")

    def busy_s(self) -> float:
        """Return the processor time that half a second of running the listener costs this process."""
        used_s, begin = time.process_time(), time.monotonic()
        while time.monotonic() < begin + 0.5:
            self.turn()
        return time.process_time() - used_s

    def close(self) -> None:
        self.listener.disable_monitor()
        self.guard.close()
        self.context.destroy(linger=0)


@pytest.fixture
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    door = Door(getattr(request, "param", 4000))
    yield door
    door.close()


@pytest.fixture
def friends(door: Door) -> Iterator[Callable[[bytes], zmq.Socket[bytes]]]:
    """Make peers that have the keys, and that send a word."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[zmq.Socket[bytes]] = []

    def make(word: bytes, keys: LinkKeys = door.keys) -> zmq.Socket[bytes]:
        end = context.socket(zmq.DEALER)
        made.append(end)
        end.linger = 0
        end.curve_serverkey = end.curve_publickey = keys.public.encode()
        end.curve_secretkey = keys.secret.encode()
        end.connect(f"tcp://127.0.0.1:{door.port}")
        end.send(word)
        return end

    yield make
    for end in made:
        end.close()
    context.term()


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int], None]]:
    """Limit this process to this many free descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(count: int) -> None:
        taken = [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")]
        limit = next(limit for limit in range(soft) if limit - sum(fd < limit for fd in taken) == count + 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit - 1, hard))

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def pretend(door: Door, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace functions that the door's guard calls; the guards of other listeners of this process call the real ones."""

    def replace(module: ModuleType, name: str, double: Callable[..., Any]) -> None:
        real = getattr(module, name)

        def call(*args: Any) -> Any:
            is_doors = door.port in args or door.guard.monitor in args
            return (double if is_doors else real)(*args)

        monkeypatch.setattr(module, name, call)

    return replace


def open_here() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("door", [1000], indirect=True)
def test_a_silent_connection_is_closed_after_a_while(door: Door) -> None:
    with socket.create_connection(("127.0.0.1", door.port), LONG_S) as silent:
        door.turn_until(lambda: door.guard.refused)
        assert silent.recv(1000)[:1] in (b"\xff", b"")
    assert not door.guard._waiting


def test_the_number_of_waiting_connections_is_limited(
    door: Door, friends: Callable[[bytes], zmq.Socket[bytes]]
) -> None:
    before = open_here()
    friends(b"first")
    door.turn_until(lambda: b"first" in door.heard)
    with besieged("nothing", [door.port], 480):
        door.turn_until(lambda: door.guard.refused >= 480 - MAX_WAITING)
        assert open_here() <= before + MAX_WAITING + 32  # the friend's, and those of the process of the strangers
        friends(b"second")
        door.turn_until(lambda: b"second" in door.heard)
        door.turn_until(lambda: door.guard.refused >= 480)
    assert door.guard.refused == 480
    assert len(door.heard) == 2


def test_peers_with_the_keys_are_never_refused(door: Door, friends: Callable[[bytes], zmq.Socket[bytes]]) -> None:
    """This holds even if other connections arrive between their connection and their handshake."""
    with besieged("nothing", [door.port], 300, waits=True) as besieger:
        ends = [friends(b"%d" % i) for i in range(40)]
        besieger.begin()
        door.turn_until(lambda: len(door.heard) == 40)
    door.turn_until(lambda: door.guard.refused >= 300)
    for end in ends:
        end.send(b"still here")
    door.turn_until(lambda: len(door.heard) == 80)
    assert len(door.senders) == 40  # no peer had to connect again
    assert door.guard.refused == 300


@pytest.mark.parametrize("door", [HANDSHAKE_MS], indirect=True)
def test_hundreds_of_peers_with_the_keys_may_connect_at_once(
    door: Door, friends: Callable[[bytes], zmq.Socket[bytes]]
) -> None:
    ends = [friends(bytes(10_000)) for _ in range(200)]  # more than may wait; with many more the last might time out
    door.turn_until(lambda: len(door.heard) == 200)
    for end in ends:
        end.send(b"still here")
    door.turn_until(lambda: len(door.heard) == 400)
    assert len(door.senders) == 200
    assert door.guard.refused == 0


def test_a_peer_authenticated_while_others_are_checked_is_not_refused(
    door: Door, friends: Callable[[bytes], zmq.Socket[bytes]], pretend: Callable[..., None]
) -> None:
    """Libzmq reports the second one while the bytes of the first one are read, and not before."""
    for _ in range(2):
        friends(bytes(10_000))
    told = []
    while sum(kind == zmq.EVENT_HANDSHAKE_SUCCEEDED for kind, _ in told) < 2:
        assert door.guard.monitor.poll(LONG_S * 1000)
        told.append(read_event(door.guard.monitor))
    fds = [value for kind, value in told if kind == zmq.EVENT_ACCEPTED]
    wait_until(lambda: min(tcp.nbytes_received(fd, door.port) for fd in fds) >= 10_000, "all their messages to arrive")
    late = [told.pop()]
    received = tcp.nbytes_received

    def look(fd: int, port: int) -> int:
        if fd not in door.guard._waiting:
            told.extend(late)
            late.clear()
        return received(fd, port)

    pretend(tcp, "nbytes_received", look)
    pretend(handshakes, "has_message", lambda monitor: bool(told))
    pretend(handshakes, "read_event", lambda monitor: told.pop(0))
    door.guard.look()
    assert not late
    assert (door.guard._waiting, door.guard._closing) == ({}, set())


def test_a_connection_that_ends_while_it_is_checked_is_not_closed(door: Door, pretend: Callable[..., None]) -> None:
    """The third check of the monitor finds an event: the connection has closed."""
    found = iter([False, False, True, False])
    ended: list[int] = []
    door.guard._ports.add(door.port)
    door.guard._waiting[99] = time.monotonic()
    pretend(tcp, "nbytes_received", lambda fd, port: 5000)
    pretend(tcp, "hang_up", lambda fd, port: ended.append(fd))
    pretend(handshakes, "has_message", lambda monitor: next(found))
    pretend(handshakes, "read_event", lambda monitor: (zmq.EVENT_DISCONNECTED, 99))
    door.guard.look()
    assert list(found) == []
    assert (ended, door.guard._waiting, door.guard._closing) == ([], {}, set())
    assert door.guard.refused == 1


def test_at_the_limit_of_descriptors_authenticated_peers_stay_and_others_cost_little(
    door: Door, friends: Callable[[bytes], zmq.Socket[bytes]], few_descriptors: Callable[[int], None], bar: Bar
) -> None:
    friend = friends(b"first")
    door.turn_until(lambda: b"first" in door.heard)
    with besieged("nothing", [door.port], 200, waits=True) as besieger:
        few_descriptors(10)
        besieger.begin()
        door.turn_until(lambda: door.guard.refused >= 200)
        friend.send(b"still here")
        door.turn_until(lambda: b"still here" in door.heard)
        bar.check(door.busy_s(), 0.25, "half a second")  # libzmq does not call accept() in an endless loop
    few_descriptors(100)
    friends(b"second")
    door.turn_until(lambda: b"second" in door.heard)


def test_with_no_descriptor_left_strangers_are_refused_from_the_queue(
    door: Door, few_descriptors: Callable[[int], None], bar: Bar
) -> None:
    with besieged("nothing", [door.port], 50, waits=True) as besieger:
        door.turn()
        few_descriptors(0)
        besieger.begin()
        door.turn_until(lambda: door.guard.refused >= 50)
        bar.check(door.busy_s(), 0.25, "half a second")


def test_descriptors_of_other_files_are_never_shut_down(door: Door) -> None:
    """A descriptor may refer to another file by the time that the monitor reports it."""
    with ExitStack() as stack:
        ours, theirs = map(stack.enter_context, socket.socketpair())
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        near = stack.enter_context(socket.create_connection(server.getsockname()))
        far = stack.enter_context(server.accept()[0])
        file = stack.enter_context(open(os.devnull))
        for fd in (ours.fileno(), near.fileno(), far.fileno(), file.fileno(), 9999):
            assert tcp.nbytes_received(fd, door.port) == -1
            tcp.hang_up(fd, door.port)
        ours.sendall(b"x")
        near.sendall(b"x")
        assert theirs.recv(1) == far.recv(1) == b"x"


@pytest.mark.slow
@pytest.mark.parametrize("door", [60_000], indirect=True)
def test_a_peer_that_gives_up_during_a_pause_is_not_counted_as_refused(door: Door) -> None:
    """It may have the keys: this process was stopped, or its interpreter blocked."""
    with ExitStack() as stack:
        patient = stack.enter_context(socket.create_connection(("127.0.0.1", door.port)))
        door.turn_until(lambda: len(door.guard._waiting) == 1)
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", door.port))).close()
        until = time.monotonic() + 1.1 * PATIENCE_S
        while time.monotonic() < until:  # without a call of look()
            door.listener.poll(100)
        with socket.create_connection(("127.0.0.1", door.port)):  # after the others, whose events have arrived
            door.turn_until(lambda: len(door.guard._waiting) == 2)
        door.turn_until(lambda: len(door.guard._waiting) == 1)
        assert door.guard.refused == 0
        until = time.monotonic() + 1.1 * PATIENCE_S
        door.turn_until(lambda: time.monotonic() > until)
        patient.close()
        door.turn_until(lambda: not door.guard._waiting)
        assert door.guard.refused == 1


def test_an_unread_flood_of_events_blocks_no_connection(
    door: Door, friends: Callable[[bytes], zmq.Socket[bytes]]
) -> None:
    """Otherwise libzmq's thread would wait until its monitor is read, and all connections with it."""
    friend = friends(b"first")
    door.turn_until(lambda: b"first" in door.heard)
    before = psutil.Process().memory_info().rss
    with besieged("storm", [door.port], 5000):  # without a call of look()
        friend.send(b"again")
        assert door.listener.poll(1000 * LONG_S), "held up"
    with socket.create_connection(("127.0.0.1", door.port), LONG_S):
        door.turn_until(lambda: len(door.guard._waiting) == 1)  # the last one
    assert psutil.Process().memory_info().rss - before < 64 << 20
