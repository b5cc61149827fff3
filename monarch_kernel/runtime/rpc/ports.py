"""The open ports of a process, and what takes the messages that arrive at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monarch_kernel.net.wire.codec import Frame
from monarch_kernel.net.wire.messages import PortSend
from monarch_kernel.runtime.rpc.answers import Answer, Value

__all__ = ["PortTable"]


class PortTable:
    """The ports that a process has open.

    Attributes:
        dropped_messages: The number of messages to ports that are not open, or no longer.
    """

    def __init__(self) -> None:
        self.dropped_messages = 0
        self._takers: dict[int, Callable[[Answer], None]] = {}

    def __len__(self) -> int:
        return len(self._takers)

    def open(self, number: int, take: Callable[[Answer], None]) -> None:
        """Pass messages that arrive at a port to a quick function, on the I/O thread."""
        self._takers[number] = take

    def close(self, number: int) -> None:
        """Close a port; later messages to it are dropped."""
        self._takers.pop(number, None)

    def handle(self, message: PortSend, frames: Sequence[Frame]) -> None:
        """Handle a message to a port."""
        take = self._takers.get(message.port)
        if take is None:
            self.dropped_messages += 1
        elif message.failure is not None:
            take(message.failure)
        else:
            take(Value(message.payload, frames, {}, message.rank))
