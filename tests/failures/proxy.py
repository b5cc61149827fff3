"""A TCP proxy between an agent and its controller, in the test's process, which simulates network failures."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

__all__ = ["Proxy"]

_CHUNK_NBYTES = 1 << 16
_RECORDED_NBYTES = 4 << 20
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER without waiting: close() sends RST


class Proxy:
    """Forwards bytes in both directions, until a test makes it fail.

    Args:
        host: host to forward connections to.
        port: port to forward connections to.

    Attributes:
        port: port at 127.0.0.1 where it listens.
        connections: number of forwarded connections.
        recorded: for each connection, the first bytes that the client sent, and the first bytes of the answers.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self.recorded: list[tuple[bytearray, bytearray]] = []
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._passes = threading.Event()
        self._passes.set()
        self._is_open = True
        self._delay_s = 0.0
        self._halves = False
        self._hurry = threading.Event()
        self._start(self._accept)

    # -- network failures

    def cut(self) -> None:
        """Stop forwarding, without closing any connection, as when a cable is pulled."""
        self._passes.clear()

    def restore(self) -> None:
        """Forward the bytes that came since `cut`, and all later ones."""
        self._passes.set()

    def reset(self) -> None:
        """Break all connections, which loses the bytes in flight; new connections can be made at once."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                _close(end)

    def lose_half(self) -> None:
        """Forward half of the next bytes, then break the connection."""
        self._halves = True

    def delay(self, seconds: float) -> None:
        """Delay all bytes by this time."""
        self._delay_s = seconds

    def inject(self, data: bytes, *, up: bool = True) -> None:
        """Insert bytes into the newest connection, as if the client (``up``) or the server had sent them."""
        with self._lock:
            near, far = self._pairs[-1]
        (far if up else near).sendall(data)

    def close(self) -> None:
        """Stop, and close all connections."""
        self._is_open = False
        self._hurry.set()
        self._passes.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join(10)

    # -- implementation

    def _start(self, run: object, *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while self._is_open:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._passes.wait()
            try:
                far = socket.create_connection(self._target, 5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((near, far))
            self.connections += 1
            asked, answered = bytearray(), bytearray()
            self.recorded.append((asked, answered))
            self._start(self._pump, near, far, asked)
            self._start(self._pump, far, near, answered)
            if not self._is_open:
                self.reset()

    def _pump(self, source: socket.socket, sink: socket.socket, record: bytearray) -> None:
        try:
            while data := source.recv(_CHUNK_NBYTES):
                record += data[: _RECORDED_NBYTES - len(record)]
                if self._delay_s:
                    self._hurry.wait(self._delay_s)
                self._passes.wait()
                if self._halves:
                    self._halves = False
                    sink.sendall(data[: len(data) // 2])
                    break
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            _close(end)


def _close(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
