"""Roads on which the owner of memory takes part, for it has to be asked; and all roads of a process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from monarch_kernel.asking.answer import Answer
from monarch_kernel.asking.asker import Asker
from monarch_kernel.asking.future import Future
from monarch_kernel.data.lending import Loan
from monarch_kernel.data.memory import Layout, Memory, Place, boxes, copy, matched, memory_of
from monarch_kernel.data.meters import Piece
from monarch_kernel.data.near import MemoryRoad, ProcessRoad, Tables
from monarch_kernel.data.roads import Gone, Roads
from monarch_kernel.errors import BufferGoneError, Failure, rebuild_exception
from monarch_kernel.wire.codec import Frame, Packed, pack
from monarch_kernel.wire.messages import Payload, ReadLoan, WriteLoan

__all__ = ["MessagesRoad", "roads_of"]

PIECE_NBYTES = 4 << 20
"""What the owner is asked for at once."""

_PIECES_AHEAD = 4


def roads_of(asker: Asker) -> Roads:
    """All roads of a process, the best first.

    Args:
        asker: carries its requests.
    """
    tables = Tables()
    return Roads((ProcessRoad(tables), MemoryRoad(tables), MessagesRoad(asker)), asker.meters)


class MessagesRoad:
    """By the connections that calls take, in pieces: it leads wherever a process can be called."""

    name = "messages"
    is_direct = False

    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    def leads_to(self, loan: Loan) -> bool:
        return True

    def carry(self, loan: Loan, here: Memory, *, is_write: bool) -> None:
        ours, theirs = matched(here.layout, loan.layout)
        under_way: deque[Future[None]] = deque()
        # Both are cut by their shapes, which are the same.
        for (near, layout), (far, box) in zip(boxes(ours, PIECE_NBYTES), boxes(theirs, PIECE_NBYTES)):
            piece = Place(here.address + near, layout)
            offset = loan.address + far - loan.base
            under_way.append(self._ask(loan, Place(offset, box), piece, is_write))
            if len(under_way) >= _PIECES_AHEAD:
                under_way.popleft().get(warn_after_s=None)
        while under_way:
            under_way.popleft().get(warn_after_s=None)

    def _ask(self, loan: Loan, there: Place, here: Place, is_write: bool) -> Future[None]:
        """Have the owner send a piece, or take it."""
        described = (loan.lent.cookie, *loan.lease, there.address, *there.layout[1:])

        def make(id: int) -> Packed:
            if not is_write:
                return pack(ReadLoan(id, *described))
            block = Piece(here.layout.nbytes)
            copy(_packed(block, here.layout), here)
            return pack(WriteLoan(id, *described, Payload(b"", 1)), (memoryview(block),))

        def finish(answers: Sequence[Answer]) -> None:
            (answer,) = answers
            if isinstance(answer, Failure):
                raise _error_of(answer)
            if not is_write:
                copy(here, _packed(answer.frames[0], here.layout))

        return self._asker.request((loan.proc,), make, "carrying bytes", finish, quiet=True)


def _error_of(failure: Failure) -> BaseException:
    if failure.kind != "exception":
        return Gone("its owner has ended")
    error = rebuild_exception(failure)
    return Gone(str(error)) if isinstance(error, BufferGoneError) else error


def _packed(block: bytearray | Frame, layout: Layout) -> Place:
    return Place(memory_of(block).address, layout.packed())
