"""Ports of processes are reached through other processes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from monarch_kernel.actor import ActorError, ProcMesh, this_proc
from monarch_kernel.integrations.monarch.forwarding import check_port, parse_address
from monarch_kernel.integrations.monarch.job import PortForwarder
from tests.support.ports import free_ports
from tests.support.waiting import LONG_S

HOST = "127.0.0.1"


@asynccontextmanager
async def serving(handle: Any) -> AsyncIterator[int]:
    """Serve, and give the port."""
    server = await asyncio.start_server(handle, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@asynccontextmanager
async def forwarding(*arguments: Any) -> AsyncIterator[Any]:
    forwarder: Any = this_proc().spawn("forwarder", PortForwarder)
    try:
        await forwarder.forward.call_one(*arguments)
        yield forwarder
    finally:
        await forwarder.stop()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def ask(port: int, data: bytes) -> bytes:
    """Send data and its end, and return the answer until its end."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    writer.write_eof()
    answer = await reader.read(-1)
    writer.close()
    return answer


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, LONG_S))


def test_connections_reach_the_service_at_the_same_point(procs: ProcMesh) -> None:
    async def test() -> None:
        async def name(rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.read(-1) + b"-%d" % rank)
            writer.close()

        near = free_ports(2, HOST)
        async with (
            serving(lambda *streams: name(0, *streams)) as first,
            serving(lambda *streams: name(1, *streams)) as second,
            forwarding(
                procs, lambda point: [first, second][point["r"]], procs, lambda point: f"{HOST}:{near[point['r']]}"
            ),
        ):
            answers = await asyncio.gather(*(ask(near[rank], b"x") for rank in (0, 1, 1, 0)))
            assert answers == [b"x-0", b"x-1", b"x-1", b"x-0"]

    run(test())


def test_data_of_any_size_arrives_until_the_forwarder_is_stopped(procs: ProcMesh) -> None:
    async def test() -> None:
        (near,) = free_ports(1, HOST)
        data = bytes(range(256)) * 8192
        async with serving(echo) as port:
            async with forwarding(procs.slice(r=0), port, procs.slice(r=1), f"{HOST}:{near}"):
                assert await asyncio.gather(ask(near, data), ask(near, b"")) == [data, b""]
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(HOST, near)

    run(test())


def test_a_connection_that_breaks_on_one_side_breaks_on_the_other(procs: ProcMesh) -> None:
    async def test() -> None:
        broken = asyncio.Event()

        async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    writer.write(b"x" * 65536)
                    await writer.drain()
            except OSError:
                broken.set()

        async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.transport.abort()

        near, other = free_ports(2, HOST)
        async with (
            serving(pour) as pouring,
            serving(reset) as resetting,
            forwarding(procs.slice(r=0), pouring, procs.slice(r=1), f"{HOST}:{near}") as forwarder,
        ):
            reader, writer = await asyncio.open_connection(HOST, near)
            await reader.read(1)
            writer.transport.abort()
            await broken.wait()

            await forwarder.forward.call_one(procs.slice(r=0), resetting, procs.slice(r=1), f"{HOST}:{other}")
            reader, writer = await asyncio.open_connection(HOST, other)
            writer.write(b"x")
            with contextlib.suppress(ConnectionResetError):  # or its end
                assert await reader.read(-1) == b""
            writer.close()

    run(test())


def test_what_cannot_be_forwarded_raises_and_leaves_nothing_open(procs: ProcMesh) -> None:
    async def test() -> None:
        near = free_ports(2, HOST)
        with socket.create_server((HOST, near[1])):
            for arguments, says in [
                ((procs, 80, procs.slice(r=0), f"{HOST}:1"), "same shape"),
                ((procs, 0, procs, f"{HOST}:1"), "from 1 to 65535"),
                ((procs, 80, procs, "nowhere"), "src_address"),
                ((procs, 80, procs, lambda point: f"{HOST}:{near[point['r']]}"), "address already in use|in use"),
                ((procs, lambda point: point["r"], procs, lambda point: f"{HOST}:{near[point['r']]}"), "dst_port"),
            ]:
                with pytest.raises(ActorError, match=says):
                    async with forwarding(*arguments):
                        pass
        for port in near:
            with socket.create_server((HOST, port)):
                pass

    run(test())


def test_addresses_and_ports_are_checked() -> None:
    assert parse_address("127.0.0.1:80") == ("127.0.0.1", 80)
    assert parse_address("[::1]:80") == ("::1", 80)
    assert check_port("port", 65535) == 65535
    for address in ("", "80", ":80", "host:", "host:http", "host:0", "host:65536", 80):
        with pytest.raises(ValueError, match=r"src_address|from 1 to 65535"):
            parse_address(address)
    for port in (0, 65536, True, "80", 1.0):
        with pytest.raises(ValueError, match="from 1 to 65535"):
            check_port("port", port)
