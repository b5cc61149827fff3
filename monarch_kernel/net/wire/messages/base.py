"""The base of all messages, and the pickled values that they carry."""

from __future__ import annotations

import msgspec

__all__ = [
    "Message",
    "Payload",
]


class Payload(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A pickled value: ``data`` inline while small; its out-of-band buffers are the message's next ``nframes`` frames."""

    data: bytes = b""
    nframes: int = 0


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Base of all messages; none is ever part of a cycle, so the garbage collector need not look at them."""
