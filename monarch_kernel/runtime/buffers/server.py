"""Serves the memory that this process lends to other processes that can't access it directly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from monarch_kernel.net.memory import devices
from monarch_kernel.net.memory.counters import Piece
from monarch_kernel.net.memory.exports import ExportTable
from monarch_kernel.net.memory.layout import Layout, Memory, ProcessBlock, copy, memory_of
from monarch_kernel.net.memory.leases import Lease
from monarch_kernel.net.memory.threads import IdleThreads
from monarch_kernel.net.wire.codec import Frame, Packed, WireError, dump, join, pack, split
from monarch_kernel.net.wire.messages import (
    CloseBuffer,
    EndExport,
    EndExports,
    EndStream,
    Failed,
    Message,
    OpenBuffer,
    OpenStreams,
    Payload,
    ReadBuffer,
    Result,
    WriteBuffer,
)
from monarch_kernel.runtime.buffers import nixl
from monarch_kernel.runtime.buffers.idle_cache import IdleCache
from monarch_kernel.runtime.buffers.streams import IDLE_S, Stream, StreamError, StreamListener
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.host.network import address_of, own_addresses
from monarch_kernel.runtime.rpc.ids import origin_of

__all__ = ["OF_BUFFERS", "BufferServer"]

KEPT_S = 10.0
"""How long memory stays registered for RDMA after the last process has closed it."""
CLOSE_S = 5.0
"""How long `BufferServer.close` waits for work in progress, such as the registration of memory."""

OF_BUFFERS = (CloseBuffer, EndExport, EndExports, EndStream, OpenBuffer, OpenStreams, ReadBuffer, WriteBuffer)
"""The messages that concern leases."""


class BufferServer:
    """Answers the messages about leases immediately, even while the process is busy.

    Args:
        exports: the memory that this process lends.
        answer: sends an answer to a request, while the caller holds the I/O lock.
        answer_later: sends an answer from any thread.
    """

    def __init__(
        self, exports: ExportTable, answer: Callable[[int, Packed], None], answer_later: Callable[[int, Packed], None]
    ) -> None:
        self._exports = exports
        self._answer = answer
        self._answer_later = answer_later
        self._listener = StreamListener(self._serve, _addresses)
        self._threads = IdleThreads("monarch-lender", 1)  # for requests that take some time
        self._registrations: IdleCache[Lease, nixl.Registration] = IdleCache(
            "monarch-registered", KEPT_S, exports.is_lent
        )
        self._has_opened = False
        self._opened: dict[int, tuple[Lease, nixl.Registration]] = {}

    def handle(self, message: Message, frames: Sequence[Frame]) -> None:
        """Handle one of `OF_BUFFERS`."""
        if isinstance(message, OpenStreams):
            self._answer_soon(message.id, lambda: self._invite(message))
        elif isinstance(message, OpenBuffer):
            self._has_opened = True
            self._answer_soon(message.id, lambda: self._open(message))
        elif isinstance(message, CloseBuffer):
            self._threads.submit(lambda: self._close(message.opened))
        elif isinstance(message, EndStream):
            self._answer_soon(message.id, lambda: self._end(message))
        else:
            assert isinstance(message, (ReadBuffer, WriteBuffer, EndExport, EndExports))
            self._answer(message.id, _answer_of(message.id, self._do, message, frames))

    def _answer_soon(self, id: int, do: Callable[[], Packed]) -> None:
        try:
            self._threads.submit(lambda: self._answer_later(id, _answer_of(id, do)))
        except RuntimeError as error:  # no thread can be started
            self._answer(id, pack(Failed(id, describe(error))))

    def gone(self, proc: int) -> None:
        """Close everything that was opened for a process that has ended."""
        if self._has_opened:
            self._threads.submit(lambda: self._close_all_of(proc))  # after its earlier requests

    def close(self) -> None:
        """End all streams, and close everything that was opened."""
        self._listener.close()
        self._threads.close(CLOSE_S)
        self._opened.clear()
        self._registrations.close()

    def _do(self, message: ReadBuffer | WriteBuffer | EndExport | EndExports, frames: Sequence[Frame]) -> Packed:
        if isinstance(message, EndExports):
            payload, parts = dump([tuple(lease) for lease in self._exports.end_all_of(message.owner)])
            return pack(Result(message.id, payload), parts)
        if isinstance(message, EndExport):
            was_lent = self._exports.owns(message.table) and self._exports.end(Lease(message.entry, message.turn))
            payload, parts = dump(was_lent)
            return pack(Result(message.id, payload), parts)
        ours = self._block(message)
        if isinstance(message, ReadBuffer):
            block = Piece(ours.layout.nbytes)
            copy(_packed(block, ours.layout), ours.place)
            return pack(Result(message.id, Payload(b"", 1)), (memoryview(block),))
        if len(frames) != 1 or len(frames[0]) != ours.layout.nbytes:
            raise ValueError(f"the block has {ours.layout.nbytes} bytes, but the message has a different number")
        with _writable(ours) as to:
            copy(to.place, _packed(frames[0], ours.layout))
        return pack(Result(message.id, Payload()))

    def _block(self, message: ReadBuffer | WriteBuffer) -> Memory:
        lease, layout = Lease(message.entry, message.turn), _layout_of(message)
        memory = self._exports.block(message.table, lease, message.offset, layout)
        if isinstance(message, ReadBuffer):
            return devices.fetch(memory) if memory.device else memory
        if memory.is_readonly:
            raise TypeError("the memory can only be read")
        return memory

    # -- memory that others access without this process

    def _open(self, message: OpenBuffer) -> Packed:
        lease = Lease(message.entry, message.turn)
        memory = self._exports.whole(message.table, lease)
        if message.way == "cuda":
            how = devices.export(memory)
        elif message.way == "rdma":
            registered = self._registrations.take(lease, lambda: nixl.Registration(nixl.agent(), memory))
            self._opened[message.id] = lease, registered
            how = tuple(registered.described)
        else:
            raise ValueError(f"memory can't be opened by {message.way!r}")
        payload, parts = dump(how)
        return pack(Result(message.id, payload), parts)

    def _close(self, opened: int) -> None:
        if opened in self._opened:
            self._registrations.give(*self._opened.pop(opened))

    def _close_all_of(self, proc: int) -> None:
        for id in [id for id in self._opened if origin_of(id) == proc]:
            self._close(id)

    # -- streams

    def _invite(self, message: OpenStreams) -> Packed:
        payload, parts = dump(tuple(self._listener.invite(message.count)))
        return pack(Result(message.id, payload), parts)

    def _end(self, message: EndStream) -> Packed:
        self._listener.end(message.token)
        return pack(Result(message.id, Payload()))

    def _serve(self, stream: Stream) -> None:
        """Answer the requests of a stream until it ends, or no request has come for a while."""
        while True:
            try:
                ((message, _),) = split([stream.receive_header(IDLE_S)])
            except (WireError, ValueError):
                raise StreamError("the stream received data that is no message") from None
            if not isinstance(message, (ReadBuffer, WriteBuffer)):
                raise StreamError(f"the stream received an unexpected {type(message).__name__}")
            self._carry(stream, message)

    def _carry(self, stream: Stream, message: ReadBuffer | WriteBuffer) -> None:
        is_write = isinstance(message, WriteBuffer)
        try:
            memory = self._block(message)  # which keeps the memory in place
        except Exception as error:
            if is_write:
                stream.skip(_layout_of(message).nbytes)
            stream.send_header(_header(Failed(message.id, describe(error))))
            return
        if is_write:
            with _writable(memory) as to:
                stream.receive_block(to.place)
        stream.send_header(_header(Result(message.id, Payload())))
        if not is_write:
            stream.send_block(memory.place)


def _addresses() -> list[str]:
    """Return the addresses of this machine for others, first that of the interface that process groups use between hosts."""
    meets_at = address_of(os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "ipv4")
    here = own_addresses()
    return [*([meets_at] if meets_at in here and not meets_at.startswith("127.") else ()), *here]


@contextmanager
def _writable(memory: Memory) -> Iterator[Memory]:
    """Yield the memory to write a block into: the block itself, or CPU memory that is then copied to its device."""
    block = devices.staging(memory) if memory.device else memory
    yield block
    if memory.device:
        devices.store(memory, block)


def _answer_of(id: int, do: Callable[..., Packed], *args: object) -> Packed:
    try:
        return do(*args)
    except Exception as error:
        return pack(Failed(id, describe(error)))


def _header(message: Message) -> bytes:
    return bytes(join([pack(message)])[0])


def _layout_of(message: ReadBuffer | WriteBuffer) -> Layout:
    return Layout("", message.itemsize, message.shape, message.strides)


def _packed(block: bytearray | Frame, layout: Layout) -> ProcessBlock:
    return ProcessBlock(memory_of(block).address, layout.packed())
