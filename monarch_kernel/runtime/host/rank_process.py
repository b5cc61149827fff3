"""A rank as its host agent sees it: process, pipes and log."""

from __future__ import annotations

from dataclasses import dataclass, field

from monarch_kernel.net.wire.messages import RankSpec
from monarch_kernel.runtime.host.logs import RankLog
from monarch_kernel.runtime.host.output import OutputStream

__all__ = ["RankProcess"]


@dataclass
class RankProcess:
    """A rank that was requested and has not ended.

    Attributes:
        spec: What it was requested with.
        streams: Its pipes.
        log: Keeps its output.
        pid: Its process id; 0 until the zygote has forked it.
        pidfd: A descriptor of the process; -1 until then.
        kill_at: When to send SIGKILL; None if it was not stopped.
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
    kill_at: float | None = None
    rss_nbytes: int = 0
    cpu_s: float = 0.0
    stopping: float | None = field(default=None)
    keeps_log: bool = False
