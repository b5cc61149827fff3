"""Descriptions of how processes ended."""

from __future__ import annotations

import signal

__all__ = ["describe_exit", "signal_name"]

_MEANINGS = {
    "SIGKILL": "likely the kernel's out-of-memory killer, or somebody's kill -9",
    "SIGSEGV": "native code read or wrote memory that is not its own; the stack is in its last lines",
    "SIGABRT": "native code gave up (in gloo: ranks sent different shapes or dtypes); the reason is in its last lines",
    "SIGBUS": "a memory mapping lost its file, or shared memory is full",
    "SIGFPE": "an illegal arithmetic operation in native code",
    "SIGILL": "an instruction that this processor does not have",
    "SIGTERM": "something asked it to end",
}


def describe_exit(exit_code: int, signum: int, rss_nbytes: int = 0) -> str:
    """Describe how a process ended: the signal with its likely meaning, or the exit code."""
    memory = f"; it held {rss_nbytes / 2**20:,.0f} MiB at the last reading" if rss_nbytes else ""
    if signum:
        name = signal_name(signum)
        meaning = _MEANINGS.get(name)
        return f"killed by {name}" + (f" ({meaning})" if meaning else "") + memory
    return f"the process ended with exit code {exit_code}" + memory


def signal_name(signum: int) -> str:
    """Name a signal: ``SIGKILL``; empty for 0."""
    try:
        return signal.Signals(signum).name if signum else ""
    except ValueError:
        return f"signal {signum}"
