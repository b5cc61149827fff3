"""TCP connections on which nothing gets through are distinguished from those that are only quiet."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from monarch_kernel.net.hosts import tcp
from tests.bed.bed import Bed, BedHost, why_not
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until


@pytest.fixture(scope="module")
def host() -> Iterator[BedHost]:
    if why := why_not():
        pytest.skip(why)
    bed = Bed()
    try:
        with bed.entered():
            yield bed.add()
    finally:
        bed.close()


@pytest.fixture
def ends(host: BedHost) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Make a connection: this end, and that of the host."""
    with host.namespace.entered():
        server = socket.create_server((host.address, 0))
    with server, socket.create_connection(server.getsockname(), 5) as ours:
        theirs, _ = server.accept()
        with theirs:
            yield ours, theirs
    host.suffer()


def stays_free(end: socket.socket, looks: int) -> bool:
    """Whether a connection does not become stuck while the system's timers run, in this many checks 10 ms apart."""
    over = threading.Event()
    return not any(over.wait(0.01) or tcp.is_stuck(end.fileno()) for _ in range(looks))


def test_a_connection_is_stuck_while_the_network_is_cut(
    host: BedHost, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = ends
    ours.sendall(b"x")
    assert theirs.recv(10) == b"x"
    host.cut()
    assert stays_free(ours, 50), "nothing was sent"
    ours.sendall(b"y")
    wait_until(lambda: tcp.is_stuck(ours.fileno()), "the connection to be stuck")
    host.restore()
    theirs.settimeout(LONG_S)
    assert theirs.recv(10) == b"y"
    wait_until(lambda: not tcp.is_stuck(ours.fileno()), "the connection to be free")


def test_a_peer_that_does_not_read_is_not_stuck(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = ends
    ours.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 16))
    assert stays_free(ours, 100)


def test_the_round_trip_time_is_measured(host: BedHost, ends: tuple[socket.socket, socket.socket], bar: Bar) -> None:
    ours, theirs = ends
    host.suffer(delay_s=0.05)
    for _ in range(20):
        ours.sendall(b"x")
        theirs.recv(1)
        theirs.sendall(b"y")
        ours.recv(1)
    assert tcp.round_trip_s(ours.fileno()) > 0
    bar.check_above(tcp.round_trip_s(ours.fileno()), 0.06, "a round trip")
    bar.check(tcp.round_trip_s(ours.fileno()), 0.2, "a round trip")


def test_other_descriptors_are_not_connections() -> None:
    one, other = socket.socketpair()
    with one as local, other, open(os.devnull) as file:
        for fd in (local.fileno(), file.fileno(), 99_999):
            assert not tcp.is_stuck(fd)
            assert tcp.round_trip_s(fd) == 0.0
