"""Carries bytes between memory of this process and memory that another has lent, by the shortest road."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from monarch_kernel.asking.answer import Answer
from monarch_kernel.asking.asker import Asker
from monarch_kernel.asking.future import Future
from monarch_kernel.asking.waits import Wait
from monarch_kernel.data.crew import Crew
from monarch_kernel.data.lending import Gone, Loan, NoRoad, Roads, Transfer
from monarch_kernel.data.memory import Layout, Memory, Place, boxes, copy, matched, memory_of
from monarch_kernel.errors import BufferGoneError, Failure, rebuild_exception
from monarch_kernel.transport.driver import Waiter
from monarch_kernel.wire.codec import Frame, Packed, pack
from monarch_kernel.wire.messages import Payload, ReadLoan, WriteLoan

__all__ = ["carry", "together"]

AT_ONCE_NBYTES = 8 << 20
"""What is smaller is carried by the thread that asks: another would cost more."""

PIECE_NBYTES = 4 << 20
"""What the owner is asked for at once, where it has to be asked."""

_PIECES_AHEAD = 4
_THREADS = 4

_roads = Roads()
_crew = Crew("monarch-carrier", _THREADS)


def carry(asker: Asker, proc: int, loan: Loan, here: Memory, *, is_write: bool) -> Future[Transfer]:
    """Copy what was lent into memory of this process; or the other way, if ``is_write``.

    Args:
        asker: carries requests to the owner, where it has to be asked.
        proc: place of the owner.
        loan: what it has lent.
        here: memory of this process; of as many bytes.
        is_write: which way.
    """
    future: Future[Transfer] = Future(
        _Carrying(asker), 0, lambda answers: done[0], note="carrying bytes", procs=(proc,)
    )
    done: list[Transfer] = []

    def work() -> None:
        try:
            done.append(_carry(asker, proc, loan, here, is_write))
        except Exception as error:
            future.abandon(error)
        else:
            future.resolve((), True)

    if loan.layout.nbytes <= AT_ONCE_NBYTES and _roads.leads_to(loan):
        work()
    else:
        _crew.submit(lambda: _away(asker, work))
    return future


def together(futures: Sequence[Future[Transfer]]) -> Future[list[Transfer]]:
    """A future of many transfers, at least one; it ends when all have, with the first error if there is one."""
    whole: Future[list[Transfer]] = Future(futures[0].owner, 0, lambda _: [each.get(0) for each in futures])
    left = len(futures)
    lock = threading.Lock()

    def one_is_done() -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = not left
        if is_last:
            whole.resolve((), True)

    for each in futures:
        each.add_done_callback(one_is_done)
    return whole


def _away(asker: Asker, work: Callable[[], None]) -> None:
    work()
    asker.submit(_nothing)  # wakes whoever waits for it in the transport


def _nothing() -> None:
    pass


def _carry(asker: Asker, proc: int, loan: Loan, here: Memory, is_write: bool) -> Transfer:
    begun = time.perf_counter()
    try:
        return _roads.write(loan, here) if is_write else _roads.read(loan, here)
    except Gone as error:
        raise _gone(asker, proc, str(error)) from None
    except NoRoad:
        _ask(asker, proc, loan, here, is_write)
        return Transfer(loan.layout.nbytes, time.perf_counter() - begun, "messages")


def _ask(asker: Asker, proc: int, loan: Loan, here: Memory, is_write: bool) -> None:
    """Have the owner send the bytes, or take them, piece by piece."""
    ours, theirs = matched(here.layout, loan.layout)
    under_way: deque[Future[None]] = deque()
    # Both are cut by their shapes, which are the same.
    for (near, layout), (far, box) in zip(boxes(ours, PIECE_NBYTES), boxes(theirs, PIECE_NBYTES)):
        piece = Place(here.address + near, layout)
        offset = loan.address + far - loan.base
        under_way.append(_ask_piece(asker, proc, loan, Place(offset, box), piece, is_write))
        if len(under_way) >= _PIECES_AHEAD:
            under_way.popleft().get(warn_after_s=None)
    while under_way:
        under_way.popleft().get(warn_after_s=None)


def _ask_piece(asker: Asker, proc: int, loan: Loan, there: Place, here: Place, is_write: bool) -> Future[None]:
    described = (loan.lent.cookie, *loan.lease, there.address, *there.layout[1:])

    def make(id: int) -> Packed:
        if not is_write:
            return pack(ReadLoan(id, *described))
        block = bytearray(here.layout.nbytes)
        copy(_packed(block, here.layout), here)
        return pack(WriteLoan(id, *described, Payload(b"", 1)), (memoryview(block),))

    def finish(answers: Sequence[Answer]) -> None:
        (answer,) = answers
        if isinstance(answer, Failure):
            if answer.kind == "exception":
                raise rebuild_exception(answer)
            raise _gone(asker, proc, "its owner has ended")
        if not is_write:
            copy(here, _packed(answer.frames[0], here.layout))

    return asker.request((proc,), make, "carrying bytes", finish, quiet=True)


def _packed(block: bytearray | Frame, layout: Layout) -> Place:
    return Place(memory_of(block).address, layout.packed())


def _gone(asker: Asker, proc: int, why: str) -> BufferGoneError:
    death = asker.deaths((proc,)).get(proc)
    return BufferGoneError(f"the buffer can't be used any more: {why}" + (f" ({death.headline()})" if death else ""))


class _Carrying:
    """Owner of the futures of transfers: there is nobody to interrupt."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    def wait(self, waiter: Waiter, timeout_s: float | None) -> bool:
        return self._asker.wait(waiter, timeout_s)

    def interrupt(self, id: int, *, abort: bool = False) -> None:
        pass

    def cancel(self, id: int) -> None:
        pass

    def attend(self, future: Future[Any]) -> None:
        self._asker.attend(future)

    def linger(self, wait: Wait) -> float | None:
        return None
