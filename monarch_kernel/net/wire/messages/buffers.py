"""Messages for access to memory that one process lends to another."""

from __future__ import annotations

from monarch_kernel.net.wire.messages.base import Message, Payload

__all__ = [
    "CloseBuffer",
    "EndExport",
    "EndExports",
    "EndStream",
    "OpenBuffer",
    "OpenStreams",
    "ReadBuffer",
    "WriteBuffer",
]


# any -> any


class ReadBuffer(Message, frozen=True):
    """Read a block of lent memory. The answer comes at once; its only frame has the elements of the block without gaps.

    ``table``, ``entry`` and ``turn`` identify the lease (`net.memory.leases`). ``offset`` is the distance of the block from the
    start of the memory, in bytes.
    """

    id: int
    table: bytes
    entry: int
    turn: int
    offset: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class WriteBuffer(Message, frozen=True):
    """Write the elements in the only frame into a block of lent memory. The other fields are those of `ReadBuffer`."""

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
    """Listen for ``count`` streams; answered with the fields of an invitation (`runtime.buffers.streams`).

    On a stream, the bytes that are read or written follow each `ReadBuffer` or `WriteBuffer`.
    """

    id: int
    count: int


class EndStream(Message, frozen=True):
    """Accept no more data from the stream opened with this token; answered when all data that it received is written."""

    id: int
    token: bytes


class OpenBuffer(Message, frozen=True):
    """Open lent memory for a ``way`` in which the receiver takes no part, "cuda" or "rdma"; answered with what that needs.

    Memory opened for "rdma" stays where it is until `CloseBuffer`, or until the process that sent this ends.
    """

    id: int
    table: bytes
    entry: int
    turn: int
    way: str


class CloseBuffer(Message, frozen=True):
    """Report that the sender no longer uses what its `OpenBuffer` request ``opened`` has opened. Not answered."""

    opened: int


class EndExport(Message, frozen=True):
    """End a lease, because the memory is no longer needed; answered with whether the memory was still lent."""

    id: int
    table: bytes
    entry: int
    turn: int


class EndExports(Message, frozen=True):
    """End all leases of an owner; answered with the leases of tensors that the receiver has written to since it lent them."""

    id: int
    owner: int
