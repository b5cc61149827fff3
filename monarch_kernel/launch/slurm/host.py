"""The state of Slurm jobs and of their nodes, each of which runs a host agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch_kernel.launch.slurm.commands import tail

__all__ = ["FIRST_ASK_S", "SlurmHost", "SlurmJob"]

FIRST_ASK_S = 0.5
"""Delay before the next poll of Slurm after a change, in seconds."""


@dataclass(eq=False)
class SlurmJob:
    """A Slurm job, with its last known state.

    Attributes:
        first: number of its first host.
        settings: the common settings of its agents.
        directory: directory for the files of its tasks.
        give_back: gives back one of its hosts, with a timeout in seconds.
        hosts: its hosts, in the order of its tasks.
        id: Slurm's id of the job; empty until it is submitted.
        state: Slurm's name of its state.
        reason: why it is pending.
        start: when Slurm expects it to start.
        nodes: its nodes, in Slurm's notation.
        over: how it ended; empty while it has not.
        is_abandoned: whether it was closed before its id was known: the launcher cancels it as soon as it has the id.
        ask_s: interval until the next poll of Slurm, in seconds.
        ask_at: time of the next poll.
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
    """A node of a job."""

    address = ""  # the agent dials

    def __init__(self, job: SlurmJob, index: int) -> None:
        self.job = job
        self.node = ""
        self.pid = 0
        self.node_is_sure = False
        self.is_closed = False
        self.is_leaving = False
        self.is_released = False
        self.is_lost = False
        self.pending_end = ""
        self._index = index
        self._ended: str | None = None

    def poll(self) -> str | None:
        """Return None while the host runs or may still come up, else why it ended."""
        return self._ended

    def log_tail(self) -> tuple[str, ...]:
        """Return the last lines of the agent's log, or of the job's log if the agent has none."""
        if not self.job.id:
            return ()
        return tail(self.file("log")) or tail(self.job.directory / f"{self.job.id}.log")

    def close(self, timeout_s: float) -> None:
        """Give the node back."""
        self.job.give_back(self, timeout_s)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, for a known reason."""
        return self._ended is not None

    def end(self, text: str) -> None:
        """Mark the host as ended; the first reason stays."""
        if self._ended is None:
            self._ended = text

    def file(self, kind: str) -> Path:
        """Return the path of a file that its task writes."""
        return self.job.directory / f"{self.job.id}-{self._index}.{kind}"
