"""The question how far ranks are."""

from __future__ import annotations

from monarch_kernel.net.wire.codec import add_messages
from monarch_kernel.net.wire.messages import Message

__all__ = ["GetProgress"]


class GetProgress(Message, frozen=True):
    """Ask a rank how many collectives it has started in its default group; answered at once, in microseconds."""

    id: int


add_messages(GetProgress)
