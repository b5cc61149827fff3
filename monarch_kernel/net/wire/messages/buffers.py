"""Messages of memory that one process reads or writes in another."""

from __future__ import annotations

from monarch_kernel.net.wire.messages.base import Message, Payload

__all__ = [
    "CloseLoan",
    "EndLoan",
    "EndLoans",
    "EndStream",
    "OpenLoan",
    "OpenStreams",
    "ReadLoan",
    "WriteLoan",
]


# any -> any


class ReadLoan(Message, frozen=True):
    """Answer at once with a block of memory that you have lent, its elements one after the other, as the only frame.

    ``table``, ``entry`` and ``turn`` are the loan (`net.memory.leases`). The block begins ``offset`` bytes after the memory
    does.
    """

    id: int
    table: bytes
    entry: int
    turn: int
    offset: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class WriteLoan(Message, frozen=True):
    """Write elements, which are the only frame, into a block of memory that you have lent; it is described as in `ReadLoan`."""

    id: int
    table: bytes
    entry: int
    turn: int
    offset: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    payload: Payload


class OpenStreams(Message, frozen=True):
    """Listen for ``count`` streams, on which `ReadLoan` and `WriteLoan` come, each with what is read or written after it.

    Answer with the fields of an invitation (`runtime.buffers.streams`).
    """

    id: int
    count: int


class EndStream(Message, frozen=True):
    """Take nothing any more from the stream that was opened with this token; answer when nothing of it is still written."""

    id: int
    token: bytes


class OpenLoan(Message, frozen=True):
    """Answer with what it takes to reach memory that you have lent by a ``way`` that you take no part in: "cuda" or "rdma".

    What is opened for "rdma" stays where it is until `CloseLoan`, or the end of the process that has asked.
    """

    id: int
    table: bytes
    entry: int
    turn: int
    way: str


class CloseLoan(Message, frozen=True):
    """What was opened by this request is not used any more by who has asked."""

    opened: int


class EndLoan(Message, frozen=True):
    """Memory that you have lent is needed no more; answer with whether it was lent still."""

    id: int
    table: bytes
    entry: int
    turn: int


class EndLoans(Message, frozen=True):
    """All that you have lent for an owner is needed no more; answer with the loans of what was written to meanwhile."""

    id: int
    owner: int
