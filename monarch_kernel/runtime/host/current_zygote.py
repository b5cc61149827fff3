"""The zygote that a host agent has now: starts another one when it has ended, and says which process groups it would end."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Iterable, Sequence

from monarch_kernel.net.wire.config import ForkReport
from monarch_kernel.net.wire.messages import RankSpec
from monarch_kernel.runtime.host.zygote import Zygote

__all__ = ["CurrentZygote"]

_WAIT_S, _MAX_WAIT_S = 0.25, 60.0
"""Delay before the second zygote in a row that ended without forking a rank is replaced, and the maximum delay."""


class CurrentZygote:
    """The zygote of an agent, which may have none for a while: it may be unable to start.

    Args:
        make: Starts a zygote.
        selector: That of the agent.
        reported: Called with what the zygote reports of a rank.
        ended: Called with the last lines of its log when it has ended.
    """

    def __init__(
        self,
        make: Callable[[], Zygote],
        selector: selectors.BaseSelector,
        reported: Callable[[ForkReport], None],
        ended: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._make = make
        self._selector = selector
        self._reported = reported
        self._on_end = ended
        self._zygote: Zygote | None = None
        self._knows_groups = True
        self._wait_s = 0.0
        self._restart_at = 0.0

    @property
    def pid(self) -> int:
        """Its process id; 0 if there is none."""
        return 0 if self._zygote is None else self._zygote.pid

    def start(self) -> None:
        """Start a zygote."""
        self._zygote = self._make()
        self._selector.register(self._zygote.socket, selectors.EVENT_READ, self._read)

    def be_there(self) -> None:
        """Start a zygote if there is none, also if it has ended just now and its socket has not been read yet."""
        if self._zygote is not None and not self._zygote.is_alive:
            self._ended()
        if self._zygote is None:
            self.start()

    def fork(self, specs: Sequence[RankSpec], fds: Sequence[tuple[int, int]], secrets: Sequence[str]) -> None:
        """Request ranks, as `Zygote.fork`."""
        try:
            assert self._zygote is not None
            self._zygote.fork(specs, fds, secrets)
        except OSError:
            self._ended()

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules, as `Zygote.preload`."""
        if self._zygote is not None:
            self._zygote.preload(modules)

    def has_forked(self) -> None:
        """Note that it works: if it ends, another one follows at once."""
        self._wait_s = 0.0

    def groups_changed(self) -> None:
        """Note that the process groups that it would end are others now."""
        self._knows_groups = False

    def do_what_is_due(self, now: float, *, is_needed: bool, groups: Callable[[], Iterable[int]]) -> None:
        """Replace a zygote that has ended, and tell it which process groups to end if the agent is killed.

        Args:
            now: The time in seconds.
            is_needed: Whether there are processes that a zygote would end, or from which it forks.
            groups: Finds these groups.
        """
        if self._zygote is None and is_needed and now >= self._restart_at:
            self.start()
            self._knows_groups = False
        if not self._knows_groups:
            self._knows_groups = self._zygote is None or self._zygote.send_groups(sorted(groups()))

    def close(self) -> None:
        """End it."""
        if self._zygote is not None:
            self._zygote.close()

    def _read(self) -> None:
        assert self._zygote is not None
        report = self._zygote.report()
        if report is None:
            self._ended()
        else:
            self._reported(report)

    def _ended(self) -> None:
        if self._zygote is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._zygote.socket)
        log = self._zygote.close()
        self._zygote = None
        self._on_end(log)
        self._restart_at = time.monotonic() + self._wait_s
        self._wait_s = min(_MAX_WAIT_S, 2 * self._wait_s + _WAIT_S)
