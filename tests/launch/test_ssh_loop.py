"""The loop of the SSH launcher ends all connections when it stops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading

from monarch_kernel.launch.ssh.loop_thread import LoopThread
from tests.support.waiting import LONG_S


def test_a_connection_with_bytes_for_a_peer_that_takes_none_ends_with_the_loop() -> None:
    is_written = threading.Event()

    async def write_much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(32 << 20))
        writer.close()
        is_written.set()

    async def serve() -> tuple[asyncio.Server, int]:
        server = await asyncio.start_server(write_much, "127.0.0.1", 0)
        return server, server.sockets[0].getsockname()[1]

    async def close(server: asyncio.Server) -> None:
        server.close()

    loop = LoopThread()
    server, port = loop.submit(serve()).result(LONG_S)
    with socket.create_connection(("127.0.0.1", port), LONG_S) as peer:
        assert is_written.wait(LONG_S)
        loop.submit(close(server)).result(LONG_S)
        loop.stop()
        with contextlib.suppress(ConnectionResetError):
            while peer.recv(1 << 20):
                pass


def test_a_connection_that_comes_while_the_loop_stops_ends_with_it() -> None:
    """A connection that the loop accepts after it has ended the others would stay open."""
    is_blocked, goes_on = threading.Event(), threading.Event()

    async def serve() -> tuple[asyncio.Server, int]:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        return server, server.sockets[0].getsockname()[1]

    async def block() -> None:
        is_blocked.set()
        goes_on.wait(LONG_S)

    loop = LoopThread()
    server, port = loop.submit(serve()).result(LONG_S)
    loop.submit(block())
    assert is_blocked.wait(LONG_S)
    with socket.create_connection(("127.0.0.1", port), LONG_S) as peer:  # the system accepts it, and later the loop
        stopping = threading.Thread(target=loop.stop)
        stopping.start()
        goes_on.set()
        stopping.join(LONG_S)
        assert not stopping.is_alive()
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""
    server.close()
    del server
    gc.collect()  # warns of a transport that is open
