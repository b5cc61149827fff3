"""Each token opens one stream; the number and the time of unauthenticated connections are limited; no call waits forever."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from monarch_kernel.runtime.buffers import streams
from monarch_kernel.runtime.buffers.streams import Invitation, Stream, StreamError, StreamListener, reach
from tests.support.waiting import LONG_S, wait_until

ANY = ["127.0.0.1"]


def echo(stream: Stream) -> None:
    """Send back each header."""
    while True:
        stream.send_header(stream.receive_header(LONG_S))


@pytest.fixture
def listener() -> Iterator[StreamListener]:
    listener = StreamListener(echo, lambda: ANY)
    yield listener
    listener.close()


def enter(invitation: Invitation, number: int = 0) -> Stream:
    address, stream = reach(invitation, invitation.tokens[number], LONG_S, lambda: False)
    assert address == "127.0.0.1"
    return stream


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))


def is_hung_up(connection: socket.socket) -> bool:
    """Whether the other end closes the connection without having sent anything."""
    connection.settimeout(LONG_S)
    try:
        return not connection.recv(1)
    except ConnectionResetError:
        return True


def test_each_token_opens_one_stream_and_the_port_closes_after_the_last(listener: StreamListener) -> None:
    invitation = listener.invite(2)
    with contextlib.closing(enter(invitation)) as first:
        first.send_header(b"hello")
        assert first.receive_header() == b"hello"
        with contextlib.closing(enter(invitation)) as again, pytest.raises(StreamError):  # noqa: PT012
            again.send_header(b"hello")
            again.receive_header()
        assert is_listening(invitation.port)
        with contextlib.closing(enter(invitation, 1)) as second:
            second.send_header(b"there")
            assert second.receive_header() == b"there"
            wait_until(lambda: not is_listening(invitation.port), "the port to be closed")
            first.send_header(b"still")
            assert first.receive_header() == b"still"
    later = listener.invite(1)
    with contextlib.closing(enter(later)) as third:
        third.send_header(b"again")
        assert third.receive_header() == b"again"


def test_another_certificate_is_rejected(listener: StreamListener) -> None:
    other = StreamListener(echo, lambda: ANY)
    theirs = other.invite(1)
    invitation = listener.invite(1)._replace(certificate=theirs.certificate)
    with pytest.raises(StreamError, match="certificate verify failed"):
        enter(invitation)
    other.close()


def test_a_closed_listener_refuses_connections(listener: StreamListener) -> None:
    invitation = listener.invite(1)
    listener.close()
    wait_until(lambda: not is_listening(invitation.port), "the port to be closed")
    with pytest.raises(StreamError, match="Connection refused"):
        enter(invitation)
    assert listener.invite(1).tokens == ()


def test_unauthenticated_connections_are_closed_and_do_not_block_invited_ones(
    listener: StreamListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_WAITING", 4)
    monkeypatch.setattr(streams, "HANDSHAKE_S", 1.0)
    invitation = listener.invite(1)
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", invitation.port)))

        crowd = [connect() for _ in range(12)]
        assert all(map(is_hung_up, crowd[:8]))  # the oldest ones, as others connect
        wait_until(lambda: threading.active_count() <= threads + 5, "the threads of the closed connections to end")
        monkeypatch.setattr(streams, "HANDSHAKE_S", LONG_S)  # for connections from now on
        noisy = connect()
        noisy.settimeout(LONG_S)
        noisy.sendall(bytes(1000))  # no handshake
        with contextlib.suppress(ConnectionResetError):
            while noisy.recv(100):  # TLS's alert
                pass
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE
        forged = stack.enter_context(plain.wrap_socket(connect()))
        forged.sendall(bytes(32))
        assert is_hung_up(forged)
        with contextlib.closing(enter(invitation)) as invited:
            invited.send_header(b"hello")
            assert invited.receive_header() == b"hello"
        assert all(map(is_hung_up, crowd))  # silent connections are not waited for


def test_ending_a_stream_waits_for_the_thread_that_serves_it() -> None:
    goes_on, has_started = threading.Event(), threading.Event()

    def serve(stream: Stream) -> None:
        stream.receive_header(LONG_S)
        has_started.set()
        goes_on.wait(LONG_S)  # as a thread does that copies
        stream.receive_header(LONG_S)

    listener = StreamListener(serve, lambda: ANY)
    invitation = listener.invite(2)
    with contextlib.closing(enter(invitation)) as stream:
        stream.send_header(b"hello")
        assert has_started.wait(LONG_S)
        ending = threading.Thread(target=listener.end, args=(stream.token,))
        ending.start()
        with pytest.raises(StreamError):
            stream.receive_header(LONG_S)  # the stream was ended
        assert ending.is_alive()
        goes_on.set()
        ending.join(LONG_S)
        assert not ending.is_alive()
    listener.end(invitation.tokens[1])  # an unused token
    with contextlib.closing(enter(invitation, 1)) as late, pytest.raises(StreamError):
        late.receive_header(LONG_S)
    listener.end(b"no token")
    listener.close()


def test_invitations_are_limited_by_the_number_of_streams(
    listener: StreamListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_STREAMS", 6)
    assert [len(listener.invite(4).tokens) for _ in range(5)] == [3, 2, 1, 0, 0]


@pytest.mark.parametrize("how", ["silent", "full", "lost", "hung up"])
def test_no_call_waits_forever(listener: StreamListener, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    invitation = listener.invite(1)
    is_lost = threading.Event()
    _, stream = reach(invitation, invitation.tokens[0], LONG_S, is_lost.is_set)
    with contextlib.closing(stream):
        if how == "full":
            monkeypatch.setattr(streams, "STALLED_S", 0.5)
        if how == "lost":
            is_lost.set()
        if how == "hung up":
            threading.Timer(0.1, stream.hang_up).start()
        with pytest.raises(StreamError):  # noqa: PT012
            if how == "full":  # the echo does not read while its own data is not received
                while True:
                    stream.send_header(bytes(1 << 20))
            stream.receive_header(0.5 if how == "silent" else 10 * LONG_S)  # only the first case exceeds this time


def test_a_fork_does_not_keep_a_stream_open(listener: StreamListener) -> None:
    ended = threading.Event()

    def wait_for_the_end(stream: Stream) -> None:
        with contextlib.suppress(StreamError):
            stream.receive_header(LONG_S)
        ended.set()

    other = StreamListener(wait_for_the_end, lambda: ANY)
    stream = enter(other.invite(1))
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writes)
        os.read(reads, 1)  # until the parent has seen it
        os._exit(0)
    try:
        stream.close()
        assert ended.wait(LONG_S)
    finally:
        os.close(writes)
        os.close(reads)
        os.waitpid(pid, 0)
        other.close()
