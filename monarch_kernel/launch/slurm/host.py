"""A job of Slurm's and its nodes, a host agent on each: what is known of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch_kernel.launch.slurm.commands import tail

__all__ = ["FIRST_ASK_S", "Job", "SlurmHost"]

FIRST_ASK_S = 0.5
"""After how long Slurm is asked again, when something has changed."""


@dataclass(eq=False)
class Job:
    """One job of Slurm's, as far as is known.

    Attributes:
        first: number of its first host.
        settings: what its agents have in common.
        directory: where its tasks write.
        give_back: has the launcher give a host of it back, within so many seconds.
        hosts: in the order of its tasks.
        id: Slurm's.
        state: in Slurm's word.
        reason: why it is pending.
        start: when Slurm expects it to begin.
        nodes: as Slurm writes them.
        over: how it ended; empty as long as it has not.
        is_abandoned: whether nobody waits for its number any more: it is to end as soon as that is known.
        ask_s: after how long Slurm is asked again.
        ask_at: when.
    """

    first: int
    settings: dict[str, Any]
    directory: Path
    give_back: Callable[[SlurmHost, float], None]
    hosts: list[SlurmHost] = field(default_factory=list)
    id: str = ""
    state: str = ""
    reason: str = ""
    start: str = ""
    nodes: str = ""
    over: str = ""
    is_abandoned: bool = False
    ask_s: float = FIRST_ASK_S
    ask_at: float = 0.0

    @property
    def is_up(self) -> bool:
        return self.state == "RUNNING" or any(host.node_is_sure for host in self.hosts)

    @property
    def is_waiting(self) -> bool:
        return not self.over and not self.is_up


class SlurmHost:
    """One node of a job."""

    address = ""  # it dials

    def __init__(self, job: Job, index: int) -> None:
        self.job = job
        self.node = ""
        self.pid = 0
        self.node_is_sure = False
        self.is_closed = False
        self.is_leaving = False
        self.is_released = False
        self.is_lost = False
        self.omen = ""
        self._index = index
        self._ended: str | None = None

    def poll(self) -> str | None:
        """None while it runs, or may still come; else why not."""
        return self._ended

    def log_tail(self) -> tuple[str, ...]:
        """The last lines of the agent's log, or of the job's, if it has none."""
        if not self.job.id:
            return ()
        return tail(self.file("log")) or tail(self.job.directory / f"{self.job.id}.log")

    def close(self, timeout_s: float) -> None:
        """Give the node back."""
        self.job.give_back(self, timeout_s)

    @property
    def has_ended(self) -> bool:
        """Whether it is known how it ended."""
        return self._ended is not None

    def end(self, text: str) -> None:
        """It has ended, as the first to say so says."""
        if self._ended is None:
            self._ended = text

    def file(self, kind: str) -> Path:
        """What its task writes."""
        return self.job.directory / f"{self.job.id}-{self._index}.{kind}"
