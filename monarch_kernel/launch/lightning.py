"""Lightning.ai: hosts are the machines of a job, started from a Studio or from an image.

Theory of operation
===================

Several hosts are one multi-machine job, all of whose machines get the same command and environment: the agents learn from a
variable of Lightning's which of them they are (`AgentConfig.number_from`). One host, such as one that replaces another, is a
job of one machine; so are all with ``separate``, which needs no such variable.

Everything is asked for by `lightning_sdk`, which waits for answers, tries again by itself and sleeps. So that is done on
threads: ``monarch-lightning`` runs jobs and asks how they are, again and again, for Lightning tells nobody; what handles say is
what was answered last. ``monarch-lightning-logs`` fetches what machines wrote. A thread for each job ends it.

What the SDK does beside, and what we do about it:

- when it is imported it asks a package index for its newest version, and warns: switched off by its own variable;
- then it sets variables for progress bars (``TQDM_POSITION``), which ranks and other programs would inherit: put back. It also
  loads ``tqdm`` anew, which is left so;
- without credentials it opens a browser and waits for somebody to log in: we look for credentials first;
- it logs to stderr: what it says in our threads is dropped;
- of a call that fails it sends the arguments to Lightning, as a record for support. The environment, with the keys, is an
  argument: it is a mapping that does not show what is in it.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import logging
import os
import secrets
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TextIO

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import agent_command
from monarch_kernel.launch.chores import Chores
from monarch_kernel.wire.config import AGENT_VARIABLE, AgentConfig

__all__ = ["LightningLauncher", "MachineHost"]

_TITLE = "Lightning"
_THREAD = "monarch-lightning"
_END_S = 30.0  # for jobs to be stopped and deleted
_LOG_S = 10.0  # for a log that is being fetched
_LOG_AFTER_S = (3.0, 15.0, 60.0)
_ENDED = ("Stopped", "Completed", "Failed")
_WORDS = {"pending": "waiting for a machine", "creating": "a machine is being started"}
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
        _import_sdk()
        _check_credentials()
        if studio and image:
            raise LaunchError(f"{_TITLE}: machines get a Studio's environment or an image (--image), not both")
        self._machine = _machine(machine)
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
        self._jobs: list[_Jobs] = []
        self._changed = threading.Condition()
        self._chores = Chores(_THREAD)
        self._log_chores = Chores(f"{_THREAD}-logs")
        self._is_asking = False
        self._is_closed = False

    def launch(self, configs: Sequence[AgentConfig]) -> list[MachineHost]:
        """Run a job with a machine for each."""
        numbers = [config.host for config in configs]
        are_alike = numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        groups = [list(configs)] if are_alike and not self._separate else [[config] for config in configs]
        with self._changed:
            if self._is_closed:
                raise LaunchError(f"{_TITLE}: this launcher is closed")
            jobs = [_Jobs(self, f"monarch-{self._session}-{group[0].host}", group) for group in groups if group]
            self._jobs += jobs
        for job in jobs:
            self._chores.at(0.0, partial(self._run, job))
        return [host for job in jobs for host in job.hosts]

    def progress(self) -> str:
        """What Lightning says of machines that are not up yet."""
        with self._changed:
            waits = [host.waits_for for job in self._jobs for host in job.hosts if not host.is_settled]
        counts = Counter(waits)
        words = [text if len(counts) == 1 else f"{n} × {text}" for text, n in counts.most_common(2)]
        return f"{_TITLE}: {'; '.join(words)}" if words else ""

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

    def end(self, jobs: Sequence[_Jobs], timeout_s: float, over_s: float = _END_S) -> None:
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
            threading.Thread(target=self._end, args=(job,), name=f"{_THREAD}-end", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: all(job.is_over for job in jobs), over_s)

    # -- in the thread

    def _run(self, job: _Jobs) -> None:
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
                    env=_Hidden({AGENT_VARIABLE: config}),
                    num_machines=count,
                    teamspace=Teamspace(self._teamspace) if by_slug else self._teamspace or None,
                    org=self._org or None,
                    user=self._user or None,
                    **self._options,
                )
            except Exception as error:  # the SDK raises whatever comes, also plain Exceptions
                job.has_ended(f"{_TITLE} did not run the job: {_words(error)}")
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
                job.see(*_look(job.job))
            except Exception as error:  # Lightning may be down, or the way there: what we know stays
                if getattr(error, "status", None) == 404:
                    job.has_ended(f"the job {job.name} was deleted")
                else:
                    job.has_not_answered(_words(error))
        if any(not host.has_ended for job in jobs for host in job.hosts):
            self._ask_again(self._poll_s)

    def _end(self, job: _Jobs) -> None:
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
                with contextlib.suppress(Exception):  # there is none yet, or it can't be had: what we had is kept
                    host.log = _log(host.job.job, machine)
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


class _Jobs:
    """A job, and its hosts in the order of its machines."""

    def __init__(self, launcher: LightningLauncher, name: str, configs: Sequence[AgentConfig]) -> None:
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

    def __init__(self, job: _Jobs, rank: int) -> None:
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
        state, message = str(told.state), _message(told)
        status, said = _status(self.job.job, state), f": {message}" if message else ""
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


class _Hidden(dict[str, str]):
    """An environment that does not show what is in it: the SDK writes down arguments of calls that fail."""

    def __repr__(self) -> str:
        return f"<{', '.join(self)}>"


# -- what we need of the SDK and it does not offer: the state of machines without a request for each


def _look(job: Any) -> tuple[Any, Sequence[Any]]:
    """Ask how a job is: what is answered about it, and about the machines that it has.

    ``Job.machines`` would make a client of its own for each machine, and ``Job.status`` ask once more for each.
    """
    job._update_internal_job()
    told = job._guaranteed_job
    return told, job._job_api.list_mmt_subjobs(told.id, job.teamspace.id) if job.is_multi_machine else [told]


def _log(job: Any, machine: Any) -> tuple[str, ...]:
    """The last lines of a machine."""
    from lightning_sdk import Job

    one = Job(machine.name, teamspace=job.teamspace) if job.is_multi_machine else job
    return tuple(str(one.logs(tail=20)).splitlines()[-20:])


def _message(told: Any) -> str:
    """What Lightning says about a job, or a machine."""
    texts = [getattr(told, "message", ""), getattr(told, "server_error", "")]
    texts.append(getattr(getattr(told, "status", None), "message", ""))
    if getattr(told, "interruption_notice_received", False):
        texts.append("the machine was taken away (interruptible)")
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _status(job: Any, state: str) -> str:
    """What a state comes to: ``Pending``, ``Running``, ``Stopping``, ``Stopped``, ``Completed`` or ``Failed``."""
    api = job._mmt_job_api if state.startswith("MultiMachineJob") else job._standalone_job_api
    return str(api._job_state_to_external(state))


def _machine(name: str) -> Any:
    """The machine that is called so.

    Raises:
        LaunchError: there is none.
    """
    from lightning_sdk import Machine

    known = {key: machine for key, machine in vars(Machine).items() if isinstance(machine, Machine)}
    found = known.get(name.upper()) or next((m for m in known.values() if name and m.slug == name.lower()), None)
    if found is not None:
        return found
    near = difflib.get_close_matches(name.upper(), known, 3)
    what = f"there is no machine {name!r}" if name else "no machine was given (--machine)"
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise LaunchError(f"{_TITLE}: {what}{hint} There are: {', '.join(known)}")


def _check_credentials() -> None:
    """See that the SDK will not want to ask somebody to log in.

    Raises:
        LaunchError: it would.
    """
    from lightning_sdk.lightning_cloud.login import Auth

    auth = Auth()
    if auth.api_key or auth.auth_token:
        return
    try:
        if auth.load() and (auth.api_key or auth.auth_token):
            return
    except (OSError, ValueError) as error:
        raise LaunchError(f"{_TITLE}: the credentials in {auth.secrets_file} can't be read: {error}") from error
    raise LaunchError(
        f"{_TITLE}: nobody is logged in: set LIGHTNING_USER_ID and LIGHTNING_API_KEY (in a Studio they are set), "
        "or run 'lightning login' in a terminal"
    )


def _words(error: BaseException) -> str:
    """What the SDK has raised, in one line."""
    status, body = getattr(error, "status", None), getattr(error, "body", None)
    if status is None:
        return " ".join(str(error).split()) or type(error).__name__
    try:
        told = json.loads(body or "")
        text = told.get("message", "") if isinstance(told, dict) else ""
    except (TypeError, ValueError):
        text = ""
    return f"{text or getattr(error, 'reason', '')} ({status})"


_quiet = threading.Lock()


def _import_sdk() -> None:
    """Import the SDK without the noise that it makes.

    Raises:
        LaunchError: it is not installed.
    """
    with _quiet, _put_back("LIGHTNING_DISABLE_VERSION_CHECK", "TQDM_POSITION", "TQDM_MININTERVAL"), _real_stderr():
        os.environ["LIGHTNING_DISABLE_VERSION_CHECK"] = "1"
        try:
            import lightning_sdk  # noqa: F401
        except ImportError as error:
            raise LaunchError(
                f"{_TITLE}: {error.name} is not installed; install it with: pip install 'monarch_kernel[lightning]'"
            ) from error
        for name, logger in list(logging.root.manager.loggerDict.items()):
            if (
                name.startswith("lightning_sdk")
                and isinstance(logger, logging.Logger)
                and _is_theirs not in logger.filters
            ):
                logger.addFilter(_is_theirs)


def _is_theirs(record: logging.LogRecord) -> bool:
    """Whether somebody else than we has caused it."""
    return not (record.threadName or "").startswith(_THREAD)


@contextlib.contextmanager
def _put_back(*names: str) -> Iterator[None]:
    """Whatever happens to these variables, they are afterwards as they were."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _real_stderr() -> Iterator[None]:
    """The SDK asks stderr for its file descriptor, which that of a notebook need not have; and keeps it, to log there."""
    try:
        sys.stderr.fileno()
    except (AttributeError, io.UnsupportedOperation, ValueError):
        with contextlib.redirect_stderr(_WithNumber(sys.stderr)):
            yield
    else:
        yield


class _WithNumber(io.TextIOBase):
    """A stream that says it is the standard error of the process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def fileno(self) -> int:
        return 2

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()
