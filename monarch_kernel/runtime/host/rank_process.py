"""A rank as its host agent sees it: process, pipes and log."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

from monarch_kernel.net.wire.messages import RankSpec
from monarch_kernel.runtime.host.logs import RankLog
from monarch_kernel.runtime.host.output import OutputStream
from monarch_kernel.runtime.host.preemption import note_stop, nudge
from monarch_kernel.runtime.host.processes import signal_rank
from monarch_kernel.runtime.host.segments import remove_segments

__all__ = ["RankProcess"]

NUDGE_S = 0.5
"""How often a rank that was stopped, and has not ended, is nudged."""


@dataclass
class RankProcess:
    """A rank that was requested and has not ended.

    Attributes:
        spec: What it was requested with.
        streams: Its pipes.
        log: Keeps its output.
        pid: Its process id; 0 until the zygote has forked it.
        pidfd: A descriptor of the process; -1 until then.
        forked_at: When that was, in seconds since 1970.
        kill_at: When to send SIGKILL; None if it was not stopped.
        nudge_at: When to make it handle the SIGTERM that it has got, if it has not ended by then.
        rss_nbytes: Its resident memory at the last reading.
        cpu_s: Its processor time at the last reading, in seconds.
        stopping: How long it has to end by itself, in seconds; None if it was not stopped.
        keeps_log: Whether its log is kept when it ends.
    """

    spec: RankSpec
    streams: list[OutputStream]
    log: RankLog
    pid: int = 0
    pidfd: int = -1
    forked_at: float = 0.0
    kill_at: float | None = None
    nudge_at: float = 0.0
    rss_nbytes: int = 0
    cpu_s: float = 0.0
    stopping: float | None = field(default=None)
    keeps_log: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Number and incarnation, which no other rank of the session has."""
        return self.spec.proc, self.spec.incarnation

    def forked(self, pid: int) -> None:
        """Note the process that the zygote has forked."""
        self.pid, self.pidfd, self.forked_at = pid, os.pidfd_open(pid), time.time()

    def stop(self, grace_s: float, now: float) -> None:
        """Make the process end: by SIGTERM, and by SIGKILL after ``grace_s``; or at once, if that is 0."""
        if grace_s:
            note_stop(self.pid)
        signal_rank(self.pid, signal.SIGTERM if grace_s else signal.SIGKILL)
        self.kill_at, self.nudge_at = now + grace_s, now + NUDGE_S

    def kill_if_due(self, now: float) -> None:
        """Send SIGKILL if the process was stopped and has had its time; nudge it before."""
        if self.kill_at is None:
            return
        if now >= self.kill_at:
            signal_rank(self.pid, signal.SIGKILL)
            self.kill_at = None
        elif now >= self.nudge_at:
            nudge(self.pid)
            self.nudge_at = now + NUDGE_S

    def collect(self) -> tuple[int, int] | None:
        """Collect the exit code and the signal of the process; None while the agent can't, or the process has not ended.

        The agent becomes the parent when the helper that forked the rank ends; until then there is no status to collect.
        """
        try:
            info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return None
        if info is None:
            return None
        by_signal = info.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        self.remove_segments()
        return (0, info.si_status) if by_signal else (info.si_status, 0)

    def remove_segments(self) -> None:
        """Remove shared memory that the process has left; it must have ended."""
        remove_segments(self.pid, self.forked_at)
