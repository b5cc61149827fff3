"""What a rank tells the controller of its counts: what has changed, a few times a second, as long as something does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from monarch_kernel.errors import ForkedError
from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.net.wire.codec import Packed, pack
from monarch_kernel.net.wire.messages import Metered

__all__ = ["REPORT_S", "MeterReports"]

REPORT_S = 0.25
"""So often at most."""


class MeterReports:
    """Reads the meters of a rank when they move; a rank that carries nothing has no thread for it, and says nothing.

    Args:
        meters: of the rank.
        send: sends a message to the controller; for any thread.

    Attributes:
        count_unread: gives how many collectives there were that are in no count.
    """

    def __init__(self, meters: Meters, send: Callable[[Packed], None]) -> None:
        self._meters = meters
        self._send = send
        self.count_unread: Callable[[], int] = lambda: 0
        self._unread = 0
        meters.on_news = self._begin

    def now(self, *, is_last: bool = False) -> Packed | None:
        """What there is to tell; None if nothing is, and ``is_last`` says that it is not asked again then."""
        changes = self._meters.changes(is_last=is_last)
        unread = self.count_unread()
        if not changes.carried and not changes.collected and unread == self._unread:
            return None
        self._unread = unread
        return pack(Metered(*changes, unread))

    def _begin(self) -> None:
        threading.Thread(target=self._tell, name="monarch-meters", daemon=True).start()

    def _tell(self) -> None:
        while True:
            time.sleep(REPORT_S)
            told = self.now(is_last=True)
            if told is None:
                return
            try:
                self._send(told)
            except ForkedError:
                return
