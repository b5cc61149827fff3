"""Reads the stacks of a rank that can't say what it does, because native code holds the GIL, and of processes that it forks.

Theory of operation
===================

No thread of such a rank runs Python code. But faulthandler can write the stacks of all threads from the handler of a signal,
without the GIL. A rank prepares this when it starts; nothing happens until its agent sends the signal. The stacks go to a file
beside the log of the rank, since a pipe might be full. The main thread comes last, so the agent waits until the handler has
returned: while it runs, Linux blocks the signal in its thread. The agent waits only for some milliseconds, as the process may
be stopped, and longer for one that could run and gets no processor. A signal that still waits for that is not sent again.

A process that a signal or a debugger has stopped runs nothing, so it gets no signal: ``/proc`` says that it is stopped. One
that writes no stacks may be in a wait of the kernel that nothing ends, as for a network file system; ``/proc`` says that, too.

The signal is a real-time signal that programs hardly use. System calls that it interrupts are restarted, as far as Linux does.
A process that has no handler yet would end by it, and gets none.

Processes that a rank forks, such as the workers of a DataLoader, inherit the handler and the file. The rank reads their stacks
in the same way.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from monarch_kernel.net.wire.messages import ReadLog
from monarch_kernel.runtime.host.logs import log_bytes, stack_path

__all__ = ["SIGNAL", "answer_for", "listen", "stacks_of_child"]

_log = logging.getLogger(__name__)

SIGNAL = signal.SIGRTMIN + 13
_STOPPED = "Tt"
_WAITS = "D"
_RUNS = "R"
_PATIENCE_S = 0.05
_PATIENCE_WITH_RUNNING_S = 0.3
_PAUSE_S = 0.002
_MAX_NBYTES = 1 << 16
_own: list[tuple[str, int]] = []  # the directory and number of this rank


class Forked(Protocol):
    """The part of a rank's process that this module uses."""

    pid: int


def listen(directory: str, proc: int) -> None:
    """Write the stacks of this process to its file whenever the signal arrives."""
    flags = os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
    try:
        file = os.open(stack_path(directory, proc), flags, 0o600)
    except OSError as error:  # the rank works without it
        _log.warning("the stacks of this process can't be written while native code holds the GIL: %s", error)
        return
    faulthandler.register(SIGNAL, file, all_threads=True, chain=False)
    _own[:] = [(directory, proc)]


def answer_for(message: ReadLog, directory: str, ranks: Mapping[int, Forked]) -> bytes:
    """Return what a `ReadLog` asks for: the log of a rank, or its stacks as faulthandler writes them, which may be empty.

    In place of stacks, a process that can't run has its state: ``state: T 1234 0``, which is the letter of Linux, its id, and
    that of the process that traces it.
    """
    if not message.stack:
        return log_bytes(directory, message.proc, message.max_nbytes)
    rank = ranks.get(message.proc)
    if rank is None or not rank.pid:
        return b""
    if stopped := _state(rank.pid, _STOPPED):
        return stopped
    if message.only_state:
        return b""
    return _stacks(directory, message.proc, rank.pid) or _state(rank.pid, _WAITS)


def stacks_of_child(pid: int) -> str:
    """Return the stacks of a process that this rank has forked, as faulthandler writes them; empty if they are not known."""
    return _stacks(*_own[0], pid).decode(errors="replace") if _own else ""


def _stacks(directory: str, proc: int, pid: int) -> bytes:
    path, begin = stack_path(directory, proc), time.monotonic()
    data = b""
    try:
        status = _status(pid)
        if not _has_signal(status, "SigCgt"):
            return b""
        while _is_writing(pid) and time.monotonic() < begin + _PATIENCE_S:  # it answers an earlier signal
            time.sleep(_PAUSE_S)
        if not _has_signal(status, "ShdPnd"):
            os.truncate(path, 0)
            os.kill(pid, SIGNAL)
        begin = time.monotonic()
        while time.monotonic() < begin + (_PATIENCE_WITH_RUNNING_S if _is_in(status, _RUNS) else _PATIENCE_S):
            time.sleep(_PAUSE_S)
            status = _status(pid)
            is_writing = _has_signal(status, "ShdPnd") or _is_writing(pid)
            before, data = data, _content(path)
            if data and data == before and not is_writing:
                break
    except OSError:  # it has ended
        return b""
    return data


def _is_writing(pid: int) -> bool:
    """Whether a thread runs the handler. Threads that block other signals, too, such as all signals, never run it."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):  # it has ended
            status = _status(f"{pid}/task/{thread}")
            if _has_signal(status, "SigBlk") and not _has_signal(status, "SigBlk", SIGNAL - 1):
                return True
    return False


def _state(pid: int, letters: str) -> bytes:
    """Return the state of a process if it is one of some; empty for other states, and if the process has ended."""
    try:
        fields = _status(pid)
    except OSError:
        return b""
    if not _is_in(fields, letters):
        return b""
    return f"state: {fields['State'][0]} {pid} {fields.get('TracerPid', '0')}\n".encode()


def _is_in(status: Mapping[str, str], letters: str) -> bool:
    """Whether the main thread of a process is in one of some states."""
    return status.get("State", "-")[0] in letters


def _has_signal(status: Mapping[str, str], name: str, number: int = SIGNAL) -> bool:
    """Whether a signal is in a set: `SigCgt` (has a handler), `ShdPnd` (waits for the process), `SigBlk` (is blocked)."""
    return bool(int(status.get(name, "0"), 16) >> (number - 1) & 1)


def _status(pid: int | str) -> dict[str, str]:
    """Return the fields of ``/proc/PID/status``."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: rest.strip() for name, _, rest in (line.partition(":") for line in lines)}


def _content(path: os.PathLike[str]) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_NBYTES))
        return file.read(_MAX_NBYTES)
