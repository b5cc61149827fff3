"""What a process does with memory that it has lent, for those that can't reach it themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monarch_kernel.data.leases import Lease
from monarch_kernel.data.lending import Lendings
from monarch_kernel.data.memory import Layout, Place, copy, memory_of
from monarch_kernel.data.meters import Piece
from monarch_kernel.describe.report import describe
from monarch_kernel.errors import BufferGoneError
from monarch_kernel.wire.codec import Frame, Packed, dump, pack
from monarch_kernel.wire.messages import EndLoan, EndLoans, Failed, Message, Payload, ReadLoan, Result, WriteLoan

__all__ = ["Lender"]


class Lender:
    """Answers what concerns loans, at once, whatever the process is busy with.

    Args:
        lendings: of this process.
        answer: sends an answer to a request, with the baton held.
    """

    def __init__(self, lendings: Lendings, answer: Callable[[int, Packed], None]) -> None:
        self._lendings = lendings
        self._answer = answer

    def hear(self, message: Message, frames: Sequence[Frame]) -> bool:
        """Take a message; False if it is about something else."""
        if not isinstance(message, (ReadLoan, WriteLoan, EndLoan, EndLoans)):
            return False
        try:
            self._answer(message.id, self._do(message, frames))
        except Exception as error:
            self._answer(message.id, pack(Failed(message.id, describe(error))))
        return True

    def _do(self, message: ReadLoan | WriteLoan | EndLoan | EndLoans, frames: Sequence[Frame]) -> Packed:
        if isinstance(message, EndLoans):
            payload, parts = dump([tuple(lease) for lease in self._lendings.end_all_of(message.owner)])
            return pack(Result(message.id, payload), parts)
        lease = Lease(message.entry, message.turn)
        if isinstance(message, EndLoan):
            was_lent = self._lendings.owns(message.table) and self._lendings.end(lease)
            payload, parts = dump(was_lent)
            return pack(Result(message.id, payload), parts)
        if not self._lendings.owns(message.table):
            raise BufferGoneError("its owner has ended, and another process has come in its place")
        memory = self._lendings.memory(lease)
        if memory is None:
            raise BufferGoneError("it was dropped")
        layout = Layout("", message.itemsize, message.shape, message.strides)
        low, high = memory.layout.span
        if message.itemsize < 1 or len(message.shape) != len(message.strides) or min(message.shape, default=1) < 0:
            raise ValueError("this is no block of memory")
        if layout.nbytes and not low <= message.offset + layout.span[0] <= message.offset + layout.span[1] <= high:
            raise ValueError("the block lies beyond the end of what was lent")
        ours = Place(memory.address + message.offset, layout)
        if isinstance(message, ReadLoan):
            block = Piece(layout.nbytes)
            copy(_packed(block, layout), ours)
            return pack(Result(message.id, Payload(b"", 1)), (memoryview(block),))
        if memory.is_readonly:
            raise TypeError("the memory can only be read")
        if len(frames) != 1 or len(frames[0]) != layout.nbytes:
            raise ValueError(f"the block has {layout.nbytes} bytes, and others came")
        copy(ours, _packed(frames[0], layout))
        return pack(Result(message.id, Payload()))


def _packed(block: bytearray | Frame, layout: Layout) -> Place:
    return Place(memory_of(block).address, layout.packed())
