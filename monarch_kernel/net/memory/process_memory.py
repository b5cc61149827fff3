"""Cross-process memory access, in one copy: process_vm_readv(2), process_vm_writev(2).

The other process takes no part in it, and may be busy. The Linux kernel allows it to processes of the same user, unless a
security module forbids it (Yama's ``ptrace_scope``; seccomp in some containers), which only an attempt shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from monarch_kernel.net.memory.layout import paired
from monarch_kernel.net.memory.threads import IdleThreads

__all__ = ["Forbidden", "Vanished", "allow", "read", "write"]

_MAX_RUNS = 1024  # IOV_MAX
_MAX_NBYTES = 1 << 30  # per call: the Linux kernel stops a little below 2 GiB

SHARED_NBYTES = 8 << 20
"""Two threads copy longer runs, because one does not use the full memory bandwidth."""

_PIECE_NBYTES = 4 << 20
_helpers = IdleThreads("monarch-copier", 4)

_PR_SET_PTRACER = 0x59616D61


class Forbidden(OSError):
    """The Linux kernel denies access to the other process's memory."""


class Vanished(OSError):
    """The other process has ended, or the memory no longer exists."""


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("len", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("process_vm_readv", "process_vm_writev"):
    _function = getattr(_libc, _name)
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )


def allow(pid: int) -> None:
    """Let a process and its descendants access this one's memory, where Yama allows it only to ancestors.

    The Linux kernel keeps one such process; it may be this one itself, whose descendants are then allowed.
    """
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def read(pid: int, to: Sequence[tuple[int, int]], source: Sequence[tuple[int, int]]) -> None:
    """Copy runs of another process into runs of this one, without the GIL.

    Args:
        pid: the other process.
        to: (address, nbytes) in this process, in order; as long in total as ``source``.
        source: (address, nbytes) in the other process.

    Raises:
        Forbidden: the Linux kernel does not allow it.
        Vanished: the process has ended, or the memory does not exist.
    """
    _carry(_libc.process_vm_readv, pid, to, source)


def write(pid: int, to: Sequence[tuple[int, int]], source: Sequence[tuple[int, int]]) -> None:
    """Copy runs of this process into runs of another; arguments and errors are those of `read`."""
    _carry(_libc.process_vm_writev, pid, source, to)


def _carry(
    call: Callable[..., int], pid: int, here: Sequence[tuple[int, int]], there: Sequence[tuple[int, int]]
) -> None:
    if len(here) == len(there) == 1:
        (ours, nbytes), (theirs, _) = here[0], there[0]
        (_carry_together if nbytes > SHARED_NBYTES else _carry_run)(call, pid, ours, theirs, nbytes)
        return
    pairs = paired(here, there)
    for batch in _batches(pairs):
        ours_raw = (_IoVec * len(batch))(*[_IoVec(ours, nbytes) for ours, _, nbytes in batch])
        theirs_raw = (_IoVec * len(batch))(*[_IoVec(theirs, nbytes) for _, theirs, nbytes in batch])
        done = _call(call, pid, ours_raw, len(batch), theirs_raw)
        for ours, theirs, nbytes in batch:  # copy the rest of each incomplete run
            if done < nbytes:
                _carry(call, pid, [(ours + done, nbytes - done)], [(theirs + done, nbytes - done)])
            done = max(0, done - nbytes)


def _carry_run(call: Callable[..., int], pid: int, ours: int, theirs: int, nbytes: int) -> None:
    while nbytes:
        done = _call(call, pid, _IoVec(ours, min(nbytes, _MAX_NBYTES)), 1, _IoVec(theirs, min(nbytes, _MAX_NBYTES)))
        ours, theirs, nbytes = ours + done, theirs + done, nbytes - done


def _carry_together(call: Callable[..., int], pid: int, ours: int, theirs: int, nbytes: int) -> None:
    """Copy one run with this thread and a second, if that starts in time; neither touches the memory after this returns."""
    pieces = deque(range(0, nbytes, _PIECE_NBYTES))
    errors: list[OSError] = []
    helps = threading.Lock()

    def work() -> None:
        while pieces and not errors:
            try:
                at = pieces.popleft()
            except IndexError:  # the other thread has taken the last one
                return
            try:
                _carry_run(call, pid, ours + at, theirs + at, min(_PIECE_NBYTES, nbytes - at))
            except OSError as error:
                errors.append(error)

    def help() -> None:
        with helps:
            work()

    try:
        with contextlib.suppress(RuntimeError):  # no thread can be started: work alone
            _helpers.submit(help)
        work()
    finally:
        pieces.clear()
        with helps:  # a piece may be in progress
            pass
    if errors:
        raise errors[0]


def _batches(pairs: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Group pairs of runs so that each group fits into one call."""
    batches: list[list[tuple[int, int, int]]] = []
    room = 0
    for pair in pairs:
        if pair[2] > room or len(batches[-1]) == _MAX_RUNS:
            batches.append([])
            room = _MAX_NBYTES
        batches[-1].append(pair)
        room -= pair[2]
    return batches


def _call(call: Callable[..., int], pid: int, ours: Any, count: int, theirs: Any) -> int:
    while True:
        done = call(pid, ctypes.byref(ours), count, ctypes.byref(theirs), count, 0)
        if done > 0:
            return done
        code = ctypes.get_errno() if done < 0 else errno.EFAULT
        if code in (errno.ESRCH, errno.EFAULT):
            raise Vanished(code, os.strerror(code))
        if code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise Forbidden(code, os.strerror(code))
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, os.strerror(code))
