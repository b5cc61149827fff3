"""Runs checks that may hang or crash in child processes. A child that exceeds its time limit is killed with its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["ChildOutput", "ask", "ask_python", "package_root"]

_LAST_LINES = 3
_SITES = ("site-packages", "dist-packages")


class ChildOutput(NamedTuple):
    """The output of a child process.

    Attributes:
        out: what the child wrote to standard output.
        trouble: why the output is missing or incomplete, as text; empty if the child succeeded.
    """

    out: str
    trouble: str


def ask(
    command: Sequence[str], timeout_s: float, *, env: Mapping[str, str] | None = None, cwd: str | None = None
) -> ChildOutput:
    """Run a command and return its output; kill it and its children after the timeout.

    Args:
        command: the program and its arguments.
        timeout_s: how long it may take, in seconds.
        env: its whole environment; by default that of this process.
        cwd: its working directory; by default that of this process.
    """
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            env=env,
            cwd=cwd,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return ChildOutput("", f"{command[0]} can't be run: {error.strerror}")
    with child:
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # not reaped yet, so the id is still its group
            out, _ = child.communicate()
            return ChildOutput(out, f"timed out after {timeout_s:g} s and was killed")
        except BaseException:
            with contextlib.suppress(ProcessLookupError):  # communicate() may have reaped it, after Ctrl-C
                os.killpg(child.pid, signal.SIGKILL)
            raise
    if child.returncode == 0:
        return ChildOutput(out, "")
    return ChildOutput(out, _last(err) or _how_ended(child.returncode))


def ask_python(code: str, timeout_s: float, *arguments: str) -> ChildOutput:
    """Run code in a child of this interpreter that imports this same copy of the package."""
    root, env = package_root(), dict(os.environ)
    if os.path.basename(root) not in _SITES:  # site-packages on PYTHONPATH would come before the standard library
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH", ""))))
    guard = "import sys; sys.path[:1] = [] if sys.path[:1] == [''] else sys.path[:1]\n"  # skips a torch.py of the user
    return ask([sys.executable, "-c", guard + code, *arguments], timeout_s, env=env)


def package_root() -> str:
    """Return the folder that contains the running package."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _last(err: str) -> str:
    """Return the last lines of a program's error output; of a traceback only the lines after its frames."""
    lines = err.strip().splitlines()[-_LAST_LINES:]
    below = max((i + 1 for i, line in enumerate(lines) if line.startswith("  ")), default=0)
    return "\n".join(lines[below:] or lines)


def _how_ended(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
