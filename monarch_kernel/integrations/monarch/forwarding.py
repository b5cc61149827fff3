"""Ports of processes, made available at other processes.

A connection at the source is a pair of tasks there. One passes on what the local program sends, the other asks the destination
for what its service answers. Each part waits for the one before, so a slow reader slows the writer down.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any, cast

from monarch_kernel.actor import Actor, Point, ProcMesh, concurrent_endpoint, context, endpoint

__all__ = ["PortForwarder", "check_port", "parse_address"]

_HOST = "127.0.0.1"
_PART_NBYTES = 256 << 10
_LAST_PORT = 65535

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class PortForwarder(Actor):
    """Forwards ports as long as it lives. Spawn it on ``this_proc()``, and stop it to end what it forwards."""

    @endpoint
    async def forward(
        self,
        dst_proc_mesh: ProcMesh,
        dst_port: int | Callable[[Point], int],
        src_proc_mesh: ProcMesh,
        src_address: str | Callable[[Point], str],
    ) -> None:
        """Let each process of a mesh listen, and pass connections on to the process at the same point of another mesh.

        Args:
            dst_proc_mesh: the processes that have the services.
            dst_port: the port of the service at the loopback interface, or a function of the point.
            src_proc_mesh: the processes that listen.
            src_address: ``address:port`` where they listen, or a function of the point.

        Raises:
            ValueError: the meshes differ in shape, or a port or an address is not valid.
            OSError: a process can't listen at its address.
        """
        if dst_proc_mesh.extent != src_proc_mesh.extent:
            raise ValueError(
                f"the two meshes must have the same shape, but they have {dst_proc_mesh.extent!s} and {src_proc_mesh.extent!s}"
            )
        if not callable(dst_port):
            check_port("dst_port", dst_port)
        if not callable(src_address):
            parse_address(src_address)
        far = dst_proc_mesh.spawn("port_forwarder_far", _Far, dst_port)
        near = src_proc_mesh.spawn("port_forwarder_near", _Near, far, src_address)
        try:
            await far.check.call()
            await near.listen.call()
        except BaseException:
            await asyncio.gather(near.stop(), far.stop(), return_exceptions=True)
            raise


class _Far(Actor):
    """Connects to the service of its process."""

    def __init__(self, port: int | Callable[[Point], int]) -> None:
        self._port = port
        self._streams: dict[int, Streams] = {}
        self._ids = itertools.count()

    @endpoint
    async def check(self) -> None:
        """Check the port."""
        point = context().actor_instance.rank
        self._port = check_port("dst_port", self._port(point) if callable(self._port) else self._port)

    @concurrent_endpoint
    async def open(self) -> int:
        """Connect, and return the number of the connection."""
        streams = await asyncio.open_connection(_HOST, cast("int", self._port))
        number = next(self._ids)
        self._streams[number] = streams
        return number

    @concurrent_endpoint
    async def write(self, number: int, data: bytes) -> None:
        """Pass data on to the service; no data means that no more will come."""
        writer = self._streams[number][1]
        if data:
            writer.write(data)
            await writer.drain()
        elif writer.can_write_eof():
            writer.write_eof()

    @concurrent_endpoint
    async def read(self, number: int) -> bytes:
        """Return data of the service; no data means that no more will come."""
        return await self._streams[number][0].read(_PART_NBYTES)

    @concurrent_endpoint
    async def close(self, number: int, is_complete: bool) -> None:
        """End a connection, with a reset unless it is complete."""
        streams = self._streams.pop(number, None)
        if streams is not None:
            _end(streams[1], is_complete)

    async def __cleanup__(self, error: BaseException | None) -> None:
        for _, writer in self._streams.values():
            _end(writer, False)
        self._streams.clear()


class _Near(Actor):
    """Listens."""

    def __init__(self, far: Any, address: str | Callable[[Point], str]) -> None:
        self._far = far
        self._address = address
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @endpoint
    async def listen(self) -> None:
        """Listen at the address of this process."""
        point = context().actor_instance.rank
        host, port = parse_address(self._address(point) if callable(self._address) else self._address)
        self._far = self._far.slice(**dict(point))
        # Processes of one machine may share an address; the system gives each of them some of the connections.
        self._server = await asyncio.start_server(self._accept, host, port, reuse_port=len(point.extent) > 0)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._relay(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = None
        is_complete = False
        try:
            number = await self._far.open.call_one()
            await _all_or_none(self._upward(number, reader), self._downward(number, writer))
            is_complete = True
        except Exception as error:  # the connection has broken on one side, and is reset on the other
            self.logger.debug("a forwarded connection ended: %s", error)
        finally:
            _end(writer, is_complete)
            if number is not None:
                with contextlib.suppress(Exception):  # the far side has ended
                    self._far.close.broadcast(number, is_complete)

    async def _upward(self, number: int, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_PART_NBYTES):
            await self._far.write.call_one(number, data)
        await self._far.write.call_one(number, b"")

    async def _downward(self, number: int, writer: asyncio.StreamWriter) -> None:
        while data := await self._far.read.call_one(number):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    async def __cleanup__(self, error: BaseException | None) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _all_or_none(*parts: Any) -> None:
    """Wait until all parts have ended; the first error ends the others."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _end(writer: asyncio.StreamWriter, is_complete: bool) -> None:
    if is_complete:
        writer.close()
    else:
        writer.transport.abort()


def check_port(name: str, port: Any) -> int:
    """Check a port.

    Raises:
        ValueError: it is not a number of a port.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= _LAST_PORT:
        raise ValueError(f"{name} must be an integer from 1 to {_LAST_PORT}, not {port!r}")
    return port


def parse_address(address: Any) -> tuple[str, int]:
    """Return the host and the port of an address such as ``127.0.0.1:8000`` or ``[::1]:8000``.

    Raises:
        ValueError: it is not such an address.
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isdecimal():
        raise ValueError(f"src_address must be a text such as '127.0.0.1:8000', not {address!r}")
    return host.removeprefix("[").removesuffix("]"), check_port("the port of src_address", int(port))
