"""Wraps `lightning_sdk`: keeps its side effects away from the notebook, and adds functions that it lacks.

The side effects of the SDK, and how this module handles them:

- On import it asks a package index for its newest version, and warns. Its own variable switches that off.
- On import it also sets variables for progress bars (``TQDM_POSITION``), which ranks and other programs would inherit. This
  module restores them. The SDK reloads ``tqdm`` as well, which stays reloaded.
- Without credentials it opens a browser and waits for a login. This module checks for credentials first.
- It logs to stderr. This module drops its log messages from the launcher's threads.
- It sends the arguments of a failed call to Lightning, as a record for support. One argument is the environment with the keys,
  so that is a mapping whose representation hides the values.
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
"""Prefix of the names of the launcher's threads."""


class Hidden(dict[str, str]):
    """An environment whose representation hides the values, because the SDK records arguments of failed calls."""

    def __repr__(self) -> str:
        return f"<{', '.join(self)}>"


def look(job: Any) -> tuple[Any, Sequence[Any]]:
    """Get the state of a job and of its machines.

    ``Job.machines`` would create a client for each machine, and ``Job.status`` would send another request for each.
    """
    job._update_internal_job()
    report = job._guaranteed_job
    return report, job._job_api.list_mmt_subjobs(report.id, job.teamspace.id) if job.is_multi_machine else [report]


def read_log(job: Any, machine: Any) -> tuple[str, ...]:
    """Return the last lines of a machine's log."""
    from lightning_sdk import Job

    one = Job(machine.name, teamspace=job.teamspace) if job.is_multi_machine else job
    return tuple(str(one.logs(tail=20)).splitlines()[-20:])


def message_of(report: Any) -> str:
    """Return Lightning's message about a job or a machine."""
    texts = [getattr(report, "message", ""), getattr(report, "server_error", "")]
    texts.append(getattr(getattr(report, "status", None), "message", ""))
    if getattr(report, "interruption_notice_received", False):
        texts.append("Lightning took the machine away (interruptible)")
    return "; ".join(dict.fromkeys(text for text in texts if text))


def status_of(job: Any, state: str) -> str:
    """Convert a state to ``Pending``, ``Running``, ``Stopping``, ``Stopped``, ``Completed`` or ``Failed``."""
    api = job._mmt_job_api if state.startswith("MultiMachineJob") else job._standalone_job_api
    return str(api._job_state_to_external(state))


def machine_of(name: str) -> Any:
    """Return the machine type with a name.

    Raises:
        LaunchError: there is no such machine type.
    """
    from lightning_sdk import Machine

    known = {key: machine for key, machine in vars(Machine).items() if isinstance(machine, Machine)}
    found = known.get(name.upper()) or next((m for m in known.values() if name and m.slug == name.lower()), None)
    if found is not None:
        return found
    near = difflib.get_close_matches(name.upper(), known, 3)
    what = f"there is no machine {name!r}" if name else "no machine was given (--machine)"
    hint = f"; did you mean {' or '.join(near)}? There are:" if near else "; there are:"
    raise LaunchError(f"{TITLE}: {what}{hint} {', '.join(known)}")


def check_credentials() -> None:
    """Check that there are credentials, so that the SDK does not ask for a login.

    Raises:
        LaunchError: there are none, or they can't be read.
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
        f"{TITLE}: there are no credentials: set LIGHTNING_USER_ID and LIGHTNING_API_KEY (a Studio sets them), "
        "or run 'lightning login' in a terminal"
    )


def explain(error: BaseException) -> str:
    """Format an exception of the SDK in one line."""
    status, body = getattr(error, "status", None), getattr(error, "body", None)
    if status is None:
        return " ".join(str(error).split()) or type(error).__name__
    try:
        answer = json.loads(body or "")
        text = answer.get("message", "") if isinstance(answer, dict) else ""
    except (TypeError, ValueError):
        text = ""
    return f"{text or getattr(error, 'reason', '')} ({status})"


_quiet = threading.Lock()


def import_sdk() -> None:
    """Import the SDK without its side effects.

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
    """Return whether a log record comes from a thread other than the launcher's."""
    return not (record.threadName or "").startswith(THREAD)


@contextlib.contextmanager
def _put_back(*names: str) -> Iterator[None]:
    """Restore environment variables on exit."""
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
    """Give stderr a file descriptor: the SDK asks for it on import, to log there, but stderr of a notebook may have none."""
    try:
        sys.stderr.fileno()
    except (AttributeError, io.UnsupportedOperation, ValueError):
        with contextlib.redirect_stderr(_WithNumber(sys.stderr)):
            yield
    else:
        yield


class _WithNumber(io.TextIOBase):
    """A stream with the file descriptor of standard error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def fileno(self) -> int:
        return 2

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()
