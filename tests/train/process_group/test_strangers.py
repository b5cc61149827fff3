"""Connections of gloo that no rank has made, and ports that are closed."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import pytest
import torch.distributed as torch_distributed

from monarch_kernel.train.process_group.sockets import Socket, open_sockets, stand_in
from monarch_kernel.train.process_group.strangers import (
    Ends,
    admit,
    close_ports,
    closed_ports,
    ends_of,
    is_lazy,
    strangers_among,
)


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


A, B = "10.0.0.1 5", "10.0.0.2 6"
"""The listeners of two ranks."""


def test_connections_that_ranks_have_made_are_no_strangers() -> None:
    ends = [
        Ends("a", [["10.0.0.2 7", A], ["10.0.0.2 8", A]], []),
        Ends("b", [["10.0.0.2 9", B]], [["10.0.0.2 7", A]]),
        Ends(
            "b", [], [["10.0.0.2 8", A], ["10.0.0.2 9", B], ["10.0.0.2 99", "10.0.0.3 1"]]
        ),  # the last one is not gloo's
    ]
    assert strangers_among(ends) == {}


def test_connections_that_no_rank_has_made_are_strangers_and_those_that_have_ended_too() -> None:
    ends = [
        Ends("a", [["127.0.0.1 7", A], ["127.0.0.1 8", A]], []),
        Ends("a", [], [["127.0.0.1 7", A]]),
        Ends("a", [["", B]], []),
    ]
    assert strangers_among(ends) == {0: ["127.0.0.1 8"], 2: [""]}


def test_a_connection_from_the_port_of_a_rank_to_another_listener_is_a_stranger() -> None:
    ends = [
        Ends("a", [["127.0.0.1 7", A]], []),
        Ends("a", [["127.0.0.1 7", B]], []),
        Ends("a", [], [["127.0.0.1 7", A]]),
    ]
    assert strangers_among(ends) == {1: ["127.0.0.1 7"]}


IP_LOCAL_PORT_RANGE = 51
"""Option of sockets of Linux 6.3 and later: the ports from which a connection may come."""


def test_another_process_can_connect_from_the_port_of_a_rank_and_is_found() -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as first,
        closing(socket.create_server(("127.0.0.1", 0))) as second,
        closing(socket.create_connection(first.getsockname())) as ours,
        closing(socket.socket()) as theirs,
        closing(first.accept()[0]) as at_first,
    ):
        port = ours.getsockname()[1]
        try:
            theirs.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("=I", port << 16 | port))
        except OSError as error:
            pytest.skip(f"this Linux chooses ports itself: {error}")
        theirs.connect(second.getsockname())
        assert theirs.getsockname()[1] == port
        with closing(second.accept()[0]) as at_second:
            ends = [
                ends_of(map(socket_of, (first, at_first)), [published(first)]),
                ends_of(map(socket_of, (second, at_second)), [published(second)]),
                ends_of([socket_of(ours)], []),
            ]
    assert strangers_among(ends) == {1: [f"127.0.0.1 {port}"]}


class Group(NamedTuple):
    """A rank of a group of two, as far as `admit` uses it."""

    number: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return 2


class Connected(NamedTuple):
    """A stranger's connection to a listener of gloo: its end, and the one that gloo has accepted."""

    theirs: socket.socket
    ours: socket.socket


@pytest.fixture
def stranger(listener: socket.socket) -> Iterator[Connected]:
    with closing(socket.create_connection(listener.getsockname()[:2])) as theirs, closing(listener.accept()[0]) as ours:
        yield Connected(theirs, ours)


def say(stranger: Connected, text: bytes, n_read: int) -> None:
    """Let a stranger send a text, of which gloo reads so many bytes."""
    stranger.theirs.sendall(text)
    stranger.ours.settimeout(5)
    assert stranger.ours.recv(len(text), socket.MSG_PEEK | socket.MSG_WAITALL) == text
    assert len(stranger.ours.recv(n_read)) == n_read


