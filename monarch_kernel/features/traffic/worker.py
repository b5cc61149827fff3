"""The rank's part of traffic: reports its counts to the controller, a few times a second while they change."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from monarch_kernel.errors import ForkedError
from monarch_kernel.net.transport.base import CONTROLLER
from monarch_kernel.net.wire.codec import Frame, Packed, pack
from monarch_kernel.net.wire.messages import Metered, Payload, ReadMeters, Result
from monarch_kernel.runtime.host.link_speeds import link_speeds
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["REPORT_S", "MeterReports"]

REPORT_S = 0.25
"""Minimum interval between reports."""


@register
class MeterReports:
    """Reports the meters of a rank while they change. A rank that sends and receives nothing has no thread for this.

    Args:
        rank: the rank with the meters; it answers `ReadMeters` from now on.
    """

    def __init__(self, rank: Rank) -> None:
        self._driver = rank.driver
        self._answer = rank.send_answer_now
        self._meters = rank.peers.meters
        self._unread = 0
        self._links: tuple[tuple[str, float], ...] | None = None  # None until they are read
        self._has_told_links = False
        self._meters.on_news = self._begin
        rank.extend({ReadMeters: self._asked})
        rank.at_new_controller.append(lambda open_requests: self._controller_is_new())

    def _asked(self, message: ReadMeters, frames: Sequence[Frame]) -> None:
        self._report()
        self._answer(message.id, pack(Result(message.id, Payload())))

    def _controller_is_new(self) -> None:
        self._has_told_links = False
        self._meters.tell_all()
        self._report()

    def _report(self) -> None:
        if (report := self._read()) is not None:
            self._driver.send(CONTROLLER, report)

    def _read(self, *, is_last: bool = False) -> Packed | None:
        """The next report; None if nothing has changed. With ``is_last``, the caller then stops asking."""
        changes = self._meters.changes(is_last=is_last)
        unread = self._meters.count_unread()
        if not changes.carried and not changes.collected and unread == self._unread:
            return None
        self._unread = unread
        links = () if self._has_told_links or self._links is None else self._links
        self._has_told_links |= self._links is not None
        return pack(Metered(changes.carried, changes.over_s, changes.collected, unread, changes.is_repeat, links))

    def _begin(self) -> None:
        threading.Thread(target=self._report_changes, name="monarch-meters", daemon=True).start()

    def _report_changes(self) -> None:
        if self._links is None:  # here, because NVML takes a tenth of a second to load
            self._links = tuple((each.name, each.bytes_per_s) for each in link_speeds(os.environ))
        while True:
            time.sleep(REPORT_S)
            report = self._read(is_last=True)
            if report is None:
                return
            try:
                self._driver.submit(report)
            except ForkedError:
                return
