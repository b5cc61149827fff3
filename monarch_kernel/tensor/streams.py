"""Streams: names for sequences of operations, as in Monarch, with its rules about tensors that two of them use.

Ranks do the operations of all streams in one order. A tensor belongs to the stream that was active when it was made, and
operations on tensors of two streams are errors. `Stream.borrow` lends a tensor to a stream. While it is lent, no stream may
write to it, or, if it is lent mutably, only the borrower may use it. Views that exist already are not checked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from monarch_kernel.errors import TensorError
from monarch_kernel.tensor.device import Blocked, Device, device_of
from monarch_kernel.tensor.distributed_tensor import DistributedTensor, Part
from monarch_kernel.tensor.lines import describe_place, user_place
from monarch_kernel.tensor.on_mesh import activated, active_device, active_stream_name
from monarch_kernel.tensor.propagation import LAYOUTS

__all__ = ["Borrow", "Stream", "get_active_stream"]


class Stream:
    """A sequence of operations.

    Args:
        name: Streams of one name are the same.
    """

    def __init__(self, name: str) -> None:
        if not name or not isinstance(name, str):
            raise ValueError(f"a stream needs a name, not {name!r}")
        self.name = name

    def __repr__(self) -> str:
        return f"<Stream {self.name!r}>"

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make new tensors of this thread belong to this stream."""
        before = active_stream_name.get()
        active_stream_name.set(self.name)
        device = active_device()
        try:
            if device is None:
                yield
            else:
                with activated(device_of(device.mesh, self.name)):
                    yield
        finally:
            active_stream_name.set(before)

    def borrow(self, tensor: DistributedTensor, mutable: bool = False) -> tuple[DistributedTensor, Borrow]:
        """Lend a tensor to this stream, without a copy, until the borrow is dropped.

        Args:
            tensor: A tensor of another stream.
            mutable: Whether this stream may write to it; then no other stream may use it.

        Returns:
            The tensor for this stream, and the borrow, which is also a context.

        Raises:
            TensorError: It is lent already, and one of the borrowers wants to write to it.
        """
        if not isinstance(tensor, DistributedTensor):
            raise TypeError(f"borrow() takes a distributed tensor, not a {type(tensor).__name__}")
        part = tensor._part
        if mutable and part.lent:
            raise TensorError(f"a tensor can't be lent mutably while it is lent: {part.lent}")
        lender: Device = part.device  # type: ignore[assignment]
        there = device_of(lender.mesh, self.name)
        lent = there.make("monarch::alias", [], LAYOUTS.of(tensor), tensor.detach())  # type: ignore[arg-type]
        where = describe_place(user_place(sys._getframe(1)))
        return lent, Borrow(part, lent._part, self.name, mutable, where)


class Borrow:
    """A tensor that is lent to a stream, until `drop`, or the end of a ``with`` block."""

    def __init__(self, lender: Part, borrower: Part, stream: str, mutable: bool, where: str) -> None:
        self._lender = lender
        self._borrower = borrower
        self._is_over = False
        self._device: Any = lender.device
        reason = f"it is lent to stream {stream!r}" + (f" in {where}" if where else "")
        if mutable:
            lender.device = Blocked(
                lender.device, f"a tensor can't be used while {reason}, mutably: drop the borrow first"
            )
        else:
            lender.lent = borrower.lent = (
                f"it would be mutated while {reason}: drop the borrow first, or borrow it mutably"
            )

    def __enter__(self) -> Borrow:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def drop(self) -> None:
        """Return the tensor; the borrower can't use it any more."""
        if self._is_over:
            return
        self._is_over = True
        where = describe_place(user_place(sys._getframe(1)))
        self._lender.device, self._lender.lent = self._device, ""
        reason = "the borrow of this tensor is dropped" + (f" at {where}" if where else "")
        self._borrower.device = Blocked(self._borrower.device, reason)


def get_active_stream() -> Stream:
    """The stream of new tensors of this thread; ``main`` if none was activated."""
    return Stream(active_stream_name.get())
