"""A job of Lightning's and its machines, each a host: what is known of them."""

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
_WORDS = {"pending": "waiting for a machine", "creating": "a machine is being started"}


class Owner(Protocol):
    """What jobs need of their launcher."""

    def close_host(self, host: MachineHost, timeout_s: float) -> None:
        """Give a machine back."""
        ...

    def fetch_log(self, host: MachineHost, then: Callable[[], None] | None = None) -> None:
        """Fetch the last lines of a machine."""
        ...

    def fetch_log_later(self, host: MachineHost) -> None:
        """Fetch the last lines of a machine now and then, while it is new."""
        ...

    def notify(self) -> None:
        """Something has changed."""
        ...


class Jobs:
    """A job, and its hosts in the order of its machines."""

    def __init__(self, launcher: Owner, name: str, configs: Sequence[AgentConfig]) -> None:
        self.launcher = launcher
        self.name = name
        self.configs = configs
        self.hosts = [MachineHost(self, rank) for rank in range(len(configs))]
        self.job: Any = None
        self.lock = threading.Lock()  # while it is run, or ended
        self.is_being_ended = False
        self.is_over = False

    def has_ended(self, how: str) -> None:
        """It could not be run, or is gone."""
        for host in self.hosts:
            host.end = host.end or how
            host.has_ended = True
        self.launcher.notify()

    def see(self, told: Any, machines: Sequence[Any]) -> None:
        """This is how it is, and these are its machines; those that are still to come may be missing."""
        for machine in machines:
            rank = machine.spec.rank if len(self.hosts) > 1 else 0
            if rank is not None and 0 <= rank < len(self.hosts):
                self.hosts[rank].see(machine, f"the machine {machine.name}")
        for host in self.hosts:
            if host.machine is None:  # not made yet, or never
                host.see(told, f"the job {self.name}")
        self.launcher.notify()

    def has_not_answered(self, why: str) -> None:
        """It could not be asked for."""
        for host in self.hosts:
            if not host.is_settled:
                host.waits_for = f"it does not answer: {why}"


class MachineHost:
    """A machine of a job that is a host, or will be."""

    address = ""  # it dials
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
        """None while the machine runs or may still come; else how it ended."""
        return self.end

    def log_tail(self) -> tuple[str, ...]:
        """The last lines of the agent as they were when they were fetched last; has them fetched again."""
        now = time.monotonic()
        if self.runs and now - self._asked_log_at > 10.0:
            self._asked_log_at = now
            self.job.launcher.fetch_log(self)
        return self.log

    def close(self, timeout_s: float) -> None:
        """Give the machine back; in a job of several it goes when its agent has ended, at the latest with the last of them."""
        self.job.launcher.close_host(self, timeout_s)

    @property
    def runs(self) -> bool:
        """Whether its agent runs, as far as we know."""
        return self.is_up and not self.has_ended

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to wait for any more."""
        return self.is_up or self.has_ended or self.is_closing

    def see(self, told: Any, who: str) -> None:
        """This is how its machine is now, or its whole job, as long as it has none."""
        if self.has_ended:
            return
        is_machine = told.id != self.job.job.id or len(self.job.hosts) == 1
        if is_machine:
            self.machine = told
        state, message = str(told.state), message_of(told)
        status, said = status_of(self.job.job, state), f": {message}" if message else ""
        if status in _ENDED:
            self.has_ended = True
            how = f"{who} {'was stopped' if status == 'Stopped' else f'has {status.lower()}'}{said}"
            self.job.launcher.fetch_log(self, partial(self._tell_end, how))
        elif status == "Running" and is_machine and not self.is_up:
            self.is_up = True
            self.job.launcher.fetch_log_later(self)
        elif not self.is_up:
            self.waits_for = _WORDS.get(state.rpartition("_")[2].lower(), state.lower() or "waiting") + said

    def _tell_end(self, how: str) -> None:
        self.end = self.end or how
        self.job.launcher.notify()
