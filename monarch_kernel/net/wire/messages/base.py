"""The base class of all messages, and the pickled values in them."""

from __future__ import annotations

import msgspec

__all__ = [
    "Message",
    "Payload",
]


class Payload(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A pickled value: ``data`` inline if it is small; its out-of-band buffers are the message's next ``nframes`` frames."""

    data: bytes = b""
    nframes: int = 0


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Base class of all messages. No message is part of a reference cycle, so the garbage collector need not track them."""
