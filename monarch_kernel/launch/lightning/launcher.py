"""Lightning.ai: hosts are the machines of a job, started from a Studio or from an image.

Theory of operation
===================

Several hosts are one multi-machine job, all of whose machines get the same command and environment: the agents learn from a
variable of Lightning's which of them they are (`AgentConfig.number_from`). One host, such as one that replaces another, is a
job of one machine; so are all with ``separate``, which needs no such variable.

Everything is asked for by `lightning_sdk`, which waits for answers, tries again by itself and sleeps. So that is done on
threads: ``monarch-lightning`` runs jobs and asks how they are, again and again, for Lightning tells nobody; what handles say is
what was answered last. ``monarch-lightning-logs`` fetches what machines wrote. A thread for each job ends it.
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
from monarch_kernel.launch.task_thread import Chores
from monarch_kernel.launch.text import most_common
from monarch_kernel.net.wire.config import AGENT_VARIABLE, AgentConfig

__all__ = ["LightningLauncher"]

_log = logging.getLogger(__name__)

_END_S = 30.0  # for jobs to be stopped and deleted
_LOG_S = 10.0  # for a log that is being fetched
_LOG_AFTER_S = (3.0, 15.0, 60.0)
_LEFT_TO_US = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NUM_NODES", "RANK", "LOCAL_RANK")
"""Variables that Lightning may set for torch, which ranks get from us."""


class LightningLauncher:
    """Runs jobs.

    Args:
        machine: of each host, such as ``H100_X_8``.
        studio: whose environment and files the machines get; left out, the one that this runs in.
        image: that they are made of instead.
        teamspace: ``owner/name``, or the name alone; left out, the current one.
        org: that owns the teamspace.
        user: who owns the teamspace.
        cloud: provider or account; left out, that of the Studio, or the teamspace's default.
        interruptible: whether machines may be taken away, for less money.
        separate: whether each host is a job of its own, instead of all being one.
        rank_variable: where a machine of several finds its number.
        python: interpreter of the machines; left out, this one's path with a Studio, ``python3`` with an image.
        poll_s: how often Lightning is asked how jobs are, in seconds.

    Raises:
        LaunchError: the SDK is not installed, nobody is logged in, or there is no such machine.
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
            raise LaunchError(f"{TITLE}: machines get a Studio's environment or an image (--image), not both")
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
        self._changed = threading.Condition()
        self._chores = Chores(THREAD)
        self._log_chores = Chores(f"{THREAD}-logs")
        self._is_asking = False
        self._is_closed = False

    def launch(self, configs: Sequence[AgentConfig]) -> list[MachineHost]:
        """Run a job with a machine for each."""
        numbers = [config.host for config in configs]
        are_alike = numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        groups = [list(configs)] if are_alike and not self._separate else [[config] for config in configs]
        with self._changed:
            if self._is_closed:
                raise LaunchError(f"{TITLE}: this launcher is closed")
            jobs = [Jobs(self, f"monarch-{self._session}-{group[0].host}", group) for group in groups if group]
            self._jobs += jobs
        for job in jobs:
            self._chores.at(0.0, partial(self._run, job))
        return [host for job in jobs for host in job.hosts]

    def progress(self) -> str:
        """What Lightning says of machines that are not up yet."""
        with self._changed:
            waits = [host.waits_for for job in self._jobs for host in job.hosts if not host.is_settled]
        words = most_common(waits)
        return f"{TITLE}: {words}" if words else ""

    def plan(self, hosts: int) -> str:
        """What would be run."""
        count = 1 if self._separate else hosts
        given = {key: value for key, value in self._options.items() if value}
        call = [f"name='monarch-{self._session}-1'", f"machine=Machine.{self._machine.name}", f"num_machines={count}"]
        call += [f"{key}={value!r}" for key, value in given.items()]
        call += [f"env={{{AGENT_VARIABLE!r}: <what the agents must know, with the keys of the session>}}"]
        call += [f"command={self._command(count)!r}"]
        times = f"  # {hosts} times" if self._separate and hosts > 1 else ""
        return f"Job.run({times}\n" + "".join(f"    {argument},\n" for argument in call) + ")\n"

    def close(self, timeout_s: float) -> None:
        """Stop and delete all jobs."""
        with self._changed:
            jobs = list(self._jobs)
        for job in jobs:
            for host in job.hosts:
                host.is_closing = True
        self.end(jobs, timeout_s)
        with self._changed:
            self._is_closed = True
        self._chores.close()
        self._log_chores.close(_LOG_S)

    def close_host(self, host: MachineHost, timeout_s: float) -> None:
        """Give a machine back: with its job, when that has no other."""
        with self._changed:
            host.is_closing = True
            job = host.job
            is_last = all(other.is_closing for other in job.hosts)
        if is_last:
            self.end([job], timeout_s, 0.0)

    def end(self, jobs: Sequence[Jobs], timeout_s: float, over_s: float = _END_S) -> None:
        """Stop and delete jobs, when their agents have ended by themselves, or the time for it is up.

        Args:
            jobs: which.
            timeout_s: for agents to end, in seconds.
            over_s: how long to wait until it is done, in seconds; it goes on after that.
        """
        with self._changed:
            # Once closed nobody hears any more how they are.
            self._changed.wait_for(
                lambda: self._is_closed or not any(h.runs for job in jobs for h in job.hosts), timeout_s
            )
            left = [job for job in jobs if not job.is_being_ended]
            for job in left:
                job.is_being_ended = True
        for job in left:  # at the same time: each waits until its machine has stopped
            threading.Thread(target=self._end, args=(job,), name=f"{THREAD}-end", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: all(job.is_over for job in jobs), over_s)

    # -- in the thread

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
            except Exception as error:  # the SDK raises whatever comes, also plain Exceptions
                job.has_ended(f"{TITLE} did not run the job: {explain(error)}")
                return
        self._ask_again(0.0)

    def _command(self, count: int) -> str:
        run = f"exec {shlex.join(agent_command(self._python))}"
        own = f"unset {' '.join(_LEFT_TO_US)}"
        if count == 1:
            return f"{own}; {run}"
        variable = self._rank_variable
        problem = f"{variable} does not say which machine this is: bring the hosts up as separate jobs"
        return f'if [ -z "${variable}" ]; then echo {shlex.quote(problem)}; exit 64; fi; {own}; {run}'

    def _ask_again(self, delay_s: float) -> None:
        if not self._is_asking:
            self._is_asking = True
            self._chores.at(delay_s, self._ask)

    def _ask(self) -> None:
        """Ask how the jobs are, and again later, as long as there are any."""
        self._is_asking = False
        with self._changed:
            jobs = [job for job in self._jobs if job.job is not None and not job.is_being_ended]
        for job in jobs:
            try:
                job.see(*look(job.job))
            except Exception as error:  # Lightning may be down, or the way there: what we know stays
                if getattr(error, "status", None) == 404:
                    job.has_ended(f"the job {job.name} was deleted")
                else:
                    job.has_not_answered(explain(error))
        if any(not host.has_ended for job in jobs for host in job.hosts):
            self._ask_again(self._poll_s)

    def _end(self, job: Jobs) -> None:
        """Stop a job and delete it; if that was done by somebody else, or it has ended, it is fine."""
        with job.lock:
            if job.job is not None:
                with contextlib.suppress(Exception):
                    job.job.stop()
                with contextlib.suppress(Exception):  # it is stopped, and costs nothing any more
                    job.job.delete()
        with self._changed:
            job.is_over = True
            self._changed.notify_all()

    def fetch_log(self, host: MachineHost, then: Callable[[], None] | None = None) -> None:
        """Fetch the last lines of a machine, on the other thread."""

        def fetch() -> None:
            machine = host.machine
            if machine is not None and not host.is_closing:
                try:
                    host.log = read_log(host.job.job, machine)
                except (
                    Exception
                ):  # the SDK raises whatever comes; at first there is no log, and later the last one stays
                    _log.info("the log of a machine can't be fetched", exc_info=True)
            if then is not None:
                then()

        self._log_chores.at(-1.0 if then is not None else 0.0, fetch)

    def fetch_log_later(self, host: MachineHost) -> None:
        """Fetch the last lines of a machine now and then, while it is new."""
        for delay_s in _LOG_AFTER_S:
            self._log_chores.at(delay_s, partial(self.fetch_log, host))

    def notify(self) -> None:
        """Something has changed."""
        with self._changed:
            self._changed.notify_all()