def test_all_ranks_get_an_error_that_names_the_strangers(listener: socket.socket, stranger: Connected) -> None:
    """The group has the global ranks 4 and 7, and rank 7 has accepted a connection of no rank, too."""
    store = torch_distributed.HashStore()
    store.set("monarch/ends/0", json.dumps(Ends("a", [[f"10.0.0.9 {port}", A] for port in (1, 2, 3)], [])))
    store.set("monarch/feared/0", json.dumps(["10.0.0.9 1 (user eve)", "10.0.0.9 2", "10.0.0.9 3"]))
    say(stranger, struct.pack("=q", 0), 8)
    expected = r"rank 4 on a from 10\.0\.0\.9 1 \(user eve\), .*, rank 4 on a from 10\.0\.0\.9 3 and 1 more\."
    with pytest.raises(ConnectionError, match=expected):
        admit(Group(1), store, (4, 7), map(socket_of, (listener, stranger.ours)), [published(listener)])
    with pytest.raises(TimeoutError):
        socket.create_connection(listener.getsockname()[:2], 0.05)


@pytest.mark.parametrize("listener", ["127.0.0.1"], indirect=True)
def test_the_error_names_the_process_that_has_connected(listener: socket.socket, stranger: Connected) -> None:
    store = torch_distributed.HashStore()
    store.set("monarch/ends/1", json.dumps(Ends("b", [], [])))
    say(stranger, struct.pack("=q", 1) + b"a message", 17)
    port = stranger.theirs.getsockname()[1]
    with pytest.raises(ConnectionError, match=rf" from 127\.0\.0\.1 {port} \(pid {os.getpid()}, .*python"):
        admit(Group(0), store, (), map(socket_of, (listener, stranger.ours)), [published(listener)])


@pytest.mark.parametrize(
    ("text", "n_read"), [(b"", 0), (b"GET", 3), (b"GET / HTTP/1.1\r\n\r\n", 8), (b"\xff" + bytes(8) + b"\x7f", 8)]
)
@pytest.mark.parametrize("ends", [False, True])
def test_a_connection_that_has_taken_no_place_is_cut_and_the_group_is_used(
    listener: socket.socket, stranger: Connected, text: bytes, n_read: int, ends: bool
) -> None:
    """Such as a client of ZeroMQ that connects again and again to a program that has ended."""
    store = torch_distributed.HashStore()
    store.set("monarch/ends/1", json.dumps(Ends("b", [], [])))
    say(stranger, text, n_read)
    if ends:
        stranger.theirs.shutdown(socket.SHUT_WR)
    admit(Group(0), store, (), map(socket_of, (listener, stranger.ours)), [published(listener)])
    stranger.theirs.settimeout(5)
    assert stranger.theirs.recv(1) == b""
    assert stranger.ours.recv(100) == b""  # gloo finds nothing that it could read


def test_the_ends_of_connections_are_found_among_other_sockets(listener: socket.socket) -> None:
    with (
        closing(socket.create_connection(listener.getsockname()[:2])) as theirs,
        closing(listener.accept()[0]) as ours,
        closing(socket.socket(socket.AF_UNIX)) as other,
    ):
        ends = ends_of(map(socket_of, (listener, ours, other)), [published(listener)])
        connection = tuple(f"{name[0]} {name[1]}" for name in (theirs.getsockname(), listener.getsockname()))
        assert (ends.accepted, ends.made) == ([connection], [])
        ends = ends_of(map(socket_of, (theirs, other)), [published(listener)])
        assert (ends.accepted, ends.made) == ([], [connection])


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


def test_a_port_is_closed_for_a_while_and_then_open(listener: socket.socket) -> None:
    with closed_ports(open_sockets, [published(listener)]), socket.socket(listener.family) as early:
        early.settimeout(0.2)
        with pytest.raises(TimeoutError):
            early.connect(listener.getsockname())
    with socket.create_connection(listener.getsockname()[:2], 10):
        pass
