"""Answers of ranks to requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from monarch_kernel.errors import Failure
from monarch_kernel.net.wire.codec import Frame
from monarch_kernel.net.wire.messages import Payload

__all__ = ["Answer", "Value"]


class Value(NamedTuple):
    """A rank's successful answer: a pickled value, its buffers, and its representations for display.

    ``rank`` is that of the sender of a value that came through a port.
    """

    payload: Payload
    frames: Sequence[Frame]
    bundle: dict[str, object]
    rank: int = -1


Answer = Value | Failure
