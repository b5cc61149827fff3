"""The Lightning.ai launcher: hosts are the machines of a job, with the environment of a Studio or an image.

Theory of operation
===================

Several hosts are one multi-machine job, all of whose machines get the same command and environment: each agent reads its number
from a variable that Lightning sets (`AgentConfig.number_from`). A single host, such as a replacement, is a job of one machine;
with ``separate`` all hosts are, which does not need the variable.

All requests go through `lightning_sdk`, which blocks, retries and sleeps, so they run on threads. ``monarch-lightning`` starts
jobs and polls their state, because Lightning sends no notifications; handles return the last known state.
``monarch-lightning-logs`` fetches logs. A separate thread ends each job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import agent_command
from monarch_kernel.launch.lightning.jobs import Jobs, MachineHost
from monarch_kernel.launch.lightning.sdk import (
    THREAD,
    TITLE,
    Hidden,
    check_credentials,
    explain,
    import_sdk,
    look,
    machine_of,
    read_log,
)
from monarch_kernel.launch.task_thread import DelayedTasks
from monarch_kernel.launch.text import most_common
from monarch_kernel.net.wire.config import AGENT_VARIABLE, AgentConfig

__all__ = ["LightningLauncher"]

_log = logging.getLogger(__name__)

_END_S = 30.0  # for stopping and deleting jobs
_LOG_S = 10.0  # for the log fetch in progress
_LOG_AFTER_S = (3.0, 15.0, 60.0)
_LEFT_TO_US = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NUM_NODES", "RANK", "LOCAL_RANK")
"""Variables that Lightning may set for torch, but that this package sets for ranks."""


class LightningLauncher:
    """Runs jobs whose machines are hosts.

    Args:
        machine: machine type of each host, such as ``H100_X_8``.
        studio: the Studio whose environment and files the machines get; by default the one that this process runs in.
        image: container image to use instead of a Studio.
        teamspace: ``owner/name``, or the name alone; by default the current one.
        org: organization that owns the teamspace.
        user: user that owns the teamspace.
        cloud: cloud provider or account; by default that of the Studio, or of the teamspace.
        interruptible: whether to use cheaper machines, which Lightning may take away.
        separate: whether each host is a separate job, instead of one job for all.
        rank_variable: environment variable with the number of a machine in a multi-machine job.
        python: interpreter of the machines; by default this one's path with a Studio, ``python3`` with an image.
        poll_s: interval between polls of the state of jobs, in seconds.

    Raises:
        LaunchError: the SDK is not installed, there are no credentials, there is no such machine, or both ``studio`` and
            ``image`` were given.
    """

    name = "lightning"

    def __init__(
        self,
        *,
        machine: str = "",
        studio: str = "",
        image: str = "",
        teamspace: str = "",
        org: str = "",
        user: str = "",
        cloud: str = "",
        interruptible: bool = False,
        separate: bool = False,
        rank_variable: str = "NODE_RANK",
        python: str = "",
        poll_s: float = 2.0,
    ) -> None:
        import_sdk()
        check_credentials()
        if studio and image:
            raise LaunchError(f"{TITLE}: give either a Studio (--studio) or an image (--image), not both")
        self._machine = machine_of(machine)
        self._teamspace, self._org, self._user = teamspace, org, user
        self._options: dict[str, Any] = {
            "studio": studio or None,
            "image": image or None,
            "cloud": cloud or None,
            "interruptible": interruptible,
        }
        self._separate = separate
        self._rank_variable = rank_variable
        self._python = python or ("python3" if image else sys.executable)
        self._poll_s = poll_s
        self._session = secrets.token_hex(4)
        self._jobs: list[Jobs] = []
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._tasks = DelayedTasks(THREAD)
        self._log_tasks = DelayedTasks(f"{THREAD}-logs")
        self._is_asking = False
        self._is_closed = False

    def launch(self, configs: Sequence[AgentConfig]) -> list[MachineHost]:
        """Start jobs with one machine for each config."""
        numbers = [config.host for config in configs]
        are_alike = numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        groups = [list(configs)] if are_alike and not self._separate else [[config] for config in configs]
        with self._lock:
            if self._is_closed:
                raise LaunchError(f"{TITLE}: this launcher is closed")
            jobs = [Jobs(self, f"monarch-{self._session}-{group[0].host}", group) for group in groups if group]
            self._jobs += jobs
        for job in jobs:
            self._tasks.at(0.0, partial(self._run, job))
        return [host for job in jobs for host in job.hosts]

    def progress(self) -> str:
        """Return what Lightning says about machines that are not up yet."""
        with self._lock:
            waits = [host.waits_for for job in self._jobs for host in job.hosts if not host.is_settled]
        words = most_common(waits)
        return f"{TITLE}: {words}" if words else ""

    def plan(self, hosts: int) -> str:
        """Return the ``Job.run()`` call that would start the hosts."""
        count = 1 if self._separate else hosts
        given = {key: value for key, value in self._options.items() if value}
        call = [f"name='monarch-{self._session}-1'", f"machine=Machine.{self._machine.name}", f"num_machines={count}"]
        call += [f"{key}={value!r}" for key, value in given.items()]
        call += [f"env={{{AGENT_VARIABLE!r}: <configuration of the agents, with the keys of the session>}}"]
        call += [f"command={self._command(count)!r}"]
        times = f"  # {hosts} times" if self._separate and hosts > 1 else ""
        return f"Job.run({times}\n" + "".join(f"    {argument},\n" for argument in call) + ")\n"

    def close(self, timeout_s: float) -> None:
        """Stop and delete all jobs."""
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            for host in job.hosts:
                host.is_closing = True
        self.end(jobs, timeout_s)
        with self._lock:
            self._is_closed = True
        self._tasks.close()
        self._log_tasks.close(_LOG_S)

    def close_host(self, host: MachineHost, timeout_s: float) -> None:
        """Give a machine back; end its job if that has no other machine in use."""
        with self._lock:
            host.is_closing = True
            job = host.job
            is_last = all(other.is_closing for other in job.hosts)
        if is_last:
            self.end([job], timeout_s, 0.0)

    def end(self, jobs: Sequence[Jobs], timeout_s: float, over_s: float = _END_S) -> None:
        """Stop and delete jobs after their agents have ended, or after a timeout.

        Args:
            jobs: the jobs to end.
            timeout_s: how long to wait for agents to end, in seconds.
            over_s: how long to wait until the jobs are deleted, in seconds; threads continue after that.
        """
        with self._lock:
            # A closed launcher no longer polls, so the agents' state would not change.
            self._changed.wait_for(
                lambda: self._is_closed or not any(h.runs for job in jobs for h in job.hosts), timeout_s
            )
            left = [job for job in jobs if not job.is_being_ended]
            for job in left:
                job.is_being_ended = True
        for job in left:  # in parallel: each waits until its machines have stopped
            threading.Thread(target=self._end, args=(job,), name=f"{THREAD}-end", daemon=True).start()
        with self._lock:
            self._changed.wait_for(lambda: all(job.is_over for job in jobs), over_s)

    # -- tasks of the thread monarch-lightning

    def _run(self, job: Jobs) -> None:
        from lightning_sdk import Job, Teamspace

        count, config = len(job.hosts), job.configs[0].encode().decode()
        if count > 1:
            config = json.dumps({**json.loads(config), "number_from": self._rank_variable})
        with job.lock:
            if job.is_being_ended:
                return
            try:
                by_slug = self._teamspace and not (self._org or self._user)
                job.job = Job.run(
                    name=job.name,
                    machine=self._machine,
                    command=self._command(count),
                    env=Hidden({AGENT_VARIABLE: config}),
                    num_machines=count,
                    teamspace=Teamspace(self._teamspace) if by_slug else self._teamspace or None,
                    org=self._org or None,
                    user=self._user or None,
                    **self._options,
                )
            except Exception as error:  # the SDK raises exceptions of any type, also plain Exception
                job.has_ended(f"{TITLE} did not run the job: {explain(error)}")
                return
        self._ask_again(0.0)

    def _command(self, count: int) -> str:
        run = f"exec {shlex.join(agent_command(self._python))}"
        own = f"unset {' '.join(_LEFT_TO_US)}"
        if count == 1:
            return f"{own}; {run}"
        variable = self._rank_variable
        problem = f"{variable}, which has the number of this machine, is not set: start the hosts with --separate"
        return f'if [ -z "${variable}" ]; then echo {shlex.quote(problem)}; exit 64; fi; {own}; {run}'

    def _ask_again(self, delay_s: float) -> None:
        if not self._is_asking:
            self._is_asking = True
            self._tasks.at(delay_s, self._ask)

    def _ask(self) -> None:
        """Poll the state of all jobs, and schedule the next poll as long as a host has not ended."""
        self._is_asking = False
        with self._lock:
            jobs = [job for job in self._jobs if job.job is not None and not job.is_being_ended]
        for job in jobs:
            try:
                job.see(*look(job.job))
            except Exception as error:  # Lightning or the network may be down: keep the last state
                if getattr(error, "status", None) == 404:
                    job.has_ended(f"the job {job.name} was deleted")
                else:
                    job.has_not_answered(explain(error))
        if any(not host.has_ended for job in jobs for host in job.hosts):
            self._ask_again(self._poll_s)

    def _end(self, job: Jobs) -> None:
        """Stop and delete a job; ignore failures, because it may have ended or been deleted already."""
        with job.lock:
            if job.job is not None:
                with contextlib.suppress(Exception):
                    job.job.stop()
                with contextlib.suppress(Exception):  # it is stopped, and no longer costs money
                    job.job.delete()
        with self._lock:
            job.is_over = True
            self._changed.notify_all()

    def fetch_log(self, host: MachineHost, then: Callable[[], None] | None = None) -> None:
        """Fetch the last lines of a machine's log, on the thread monarch-lightning-logs."""

        def fetch() -> None:
            machine = host.machine
            if machine is not None and not host.is_closing:
                try:
                    host.log = read_log(host.job.job, machine)
                except Exception:  # of any type; at first there is no log, and later the last one is kept
                    _log.info("can't fetch the log of a machine", exc_info=True)
            if then is not None:
                then()

        self._log_tasks.at(-1.0 if then is not None else 0.0, fetch)

    def fetch_log_later(self, host: MachineHost) -> None:
        """Schedule a few fetches of the log of a new machine."""
        for delay_s in _LOG_AFTER_S:
            self._log_tasks.at(delay_s, partial(self.fetch_log, host))

    def notify(self) -> None:
        """Wake up threads that wait for a change."""
        with self._lock:
            self._changed.notify_all()
