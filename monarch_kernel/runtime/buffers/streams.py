"""Streams of bytes between processes of different machines: TCP under TLS, only for invited processes.

Theory of operation
===================

A process that needs a stream requests an invitation from the other process, over the connections between hosts, which are
encrypted and authenticated. The invitation has the addresses and the port at which the other process listens, the certificate
that it will present, and tokens. The certificate is self-signed. Only invited processes trust it, and only for these streams,
so its name and its dates have no meaning. A connecting process first verifies the certificate and then sends a token, which is
valid for one stream and for `INVITED_S`. TLS 1.3 does the rest. Neither the key nor a token is ever on a disk or in an
environment.

The port is open only while tokens are valid. At most `MAX_WAITING` connections wait to be authenticated; when there are more,
the oldest is closed, and none waits for longer than `HANDSHAKE_S`. An unauthenticated peer uses no memory except for the TLS
handshake.

Waiting on a stream fails after `STALLED_S` without a byte in either direction, or as soon as the other process is known to have
ended; TCP alone would wait for minutes. One thread at a time uses a stream. Other threads may only call `Stream.hang_up`, which
wakes that thread; the thread that uses the stream closes the descriptor.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from monarch_kernel.net.memory.layout import Layout, ProcessBlock, boxes, copy, memory_of, view_of

__all__ = ["IDLE_S", "INVITED_S", "Invitation", "Stream", "StreamError", "StreamListener", "reach"]

STALLED_S = 5.0
IDLE_S = 30.0
"""After this time without a request the listening process ends a stream; the requesting process closes it earlier."""

INVITED_S = 10.0
HANDSHAKE_S = 3.0
MAX_WAITING = 32
MAX_STREAMS = 128
"""How many streams one process accepts; each has a thread."""

MAX_HEADER_NBYTES = 1 << 20

PACKED_NBYTES = 1 << 20
"""Memory with gaps is packed in parts of this size."""

_TICK_S = 0.25
_PATIENCE_S = 0.1
"""How long to wait for a preferred address after another one has answered."""

_TOKEN_NBYTES = 32
_LENGTH = struct.Struct("<I")


class StreamError(Exception):
    """A stream broke, or could not be opened; the text says why."""


class Invitation(NamedTuple):
    """Permission to open streams to a process, one for each token; ``certificate`` is in DER."""

    addresses: tuple[str, ...]
    port: int
    certificate: bytes
    tokens: tuple[bytes, ...]


class Stream:
    """One end of a stream.

    Args:
        connection: the TLS connection; its handshake is done or about to be.
        token: the token that opened the stream.
        is_lost: whether the other end is known to have ended; called periodically while no data comes.
    """

    def __init__(self, connection: ssl.SSLSocket, token: bytes, is_lost: Callable[[], bool] = lambda: False) -> None:
        self.token = token
        self._connection = connection
        self._is_lost = is_lost
        self.used_at = time.monotonic()
        connection.settimeout(_TICK_S)
        _open.add(self)

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of these bytes.

        Raises:
            StreamError: the stream broke, or the other end accepted no data for too long.
        """
        rest = memoryview(data)
        until = time.monotonic() + STALLED_S
        with _as_stream_error():
            while rest:
                try:
                    rest = rest[self._connection.send(rest) :]
                except TimeoutError:
                    self._wait_on(until)
                else:
                    until = time.monotonic() + STALLED_S

    def receive_into(self, into: memoryview, patience_s: float = STALLED_S) -> None:
        """Fill memory with received bytes; errors as those of `send`.

        Args:
            into: the memory, as bytes.
            patience_s: how long to wait for the first byte.
        """
        until = time.monotonic() + patience_s
        with _as_stream_error():
            while into:
                try:
                    count = self._connection.recv_into(into)
                except TimeoutError:
                    self._wait_on(until)
                    continue
                if not count:
                    raise StreamError("the other end closed the stream")
                into = into[count:]
                until = time.monotonic() + STALLED_S

    def send_block(self, place: ProcessBlock) -> None:
        """Send the elements of a block of memory without its gaps; errors as those of `send`."""
        for address, layout in _cut(place):
            if layout.is_contiguous:
                self.send(view_of(address, layout.nbytes))
            else:
                packed = bytearray(layout.nbytes)
                copy(_packed(packed, layout), ProcessBlock(address, layout))
                self.send(packed)

    def receive_block(self, place: ProcessBlock) -> None:
        """Fill a block of memory with received elements, which come without gaps; errors as those of `send`."""
        for address, layout in _cut(place):
            if layout.is_contiguous:
                self.receive_into(view_of(address, layout.nbytes))
            else:
                packed = bytearray(layout.nbytes)
                self.receive_into(memoryview(packed))
                copy(ProcessBlock(address, layout), _packed(packed, layout))

    def send_header(self, header: bytes) -> None:
        """Send a few bytes, which `receive_header` returns in one piece."""
        self.send(_LENGTH.pack(len(header)) + header)

    def receive_header(self, patience_s: float = STALLED_S) -> bytes:
        """Receive the bytes of one `send_header`; arguments and errors as those of `receive_into`."""
        raw = bytearray(_LENGTH.size)
        self.receive_into(memoryview(raw), patience_s)
        (nbytes,) = _LENGTH.unpack(raw)
        if nbytes > MAX_HEADER_NBYTES:
            raise StreamError(f"the other end announced a header of {nbytes} bytes, which is too large")
        header = bytearray(nbytes)
        self.receive_into(memoryview(header))
        return bytes(header)

    def skip(self, nbytes: int) -> None:
        """Receive and discard bytes; errors as those of `send`."""
        waste = bytearray(min(max(nbytes, 0), PACKED_NBYTES))
        while nbytes > 0:
            self.receive_into(memoryview(waste)[:nbytes])
            nbytes -= len(waste)

    def is_fresh(self) -> bool:
        """Whether an idle stream is still usable as far as this end knows; the other end may have closed it."""
        if self._connection.fileno() < 0:
            return False
        with selectors.DefaultSelector() as selector:  # nothing must come before the next request
            selector.register(self._connection, selectors.EVENT_READ)
            return not selector.select(0)

    def hang_up(self) -> None:
        """End the stream, from any thread; the thread that uses it gets a `StreamError`."""
        with contextlib.suppress(OSError):
            # The method of ``SSLSocket`` would make the other thread continue without TLS.
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)

    def close(self) -> None:
        """End the stream, from the thread that uses it."""
        _open.discard(self)
        self._connection.close()

    def _wait_on(self, until: float) -> None:
        """Raise an error if there is no use in waiting any longer."""
        if self._is_lost():
            raise StreamError("the other process has ended")
        if time.monotonic() > until:
            raise StreamError("no data was transferred for too long")


