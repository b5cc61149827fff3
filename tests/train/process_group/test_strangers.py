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
from monarch_kernel.train.process_group.strangers import Ends, admit, close_ports, ends_of, is_lazy, strangers_among


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


def test_connections_that_ranks_have_made_are_no_strangers() -> None:
    ends = [
        Ends("a", ["10.0.0.2 7", "10.0.0.2 8"], []),
        Ends("b", ["10.0.0.2 9"], ["10.0.0.2 7"]),
        Ends("b", [], ["10.0.0.2 8", "10.0.0.2 9", "10.0.0.2 99"]),  # the last one is not gloo's
    ]
    assert strangers_among(ends) == {}


def test_connections_that_no_rank_has_made_are_strangers_and_those_that_have_ended_too() -> None:
    ends = [
        Ends("a", ["127.0.0.1 7", "127.0.0.1 8"], []),
        Ends("a", [], ["127.0.0.1 7"]),
        Ends("a", [""], []),
    ]
    assert strangers_among(ends) == {0: ["127.0.0.1 8"], 2: [""]}


class Group(NamedTuple):
    """A rank of a group of two, as far as `admit` uses it."""

    number: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return 2


def test_all_ranks_get_an_error_that_names_the_strangers(listener: socket.socket) -> None:
    """The group has the global ranks 4 and 7, and rank 7 has accepted connections of no rank."""
    store = torch_distributed.HashStore()
    store.set("monarch/ends/0", json.dumps(Ends("a", ["10.0.0.9 1", "10.0.0.9 2", "10.0.0.9 3"], [])))
    store.set("monarch/users/0", json.dumps({"10.0.0.9 1": "eve"}))
    expected = r"rank 4 on a from 10\.0\.0\.9 1 \(user eve\), .*, rank 4 on a from 10\.0\.0\.9 3 and 1 more\."
    with (
        closing(socket.create_connection(listener.getsockname()[:2])),
        closing(listener.accept()[0]) as ours,
        pytest.raises(ConnectionError, match=expected),
    ):
        admit(Group(1), store, (4, 7), map(socket_of, (listener, ours)), [published(listener)])
    with pytest.raises(TimeoutError):
        socket.create_connection(listener.getsockname()[:2], 0.05)


def test_the_ends_of_connections_are_found_among_other_sockets(listener: socket.socket) -> None:
    with (
        closing(socket.create_connection(listener.getsockname()[:2])) as theirs,
        closing(listener.accept()[0]) as ours,
        closing(socket.socket(socket.AF_UNIX)) as other,
    ):
        ends = ends_of(map(socket_of, (listener, ours, other)), [published(listener)])
        name = theirs.getsockname()
        assert (ends.accepted, ends.made) == ([f"{name[0]} {name[1]}"], [])
        ends = ends_of(map(socket_of, (theirs, other)), [published(listener)])
        assert (ends.accepted, ends.made) == ([], [f"{name[0]} {name[1]}"])


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
