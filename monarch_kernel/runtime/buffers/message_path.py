"""The data path that works wherever a process can be called: requests to the owner read or write its memory piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from monarch_kernel.errors import BufferGoneError, Failure, rebuild_exception
from monarch_kernel.net.memory.counters import Piece
from monarch_kernel.net.memory.exports import BufferHandle
from monarch_kernel.net.memory.layout import Layout, Memory, ProcessBlock, boxes, copy, matched, memory_of
from monarch_kernel.net.memory.paths import SLAB_NBYTES, OwnerGone
from monarch_kernel.net.wire.codec import Frame, Packed, pack
from monarch_kernel.net.wire.messages import Payload, ReadBuffer, WriteBuffer
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["MessagesPath", "error_of"]

PIECE_NBYTES = 4 << 20
"""The size of one request to the owner."""

_PIECES_AHEAD = 4


class MessagesPath:
    """Data path over the connections that calls take.

    Args:
        client: sends the requests.
    """

    name = "messages"
    is_direct = False
    takes_devices = False
    slab_nbytes = SLAB_NBYTES

    def __init__(self, client: Client) -> None:
        self._client = client

    def leads_to(self, handle: BufferHandle) -> bool:
        return True

    def carry(self, handle: BufferHandle, here: Memory, *, is_write: bool) -> None:
        ours, theirs = matched(here.layout, handle.layout)
        under_way: deque[Future[None]] = deque()
        # Both are cut into the same pieces, because their shapes are the same.
        for (near, layout), (far, box) in zip(boxes(ours, PIECE_NBYTES), boxes(theirs, PIECE_NBYTES)):
            piece = ProcessBlock(here.address + near, layout)
            offset = handle.address + far - handle.base
            under_way.append(self._ask(handle, ProcessBlock(offset, box), piece, is_write))
            if len(under_way) >= _PIECES_AHEAD:
                under_way.popleft().get(warn_after_s=None)
        while under_way:
            under_way.popleft().get(warn_after_s=None)

    def close(self) -> None:
        """Do nothing: this path keeps nothing open."""

    def _ask(self, handle: BufferHandle, there: ProcessBlock, here: ProcessBlock, is_write: bool) -> Future[None]:
        """Send the owner a request to read or write a piece."""
        described = (handle.lent.cookie, *handle.lease, there.address, *there.layout[1:])

        def make(id: int) -> Packed:
            if not is_write:
                return pack(ReadBuffer(id, *described))
            block = Piece(here.layout.nbytes)
            copy(_packed(block, here.layout), here)
            return pack(WriteBuffer(id, *described, Payload(b"", 1)), (memoryview(block),))

        def finish(answers: Sequence[Answer]) -> None:
            (answer,) = answers
            if isinstance(answer, Failure):
                raise error_of(answer)
            if not is_write:
                copy(here, _packed(answer.frames[0], here.layout))

        return self._client.request((handle.proc,), make, "transferring bytes", finish, quiet=True)


def error_of(failure: Failure) -> BaseException:
    """Return the error that the failure of a request to an owner stands for."""
    if failure.kind != "exception":
        return OwnerGone("its owner has ended")
    error = rebuild_exception(failure)
    return OwnerGone(str(error)) if isinstance(error, BufferGoneError) else error


def _packed(block: bytearray | Frame, layout: Layout) -> ProcessBlock:
    return ProcessBlock(memory_of(block).address, layout.packed())
