"""Messages about comms between a rank and the page."""

from __future__ import annotations

from typing import Any

from monarch_kernel.net.wire.codec import add_messages
from monarch_kernel.net.wire.messages import Message

__all__ = ["CommReceived", "CommSent"]


class CommSent(Message, frozen=True):
    """A rank sends something to the page.

    ``kind`` is a kind of message of Jupyter's protocol: ``comm_open`` (to ``target``), ``comm_msg`` or ``comm_close``.
    """

    kind: str
    comm: str
    data: dict[str, Any]
    metadata: dict[str, Any]
    buffers: tuple[bytes, ...] = ()
    target: str = ""


class CommReceived(Message, frozen=True):
    """The page sends something to a rank: a ``comm_msg`` or a ``comm_close``. Answered when the callbacks have run."""

    id: int
    kind: str
    comm: str
    data: dict[str, Any]
    metadata: dict[str, Any]
    buffers: tuple[bytes, ...] = ()


add_messages(CommSent, CommReceived)
