"""Threads of launchers: delayed tasks, and port forwarding."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.launch import port_forward
from monarch_kernel.launch.port_forward import Tunnel
from monarch_kernel.launch.task_thread import DelayedTasks
from tests.support.stranger import run_as_nobody
from tests.support.waiting import wait_until


def test_tasks_run_in_order_even_if_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    tasks, done, go_on = DelayedTasks("tasks"), [], threading.Event()
    tasks.at(0.0, go_on.wait)
    tasks.at(0.05, lambda: done.append("later"))
    tasks.at(0.0, lambda: done.append("now"))
    tasks.at(0.0, lambda: 1 / 0)
    tasks.at(-1.0, lambda: done.append("first"))
    go_on.set()
    wait_until(lambda: len(done) == 3, "all tasks")
    assert done == ["first", "now", "later"]
    (record,) = caplog.records
    assert record.exc_info is not None
    assert repr(record.exc_info[1]) == "ZeroDivisionError('division by zero')"
    tasks.at(3600.0, lambda: done.append("never"))
    tasks.close()
    tasks.at(0.0, lambda: done.append("too late"))
    tasks.close()
    assert len(done) == 3


def test_closing_a_thread_that_never_had_a_task() -> None:
    DelayedTasks("tasks").close()


@pytest.fixture
def echo() -> Iterator[socket.socket]:
    """A server that echoes data until the connection ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        while data := connection.recv(1 << 16):
                            connection.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def connect(tunnel: Tunnel) -> socket.socket:
    host, _, port = tunnel.address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_a_tunnel_carries_data_in_both_directions(echo: socket.socket) -> None:
    tunnel = Tunnel(lambda: socket.create_connection(echo.getsockname()), "tunnel")
    for _ in range(2):  # in sequence: the first connection has ended before the second
        with connect(tunnel) as here:
            data = b"x" * 1_000_000
            sender = threading.Thread(target=here.sendall, args=(data,))
            sender.start()
            got = 0
            while got < len(data):
                got += len(here.recv(1 << 16))
            sender.join()
    tunnel.close()


def test_closing_a_tunnel_ends_its_connections(echo: socket.socket) -> None:
    tunnel = Tunnel(lambda: socket.create_connection(echo.getsockname()), "tunnel")
    with connect(tunnel) as here:
        here.sendall(b"hello")
        assert here.recv(5) == b"hello"
        tunnel.close()
        assert here.recv(5) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(tunnel)


def test_a_tunnel_carries_nothing_of_another_user(echo: socket.socket) -> None:
    made: list[socket.socket] = []

    def to_there() -> socket.socket:
        made.append(socket.create_connection(echo.getsockname()))
        return made[-1]

    tunnel = Tunnel(to_there, "tunnel")
    code = """
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.settimeout(20)
print(connection.recv(5))
"""
    assert run_as_nobody(code, tunnel.address.rpartition(":")[2]) == "b''\n"
    assert made == []
    with connect(tunnel) as here:
        here.sendall(b"hello")
        assert here.recv(5) == b"hello"
    tunnel.close()


def test_a_tunnel_goes_on_when_descriptors_are_free_again(echo: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, pauses, problems = socket.socket.accept, [], [OSError(errno.EMFILE, "too many open files")]

    def accept_later(listener: socket.socket) -> tuple[socket.socket, Any]:
        if threading.current_thread().name == "tunnel" and problems:
            raise problems.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    monkeypatch.setattr(port_forward, "time", SimpleNamespace(sleep=pauses.append))
    tunnel = Tunnel(lambda: socket.create_connection(echo.getsockname()), "tunnel")
    with connect(tunnel) as here:
        here.sendall(b"hello")
        assert here.recv(5) == b"hello"
    assert len(pauses) == 1
    tunnel.close()


def test_a_tunnel_recovers_after_a_failed_connection(echo: socket.socket) -> None:
    ways = iter([OSError("the other end is unreachable"), None])

    def to_there() -> socket.socket:
        if (problem := next(ways)) is not None:
            raise problem
        return socket.create_connection(echo.getsockname())

    tunnel = Tunnel(to_there, "tunnel")
    with connect(tunnel) as here:
        assert here.recv(5) == b""
    with connect(tunnel) as here:
        here.sendall(b"hello")
        assert here.recv(5) == b"hello"
    tunnel.close()


def test_a_tunnel_for_one_takes_the_next_peer_directly_after_the_first_has_left(
    echo: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_come, go_on = threading.Event(), threading.Event()
    ways: list[Any] = []

    class Slow:
        """The remote end of the first peer, which the thread of the tunnel waits for while that peer leaves."""

        def __init__(self) -> None:
            self._is_over = threading.Event()

        def recv(self, nbytes: int, /) -> bytes:
            self._is_over.wait()
            return b""

        def sendall(self, data: bytes, /) -> None:
            has_come.set()
            go_on.wait()

        def shutdown(self, how: int, /) -> None:
            self._is_over.set()

        def close(self) -> None:
            pass

    def to_there() -> Any:
        ways.append(socket.create_connection(echo.getsockname()) if ways else Slow())
        return ways[-1]

    has_left = port_forward._has_left

    def note_that_it_has_left(peer: socket.socket) -> bool:
        if is_over := has_left(peer):
            go_on.set()
        return is_over

    monkeypatch.setattr(port_forward, "_has_left", note_that_it_has_left)
    tunnel = Tunnel(to_there, "tunnel", only_one=True)
    first = connect(tunnel)
    first.sendall(b"hello")
    has_come.wait()
    with connect(tunnel) as second:
        assert second.recv(5) == b""
    first.close()
    with connect(tunnel) as next_one:
        next_one.sendall(b"hello")
        assert next_one.recv(5) == b"hello"
    tunnel.close()
    assert len(ways) == 2
