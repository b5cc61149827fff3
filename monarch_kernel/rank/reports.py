"""What a rank tells the controller of its counts: what has changed, a few times a second, as long as something does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from monarch_kernel.data.meters import Meters
from monarch_kernel.errors import ForkedError
from monarch_kernel.wire.codec import Packed, pack
from monarch_kernel.wire.messages import Metered

__all__ = ["REPORT_S", "MeterReports"]

REPORT_S = 0.25
"""So often at most."""


class MeterReports:
    """Reads the meters of a rank when they move; a rank that carries nothing has no thread for it, and says nothing.

    Args:
        meters: of the rank.
        send: sends a message to the controller; for any thread.
    """

    def __init__(self, meters: Meters, send: Callable[[Packed], None]) -> None:
        self._meters = meters
        self._send = send
        meters.on_news = self._begin

    def now(self, *, is_last: bool = False) -> Packed | None:
        """What there is to tell; None if nothing is, and ``is_last`` says that it is not asked again then."""
        rows, over_s = self._meters.changes(is_last=is_last)
        return pack(Metered(rows, over_s)) if rows else None

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
