"""Unauthorized clients that flood a port, from a separate process, so that they use no descriptors of the test's process.

As a program it takes the task from its arguments, starts when it reads a line from standard input, prints "ready" when it
has started, and stops at the end of standard input.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq

__all__ = ["GREETING", "Besieger", "besieged", "say"]

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""Greeting of ZMTP 3; a client with the right keys sends HELLO after it."""

_GIGABYTE = b"\x06" + (1 << 30).to_bytes(8, "big")  # header of a command of that size
_PLAIN = GREETING.replace(b"CURVE", b"PLAIN")
_NULL = GREETING.replace(b"CURVE", b"NULL\0")
_SAYS: dict[str, Sequence[bytes]] = {
    "nothing": [b""],
    "garbage": [
        bytes(range(256)) * 16,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(10_000),
        b"\x16\x03\x01\x02\x00" * 50,
    ],
    "long handshakes": [GREETING + b"\x06" + (500_000).to_bytes(8, "big") + bytes(400)],
    "large handshakes": [GREETING + b"\x06" + (500_000).to_bytes(8, "big") + bytes(499_000)],
    "half greetings": [GREETING[:n] for n in (1, 9, 10, 11, 12, 32, 63)],
    "other mechanisms": [
        _NULL + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER",
        _PLAIN + b"\x04\x10\x05HELLO\x04user\x04word",
        _NULL,
        _PLAIN,
    ],
    "forged handshakes": [
        GREETING + b"\x04\xc8\x05HELLO" + bytes(194),
        GREETING + b"\x06\x00\x00\x00\x00\x00\x00\x00\x00",
        GREETING + b"\x04\xff\x08INITIATE" + bytes(246),
        GREETING + b"\x00\xff" + bytes(255),
    ],
}


class Besieger:
    """A process that attacks ports, from `begin` until `close`."""

    def __init__(self, what: str, ports: Sequence[int], count: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), what, str(count), *map(str, ports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def begin(self) -> None:
        """Start the attack; returns when it runs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"begin\n")
        assert self._process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        """End the process and all its connections."""
        with suppress(BrokenPipeError):
            self._process.communicate(timeout=30)
        assert self._process.returncode == 0


@contextmanager
def besieged(what: str, ports: Sequence[int], count: int = 1, *, waits: bool = False) -> Iterator[Besieger]:
    """Attack each port with this many connections; with ``waits``, the block starts the attack by `Besieger.begin`."""
    besieger = Besieger(what, ports, count)
    try:
        if not waits:
            besieger.begin()
        yield besieger
    finally:
        besieger.close()


def say(end: zmq.Socket[bytes], *messages: Sequence[bytes | memoryview]) -> None:
    """Send messages with a client that may be refused.

    When a server refuses its handshake, a client of ZeroMQ gives up: a send then waits forever, so this one does not wait.
    """
    import zmq

    with suppress(zmq.Again):
        for parts in messages:
            end.send_multipart(list(parts), zmq.NOBLOCK)


# -- in the separate process


def _connect(port: int) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(20)
    connection.connect(("127.0.0.1", port))
    return connection


def _is_over() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _hold(what: str, ports: Sequence[int], count: int) -> None:
    """Connect, send a message, and keep the connections open."""
    with ExitStack() as stack:
        for i in range(count):
            for port in ports:
                connection = stack.enter_context(_connect(port))
                with suppress(OSError):  # the server has closed it
                    connection.sendall(_SAYS[what][i % len(_SAYS[what])])
        print("ready", flush=True)
        sys.stdin.read()


def _drip(ports: Sequence[int], count: int) -> None:
    """Send a greeting and a handshake one byte at a time; reconnect when the server closes the connection."""
    text = GREETING + b"\x04\xc8\x05HELLO" + bytes(194)
    print("ready", flush=True)
    ends: list[tuple[socket.socket, int]] = []
    while not _is_over():
        while len(ends) < count * len(ports):
            ends.append((_connect(ports[len(ends) % len(ports)]), 0))
        for end, said in [*ends]:
            ends.remove((end, said))
            try:
                end.send(text[said : said + 1])
            except OSError:
                end.close()
            else:
                ends.append((end, min(said + 1, len(text) - 1)))
        time.sleep(0.05)
    for end, _ in ends:
        end.close()


def _flood(ports: Sequence[int], count: int) -> None:
    """Announce a frame of a gigabyte and send it, on several connections; reconnect when the server closes one."""
    print("ready", flush=True)
    chunk = bytes(1 << 18)
    ends: list[socket.socket] = []
    while not _is_over():
        while len(ends) < count * len(ports):
            ends.append(_connect(ports[len(ends) % len(ports)]))
            ends[-1].sendall(GREETING + _GIGABYTE)
            ends[-1].setblocking(False)
        for end in select.select([], ends, [], 0.05)[1]:
            try:
                end.send(chunk)
            except BlockingIOError:
                pass
            except OSError:
                ends.remove(end)
                end.close()
        time.sleep(0.001)
    for end in ends:
        end.close()


def _storm(ports: Sequence[int], count: int) -> None:
    """Connect and disconnect at once, this many times."""
    for _ in range(count):
        for port in ports:
            _connect(port).close()
    print("ready", flush=True)


def _main() -> None:
    what, count, *ports = sys.argv[1:]
    if not sys.stdin.readline():
        return
    if what in _SAYS:
        _hold(what, [int(port) for port in ports], int(count))
    else:
        {"drip": _drip, "flood": _flood, "storm": _storm}[what]([int(port) for port in ports], int(count))


if __name__ == "__main__":
    _main()
