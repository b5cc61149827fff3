"""Readings of the memory, the processor use and the GPUs of the ranks of a host."""

from __future__ import annotations

from collections.abc import Mapping

from monarch_kernel.net.wire.messages import Reading, Readings
from monarch_kernel.runtime.host.gpus import GpuMeters
from monarch_kernel.runtime.host.oom_watch import OomWatch
from monarch_kernel.runtime.host.processes import cpu_seconds, rss_nbytes
from monarch_kernel.runtime.host.rank_process import RankProcess

__all__ = ["RankMeters"]

READINGS_EVERY_S = 1.0


class RankMeters:
    """Reads ranks once a second.

    Attributes:
        oom: What points to the out-of-memory killer, with readings of the same times.

    Args:
        ranks: By number of the process; owned by the caller.
    """

    def __init__(self, ranks: Mapping[int, RankProcess]) -> None:
        self._ranks = ranks
        self._read_at = 0.0
        self._gpus = GpuMeters()
        self.oom = OomWatch()
        self._reported_refusals = 0

    def is_due(self, now: float) -> bool:
        """Whether it is time for `read`."""
        return now >= self._read_at + READINGS_EVERY_S

    def read(self, now: float, refused_connections: int) -> Readings | None:
        """Read all ranks; return None if there is nothing to report.

        Args:
            now: The time.
            refused_connections: The number of connections that the host has refused.
        """
        elapsed_s = now - self._read_at
        self._read_at = now
        self.oom.read(now)
        readings = []
        for rank in self._ranks.values():
            if rank.pid:
                before, rank.cpu_s = rank.cpu_s, cpu_seconds(rank.pid)
                rank.rss_nbytes = rss_nbytes(rank.pid)
                percent = 100 * (rank.cpu_s - before) / elapsed_s if before else 0.0
                gpu = self._gpus.read(rank.spec.env)
                readings.append(Reading(rank.spec.proc, rank.rss_nbytes, max(0.0, percent), *gpu))
        if not readings and refused_connections == self._reported_refusals:
            return None
        self._reported_refusals = refused_connections
        return Readings(tuple(readings), refused_connections)
