"""Descriptions of how processes ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence

__all__ = ["describe_exit", "signal_name"]

_MEANINGS = {
    "SIGSEGV": "native code read or wrote memory that is not its own; the stack is in its last lines",
    "SIGABRT": "native code gave up; the reason is in its last lines",
    "SIGBUS": "a memory mapping lost its file, or shared memory is full",
    "SIGFPE": "an illegal arithmetic operation in native code",
    "SIGILL": "an instruction that this processor does not have",
    "SIGTERM": "something asked it to end: likely a scheduler that preempts the job or its machine",
}

_OF_GLOO = "native code gave up, in gloo because ranks sent different shapes or dtypes; the reason is in its last lines"

_NO_DESCRIPTORS = (
    "native code had no file descriptor left; in gloo, because something opened many connections to its port while a process "
    "group was formed, or because the limit is low (ulimit -n); the reason is in its last lines"
)


def describe_exit(
    exit_code: int,
    signum: int,
    rss_nbytes: int = 0,
    oom_kills: str = "",
    low_memory: str = "",
    last_lines: Sequence[str] = (),
) -> str:
    """Describe how a process ended: the signal with its likely meaning, or the exit code.

    Args:
        exit_code: of a process that ended by itself.
        signum: the signal that ended it; 0 if none did.
        rss_nbytes: its memory at the last reading; 0 if unknown.
        oom_kills: which counter of the out-of-memory killer rose; empty if none did.
        low_memory: how little memory was free at the last reading; empty if there was enough.
        last_lines: what it printed last.
    """
    memory = f"; it held {rss_nbytes / 2**20:,.0f} MiB at the last reading" if rss_nbytes else ""
    if signum:
        name = signal_name(signum)
        meaning = _likely_killer(oom_kills, low_memory) if name == "SIGKILL" else _MEANINGS.get(name)
        if name == "SIGABRT" and any("Too many open files" in line for line in last_lines):
            meaning = _NO_DESCRIPTORS
        elif name == "SIGABRT" and any("gloo" in line or "enforce fail" in line for line in last_lines):
            meaning = _OF_GLOO
        return f"killed by {name}" + (f" ({meaning})" if meaning else "") + memory
    return f"the process ended with exit code {exit_code}" + memory


def _likely_killer(oom_kills: str, low_memory: str) -> str:
    if oom_kills:
        return f"by the kernel's out-of-memory killer: {oom_kills}"
    if low_memory:
        return f"likely by the kernel's out-of-memory killer: {low_memory}"
    return "a kill -9 by a person, a program or the job's scheduler; nothing points to the out-of-memory killer"


def signal_name(signum: int) -> str:
    """Name a signal: ``SIGKILL``; empty for 0."""
    try:
        return signal.Signals(signum).name if signum else ""
    except ValueError:
        return f"signal {signum}"
