"""Sends the displays of a rank no faster than the controller reads them.

A loop can make displays faster than a notebook shows them. The queue of a connection has no bound, so a rank that did not wait
would fill its memory with them. It waits where code displays something, as a program waits that writes to a full pipe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch_kernel.net.transport.driver import Driver, Waiter
from monarch_kernel.net.wire.codec import Packed

__all__ = ["MOST_NBYTES", "Displays"]

MOST_NBYTES = 32 << 20
"""Size of what may wait in the queue before code that displays something waits, too."""

_LOOK_EVERY_NBYTES = 1 << 20
_LOOK_S, _WAIT_S = 0.001, 0.02


class Displays:
    """Sends displays, and messages of widgets; any thread may use it.

    Args:
        driver: sends them.
        unsent: returns the size of what waits until the other end has read.
    """

    def __init__(self, driver: Driver[Any], unsent: Callable[[], int]) -> None:
        self._driver = driver
        self._unsent = unsent
        self._not_looked = 0  # size of what was sent since the last look at the queue; not exact with several threads

    def send(self, packed: Packed) -> None:
        """Send a message without waiting.

        Raises:
            ForkedError: in a fork of the rank.
        """
        self._driver.submit(packed)
        self._not_looked += len(packed.header)

    def wait(self) -> None:
        """Wait while much waits to be sent; an interrupt ends this."""
        if self._not_looked < _LOOK_EVERY_NBYTES:
            return
        self._not_looked = 0
        self._driver.wait(Waiter(), _LOOK_S)  # what was submitted is in the queue then, unless another thread is at it
        while self._unsent() > MOST_NBYTES and not self._driver.is_closed:
            self._driver.wait(Waiter(), _WAIT_S)
