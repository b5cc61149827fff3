"""Where what is sent to a process through its ports arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monarch_kernel.net.wire.codec import Frame
from monarch_kernel.net.wire.messages import PortSend
from monarch_kernel.runtime.rpc.answers import Answer, Value

__all__ = ["PortTable"]


class PortTable:
    """The ports that a process has open.

    Attributes:
        strays: messages to ports that are not open, or no more.
    """

    def __init__(self) -> None:
        self.strays = 0
        self._takers: dict[int, Callable[[Answer], None]] = {}

    def __len__(self) -> int:
        return len(self._takers)

    def open(self, number: int, take: Callable[[Answer], None]) -> None:
        """Have what arrives at a port handed to something quick, on the thread that drives the transport."""
        self._takers[number] = take

    def close(self, number: int) -> None:
        """Take no more; what arrives is dropped."""
        self._takers.pop(number, None)

    def hear(self, message: PortSend, frames: Sequence[Frame]) -> None:
        """Something has arrived."""
        take = self._takers.get(message.port)
        if take is None:
            self.strays += 1
        elif message.failure is not None:
            take(message.failure)
        else:
            take(Value(message.payload, frames, {}))
