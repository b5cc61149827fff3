"""Child processes that try what may hang or crash, so that only they do; they end in time, with all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Said", "ask", "ask_python", "package_root"]

_LAST_LINES = 3
_SITES = ("site-packages", "dist-packages")


class Said(NamedTuple):
    """What a child has said.

    Attributes:
        out: what it has written to standard output.
        trouble: why that is not all, or nothing, in words; empty if it has ended well.
    """

    out: str
    trouble: str


def ask(
    command: Sequence[str], timeout_s: float, *, env: Mapping[str, str] | None = None, cwd: str | None = None
) -> Said:
    """Run a command to its end, or until the time is over, when it is killed with its children.

    Args:
        command: the program and its arguments.
        timeout_s: how long it may take, in seconds.
        env: its whole environment; left out, that of this process.
        cwd: its working directory; left out, that of this process.
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
        return Said("", f"{command[0]} can't be run: {error.strerror}")
    with child:
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # it was not waited for, so this is its group
            out, _ = child.communicate()
            return Said(out, f"it did not end within {timeout_s:g} s, and was killed")
        except BaseException:
            with contextlib.suppress(ProcessLookupError):  # communicate() may have waited for its end, after Ctrl-C
                os.killpg(child.pid, signal.SIGKILL)
            raise
    if child.returncode == 0:
        return Said(out, "")
    return Said(out, _last(err) or _how_ended(child.returncode))


def ask_python(code: str, timeout_s: float, *arguments: str) -> Said:
    """Have another process of this interpreter run code that imports this very package, wherever that was found."""
    root, env = package_root(), dict(os.environ)
    if (
        os.path.basename(root) not in _SITES
    ):  # where all else is installed, too, which must not come before Python's own
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH", ""))))
    guard = "import sys; sys.path[:1] = [] if sys.path[:1] == [''] else sys.path[:1]\n"  # else a user's own torch.py
    return ask([sys.executable, "-c", guard + code, *arguments], timeout_s, env=env)


def package_root() -> str:
    """The folder in which the package lies that is running."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _last(err: str) -> str:
    """The last lines of what a program has written; of a traceback only what stands below its frames."""
    lines = err.strip().splitlines()[-_LAST_LINES:]
    below = max((i + 1 for i, line in enumerate(lines) if line.startswith("  ")), default=0)
    return "\n".join(lines[below:] or lines)


def _how_ended(code: int) -> str:
    if code > 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"