def _cut(place: ProcessBlock) -> list[ProcessBlock]:
    """Cut a block with gaps into parts that are packed one by one; a block without gaps stays whole."""
    address, layout = place
    if not layout.nbytes:
        return []
    if layout.is_contiguous:
        return [place]
    return [ProcessBlock(address + offset, box) for offset, box in boxes(layout, PACKED_NBYTES)]


def _packed(block: bytearray, layout: Layout) -> ProcessBlock:
    return ProcessBlock(memory_of(block).address, layout.packed())


@contextlib.contextmanager
def _as_stream_error() -> Iterator[None]:
    """Turn errors of the network and of TLS into a `StreamError`."""
    try:
        yield
    except OSError as error:
        raise StreamError(_why(error)) from None


def reach(invitation: Invitation, token: bytes, timeout_s: float, is_lost: Callable[[], bool]) -> tuple[str, Stream]:
    """Open a stream by the best address that answers; return that address and the stream.

    Args:
        invitation: the invitation by the other process.
        token: one of its tokens.
        timeout_s: the limit in seconds.
        is_lost: as for `Stream`.

    Raises:
        StreamError: the process can't be reached; the text lists the attempts.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is pinned
    context.load_verify_locations(cadata=invitation.certificate)
    until = time.monotonic() + timeout_s
    tried: list[str] = []
    for address, connection in _connect_all(invitation.addresses, invitation.port, until, tried):
        try:
            connection.settimeout(max(0.01, until - time.monotonic()))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            encrypted = context.wrap_socket(connection)
        except OSError as error:
            tried.append(f"{address}: {_why(error)}")
            connection.close()
            continue
        stream = Stream(encrypted, token, is_lost)
        try:
            stream.send(token)
        except StreamError:
            stream.close()
            raise
        return address, stream
    where = ", ".join(invitation.addresses) or "no address"
    raise StreamError(f"it can't be reached at port {invitation.port} of {where} ({'; '.join(tried) or 'no answer'})")


def _connect_all(
    addresses: Sequence[str], port: int, until: float, tried: list[str]
) -> Iterator[tuple[str, socket.socket]]:
    """Connect to all addresses at once; yield the connections, in the order of preference among those that have answered."""
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for address in dict.fromkeys(addresses):
            connecting = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
            connecting.setblocking(False)
            connecting.connect_ex((address, port))
            selector.register(connecting, selectors.EVENT_WRITE, address)
        answered: dict[str, socket.socket] = {}
        while selector.get_map() or answered:
            waiting = [key.data for key in selector.get_map().values()]
            best = next((address for address in addresses if address in answered or address in waiting), "")
            left = until - time.monotonic()
            if best not in answered and left > 0:
                ready = selector.select(min(left, _PATIENCE_S) if answered else left)
                for key, _ in ready:
                    connection = selector.unregister(key.fileobj).fileobj
                    assert isinstance(connection, socket.socket)
                    if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        tried.append(f"{key.data}: {os.strerror(code)}")
                    else:
                        answered[key.data] = connection
                if ready:
                    continue
            if not answered:
                return
            best = next(address for address in addresses if address in answered)
            yield best, answered.pop(best)  # `wrap_socket` takes over its descriptor


class StreamListener:
    """Accepts streams from processes that this process has invited.

    Args:
        serve: handles the requests of a stream until it ends; each stream has its own thread.
        addresses: returns the addresses at which other machines may reach this one, the best first.
    """

    def __init__(self, serve: Callable[[Stream], None], addresses: Callable[[], Sequence[str]]) -> None:
        self._serve = serve
        self._addresses = addresses
        self._lock = threading.RLock()
        self._ended = threading.Condition(self._lock)
        self._identity: tuple[ssl.SSLContext, bytes] | None = None
        self._listen_socket: socket.socket | None = None
        self._tokens: dict[bytes, float] = {}  # -> when it expires
        self._waiting: dict[ssl.SSLSocket, None] = {}  # connections without a token yet, the oldest first
        self._streams: dict[bytes, Stream] = {}  # by token
        self._is_closed = False

    def invite(self, count: int) -> Invitation:
        """Listen for ``count`` streams; for fewer, or none, if there are too many already.

        Raises:
            OSError: no port or no descriptor is left.
        """
        with self._lock:
            if self._identity is None:
                self._identity = _identity()
            room = MAX_STREAMS - len(self._streams) - len(self._tokens)
            until = time.monotonic() + INVITED_S
            tokens = tuple(secrets.token_bytes(_TOKEN_NBYTES) for _ in range(min(count, (room + 1) // 2)))
            if not tokens or self._is_closed:
                return Invitation((), 0, b"", ())
            if self._listen_socket is None:
                self._listen_socket = socket.create_server(("", 0), backlog=MAX_STREAMS)
                _listen_sockets.add(self._listen_socket)
                threading.Thread(
                    target=self._listen, args=(self._listen_socket,), name="monarch-listen", daemon=True
                ).start()
            self._tokens.update(dict.fromkeys(tokens, until))
            return Invitation(tuple(self._addresses()), self._listen_socket.getsockname()[1], self._identity[1], tokens)

    def end(self, token: bytes) -> None:
        """End the stream that was opened with a token, if there is one; return when no thread serves it any more."""
        with self._lock:
            self._tokens.pop(token, None)
            stream = self._streams.get(token)
            if stream is not None:
                stream.hang_up()
                self._ended.wait_for(lambda: token not in self._streams)

    def close(self) -> None:
        """End all streams and stop listening."""
        with self._lock:
            self._is_closed = True
            self._tokens.clear()
            for connection in self._waiting:
                _hang_up(connection)
            for stream in self._streams.values():
                stream.hang_up()
            if self._listen_socket is not None:
                _hang_up(self._listen_socket)

    def _listen(self, listen_socket: socket.socket) -> None:
        listen_socket.settimeout(_TICK_S)
        while self._keep_listening(listen_socket):
            try:
                connection, _ = listen_socket.accept()
            except TimeoutError:
                continue
            except OSError:  # the listening socket was closed, or no descriptor is left
                time.sleep(_TICK_S)
                continue
            self._admit(connection)

    def _keep_listening(self, listen_socket: socket.socket) -> bool:
        """Whether a valid token is unused; if none is, stop listening."""
        with self._lock:
            now = time.monotonic()
            for token in [token for token, until in self._tokens.items() if until < now]:
                del self._tokens[token]
            if self._tokens:
                return True
            self._listen_socket = None
            listen_socket.close()
            return False

    def _admit(self, connection: socket.socket) -> None:
        assert self._identity is not None
        try:
            connection.settimeout(HANDSHAKE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            encrypted = self._identity[0].wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        except OSError:  # the peer has disconnected
            connection.close()
            return
        with self._lock:
            self._waiting[encrypted] = None
            if len(self._waiting) > MAX_WAITING:
                first = next(iter(self._waiting))
                del self._waiting[first]  # not in its thread, so that the next connection evicts another one
                _hang_up(first)
        threading.Thread(target=self._authenticate, args=(encrypted,), name="monarch-stream", daemon=True).start()

    def _authenticate(self, connection: ssl.SSLSocket) -> None:
        stream: Stream | None = None
        try:
            token = _token_of(connection)
        except OSError:
            token = b""
        with self._lock:
            self._waiting.pop(connection, None)
            if self._tokens.pop(token, None) is not None:
                stream = self._streams[token] = Stream(connection, token)
        if stream is None:
            connection.close()
            return
        try:
            self._serve(stream)
        except StreamError:  # the other end has ended, or will request the pieces again
            pass
        finally:
            with self._lock:
                del self._streams[token]
                self._ended.notify_all()
            stream.close()


def _token_of(connection: ssl.SSLSocket) -> bytes:
    """Do the TLS handshake and read the token, in bounded time."""
    until = time.monotonic() + HANDSHAKE_S
    connection.do_handshake()
    token = b""
    while len(token) < _TOKEN_NBYTES:
        connection.settimeout(max(0.01, until - time.monotonic()))
        more = connection.recv(_TOKEN_NBYTES - len(token))
        if not more:
            return b""
        token += more
    return token


def _identity() -> tuple[ssl.SSLContext, bytes]:
    """Create a key and a self-signed certificate; return the context that uses them, and the certificate in DER."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "monarch")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1))  # the clocks of machines differ
        .not_valid_after(datetime(2200, 1, 1))
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    # Python's ssl reads keys only from files; this file is in memory.
    with open(os.memfd_create("monarch-identity", os.MFD_CLOEXEC), "wb") as file:
        file.write(certificate.public_bytes(serialization.Encoding.PEM) + secret)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context, certificate.public_bytes(serialization.Encoding.DER)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _why(error: OSError) -> str:
    return error.strerror or str(error)


_open: weakref.WeakSet[Stream] = weakref.WeakSet()
_listen_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forget_all() -> None:
    """Close the copies in a forked child: the connections belong to the parent, and must end with it."""
    for stream in list(_open):
        stream.close()
    for listen_socket in list(_listen_sockets):
        listen_socket.close()


os.register_at_fork(after_in_child=_forget_all)
