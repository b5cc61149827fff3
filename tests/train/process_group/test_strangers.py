"""Connections of gloo that no rank has made, and ports that are closed."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import closing

import pytest

from monarch_kernel.train.process_group.sockets import Socket, open_sockets, stand_in
from monarch_kernel.train.process_group.strangers import Ends, check, close_ports, ends_of, is_lazy


def socket_of(a: socket.socket) -> Socket:
    return Socket(a.fileno(), os.readlink(f"/proc/self/fd/{a.fileno()}"))


def published(listener: socket.socket) -> bytes:
    """What gloo writes to the store: somewhere in it the address, as in C."""
    address, port = listener.getsockname()[:2]
    if listener.family == socket.AF_INET6:
        name = (
            struct.pack("=H", socket.AF_INET6)
            + struct.pack("!HI", port, 0)
            + socket.inet_pton(socket.AF_INET6, address)
        )
    else:
        name = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(address)
    return b"\1\0\0\0" + name + bytes(100)


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        listener = socket.create_server((request.param, 0), family=family)
    except OSError as error:
        pytest.skip(f"this machine has no {request.param}: {error}")
    with listener:
        yield listener


def test_connections_that_ranks_have_made_are_accepted() -> None:
    check(
        {
            4: Ends("a", ["10.0.0.2 7", "10.0.0.2 8"], [], {}),
            5: Ends("b", ["10.0.0.2 9"], ["10.0.0.2 7"], {}),
            6: Ends("b", [], ["10.0.0.2 8", "10.0.0.2 9", "10.0.0.2 99"], {}),  # the last one is not gloo's
        }
    )


def test_a_connection_that_no_rank_has_made_is_named_with_its_user() -> None:
    ends = {
        0: Ends("a", ["127.0.0.1 7", "127.0.0.1 8"], [], {"127.0.0.1 8": "eve"}),
        1: Ends("a", [], ["127.0.0.1 7"], {}),
    }
    with pytest.raises(ConnectionError, match=r"rank 0 on a from 127\.0\.0\.1 8 \(user eve\)\. It could take"):
        check(ends)


def test_many_strangers_are_counted_and_those_that_have_left_too() -> None:
    ends = {rank: Ends("a", ["127.0.0.1 9", ""], [], {}) for rank in range(3)}
    with pytest.raises(ConnectionError, match=r"rank 0 on a from a connection that has ended, .* and 3 more\."):
        check(ends)


def test_the_ends_of_connections_are_found_among_other_sockets(listener: socket.socket) -> None:
    with (
        closing(socket.create_connection(listener.getsockname()[:2])) as theirs,
        closing(listener.accept()[0]) as ours,
        closing(socket.socket(socket.AF_UNIX)) as other,
    ):
        ends = ends_of(map(socket_of, (listener, ours, other)), [published(listener)])
        name = theirs.getsockname()
        assert (list(ends.accepted), list(ends.made), ends.users) == ([f"{name[0]} {name[1]}"], [], {})
        ends = ends_of(map(socket_of, (theirs, other)), [published(listener)])
        assert (list(ends.accepted), list(ends.made)) == ([], [f"{name[0]} {name[1]}"])


def test_a_closed_port_takes_no_connection_and_those_that_there_are_stay(listener: socket.socket) -> None:
    address = listener.getsockname()[:2]
    with (
        closing(socket.create_connection(address)) as theirs,
        closing(listener.accept()[0]) as ours,
        closing(socket.create_server(("127.0.0.1", 0))) as other,
    ):
        close_ports(open_sockets(), [published(listener)])
        with pytest.raises(TimeoutError):
            socket.create_connection(address, 0.05)
        theirs.sendall(b"x")
        assert ours.recv(1) == b"x"
        socket.create_connection(other.getsockname()).close()  # gloo has not published it: the user's own
    stand_in([socket_of(listener)], 1000)  # does not wait for a port that takes nothing


def test_a_port_stays_open_if_gloo_connects_later(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    assert is_lazy()
    close_ports(open_sockets(), [published(listener)])
    socket.create_connection(listener.getsockname()[:2]).close()
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    assert not is_lazy()
