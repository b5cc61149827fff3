"""The state of Lightning jobs and of their machines; each machine is a host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from monarch_kernel.launch.lightning.sdk import message_of, status_of
from monarch_kernel.net.wire.config import AgentConfig

__all__ = ["Jobs", "MachineHost"]

_ENDED = ("Stopped", "Completed", "Failed")
_WORDS = {"pending": "waiting for a machine", "creating": "starting a machine"}


class JobOwner(Protocol):
    """What jobs need of their launcher."""

    def close_host(self, host: MachineHost, timeout_s: float) -> None:
        """Give a machine back."""
        ...

    def fetch_log(self, host: MachineHost, then: Callable[[], None] | None = None) -> None:
        """Fetch the last lines of a machine's log."""
        ...

    def fetch_log_later(self, host: MachineHost) -> None:
        """Schedule a few fetches of the log of a new machine."""
        ...

    def notify(self) -> None:
        """Wake up threads that wait for a change."""
        ...


class Jobs:
    """A job, and its hosts in the order of its machines."""

    def __init__(self, launcher: JobOwner, name: str, configs: Sequence[AgentConfig]) -> None:
        self.launcher = launcher
        self.name = name
        self.configs = configs
        self.hosts = [MachineHost(self, rank) for rank in range(len(configs))]
        self.job: Any = None
        self.lock = threading.Lock()  # held while the job is started or ended
        self.is_being_ended = False
        self.is_over = False

    def has_ended(self, how: str) -> None:
        """End all hosts: the job could not be started, or is gone."""
        for host in self.hosts:
            host.end = host.end or how
            host.has_ended = True
        self.launcher.notify()

    def see(self, report: Any, machines: Sequence[Any]) -> None:
        """Update the hosts from the job and its machines; machines that do not exist yet may be missing."""
        for machine in machines:
            rank = machine.spec.rank if len(self.hosts) > 1 else 0
            if rank is not None and 0 <= rank < len(self.hosts):
                self.hosts[rank].see(machine, f"the machine {machine.name}")
        for host in self.hosts:
            if host.machine is None:  # it does not exist yet, or never will
                host.see(report, f"the job {self.name}")
        self.launcher.notify()

    def has_not_answered(self, why: str) -> None:
        """Note that Lightning did not return the state of the job."""
        for host in self.hosts:
            if not host.is_settled:
                host.waits_for = f"Lightning does not answer: {why}"


class MachineHost:
    """A machine of a job that is, or will be, a host."""

    address = ""  # the agent dials
    node = ""

    def __init__(self, job: Jobs, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.machine: Any = None
        self.waits_for = "asking for machines"
        self.end: str | None = None
        self.log: tuple[str, ...] = ()
        self.is_up = False
        self.is_closing = False
        self.has_ended = False
        self._asked_log_at = 0.0

    def poll(self) -> str | None:
        """Return None while the machine runs or may still come up, else how it ended."""
        return self.end

    def log_tail(self) -> tuple[str, ...]:
        """Return the last lines of the agent that were fetched, and schedule another fetch."""
        now = time.monotonic()
        if self.runs and now - self._asked_log_at > 10.0:
            self._asked_log_at = now
            self.job.launcher.fetch_log(self)
        return self.log

    def close(self, timeout_s: float) -> None:
        """Give the machine back. In a multi-machine job it ends with its agent, or at the latest with the last machine."""
        self.job.launcher.close_host(self, timeout_s)

    @property
    def runs(self) -> bool:
        """Whether, as far as is known, its agent runs."""
        return self.is_up and not self.has_ended

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.is_up or self.has_ended or self.is_closing

    def see(self, report: Any, subject: str) -> None:
        """Update the host from the state of its machine, or of the whole job as long as it has no machine."""
        if self.has_ended:
            return
        is_machine = report.id != self.job.job.id or len(self.job.hosts) == 1
        if is_machine:
            self.machine = report
        state, message = str(report.state), message_of(report)
        status, said = status_of(self.job.job, state), f": {message}" if message else ""
        if status in _ENDED:
            self.has_ended = True
            how = f"{subject} {'was stopped' if status == 'Stopped' else f'has {status.lower()}'}{said}"
            self.job.launcher.fetch_log(self, partial(self._tell_end, how))
        elif status == "Running" and is_machine and not self.is_up:
            self.is_up = True
            self.job.launcher.fetch_log_later(self)
        elif not self.is_up:
            self.waits_for = _WORDS.get(state.rpartition("_")[2].lower(), state.lower() or "waiting") + said

    def _tell_end(self, how: str) -> None:
        self.end = self.end or how
        self.job.launcher.notify()
