"""`lightning_sdk`, with what it does beside kept away from the notebook; and what it does not offer.

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
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from monarch_kernel.errors import LaunchError

__all__ = [
    "THREAD",
    "TITLE",
    "Hidden",
    "check_credentials",
    "explain",
    "import_sdk",
    "look",
    "machine_of",
    "message_of",
    "read_log",
    "status_of",
]

TITLE = "Lightning"
THREAD = "monarch-lightning"
"""What the names of our threads begin with."""


class Hidden(dict[str, str]):
    """An environment that does not show what is in it: the SDK writes down arguments of calls that fail."""

    def __repr__(self) -> str:
        return f"<{', '.join(self)}>"


def look(job: Any) -> tuple[Any, Sequence[Any]]:
    """Ask how a job is: what is answered about it, and about the machines that it has.

    ``Job.machines`` would make a client of its own for each machine, and ``Job.status`` ask once more for each.
    """
    job._update_internal_job()
    told = job._guaranteed_job
    return told, job._job_api.list_mmt_subjobs(told.id, job.teamspace.id) if job.is_multi_machine else [told]


def read_log(job: Any, machine: Any) -> tuple[str, ...]:
    """The last lines of a machine."""
    from lightning_sdk import Job

    one = Job(machine.name, teamspace=job.teamspace) if job.is_multi_machine else job
    return tuple(str(one.logs(tail=20)).splitlines()[-20:])


def message_of(told: Any) -> str:
    """What Lightning says about a job, or a machine."""
    texts = [getattr(told, "message", ""), getattr(told, "server_error", "")]
    texts.append(getattr(getattr(told, "status", None), "message", ""))
    if getattr(told, "interruption_notice_received", False):
        texts.append("the machine was taken away (interruptible)")
    return "; ".join(dict.fromkeys(text for text in texts if text))


def status_of(job: Any, state: str) -> str:
    """What a state comes to: ``Pending``, ``Running``, ``Stopping``, ``Stopped``, ``Completed`` or ``Failed``."""
    api = job._mmt_job_api if state.startswith("MultiMachineJob") else job._standalone_job_api
    return str(api._job_state_to_external(state))


def machine_of(name: str) -> Any:
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
    raise LaunchError(f"{TITLE}: {what}{hint} There are: {', '.join(known)}")


def check_credentials() -> None:
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
        raise LaunchError(f"{TITLE}: the credentials in {auth.secrets_file} can't be read: {error}") from error
    raise LaunchError(
        f"{TITLE}: nobody is logged in: set LIGHTNING_USER_ID and LIGHTNING_API_KEY (in a Studio they are set), "
        "or run 'lightning login' in a terminal"
    )


def explain(error: BaseException) -> str:
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


def import_sdk() -> None:
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
                f"{TITLE}: {error.name} is not installed; install it with: pip install 'monarch_kernel[lightning]'"
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
    return not (record.threadName or "").startswith(THREAD)


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
