"""Messages between a debugger of an editor and a rank: the bytes of the Debug Adapter Protocol, which nothing here reads."""

from __future__ import annotations

from monarch_kernel.net.wire.codec import add_messages
from monarch_kernel.net.wire.messages import Message

__all__ = ["DapBytes", "StartDap"]


class StartDap(Message, frozen=True):
    """Make debugpy on a rank serve a new debugger, which ``session`` numbers; the rank answers when it does.

    With 0 the rank only says whether it could.
    """

    id: int
    session: int


class DapBytes(Message, frozen=True):
    """Bytes from the debugger to the rank, or from the rank to the debugger; none at the end of the connection."""

    proc: int
    session: int
    data: bytes


add_messages(DapBytes, StartDap)
