"""A pytest plugin that fails a test if it leaves anything behind.

After each test, and after the last one of the session, no process, thread, socket, shared memory segment or directory may exist
that did not exist before. The plugin finds processes in two ways: as descendants of this one, and by a mark in the environment,
which also finds processes that init has adopted.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.support.scratch import MARK, SCRATCH

GRACE_S = 5.0
"""Closing is asynchronous; whatever exists this long after the test, or after the last other thing went, is left behind."""

GARBAGE_AFTER_S = 0.05
"""Most of what a test has closed is gone within this time; a garbage collection takes longer."""

_LOOKS = 5
"""How often a process must have arguments and no environment, 1 ms apart, to count as one without an environment."""

SHARED_MEMORY = Path("/dev/shm")

# Threads that libraries start once and keep, by the start of the name or by the module of the class.
KEPT_THREADS = ("Dummy-", "IPythonHistorySavingThread", "asyncio_", "pydevd", "pytest_timeout")
KEPT_THREAD_MODULES = ("execnet.", "zmq.utils.garbage")
# multiprocessing keeps this helper for the life of the first process that used shared memory.
KEPT_PROCESSES = (b"multiprocessing.resource_tracker",)

_starting_others: set[int] = set()  # processes of fixtures, as `starting_others` says
_reported: set[str] = set()  # leaks that were reported, so that the end of the session does not report them again


@dataclass(frozen=True)
class Snapshot:
    """Everything at one moment that a test could leave behind."""

    processes: frozenset[int] = field(default_factory=lambda: frozenset(_processes()))
    threads: frozenset[threading.Thread] = field(default_factory=lambda: frozenset(threading.enumerate()))
    sockets: frozenset[str] = field(default_factory=lambda: frozenset(_sockets()))
    segments: frozenset[str] = field(default_factory=lambda: frozenset(_names(SHARED_MEMORY)))
    scratch: frozenset[str] = field(default_factory=lambda: frozenset(_names(SCRATCH)))


@pytest.fixture(scope="session", autouse=True)
def nothing_left_by_the_session() -> Iterator[None]:
    """Check at the end that fixtures of a wider scope than a function have left nothing."""
    before = Snapshot()
    yield
    check_nothing_left(before)


@pytest.fixture(autouse=True)
def nothing_left(nothing_left_by_the_session: None) -> Iterator[None]:
    """Check that the test leaves nothing of this project behind."""
    before = Snapshot()
    yield
    check_nothing_left(before)


@contextmanager
def starting_others(pids: Collection[int]) -> Iterator[None]:
    """Leave out what processes of a wider fixture start, such as a browser, which starts and ends processes at any time.

    That holds as long as the fixture: when it has ended, its processes and all that they have started must be gone.
    """
    _starting_others.update(pids)
    try:
        yield
    finally:
        _starting_others.difference_update(pids)


def check_nothing_left(before: Snapshot) -> None:
    """Wait until everything that is new since ``before`` is gone; otherwise end it, for the sake of the next test, and fail."""
    begin = time.monotonic()
    left, deadline, is_collected = _left(before), begin + GRACE_S, False
    is_over = False
    while left and not is_over:
        is_over = (
            time.monotonic() >= deadline
        )  # a look at a busy machine takes long: the last one begins after the deadline
        if not is_collected and time.monotonic() > begin + GARBAGE_AFTER_S:
            gc.collect()  # an object in a reference cycle is garbage, not a leak
            is_collected = True
        time.sleep(0.005)
        now = _left(before)
        if len(now) < len(left):
            deadline, is_over = time.monotonic() + GRACE_S, False
        left = now
    if not left:
        return
    processes = _new_processes(before)
    states = "".join(map(_state_of, sorted(processes)))
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    _reported.update(left)
    stacks = _stacks_of(set(threading.enumerate()) - before.threads)
    pytest.fail("the test left behind:\n" + "\n".join(f"  {line}" for line in left) + states + stacks, pytrace=False)


def _state_of(pid: int) -> str:
    """Say how long a process has run, and what its main thread does: whether it ends late, or was started late."""
    try:
        process = psutil.Process(pid)
        running_s = time.time() - process.create_time()
        does = f"{process.status()} in {Path(f'/proc/{pid}/wchan').read_text() or 'user code'}"
    except (psutil.NoSuchProcess, OSError):
        return ""
    return f"\n| process {pid} has run for {running_s:.1f} s, and is {does}"


def _stacks_of(threads: Collection[threading.Thread]) -> str:
    """Say where threads are, which tells why they have not ended."""
    frames = sys._current_frames()
    found = [(thread.name, frames[thread.ident]) for thread in threads if thread.ident in frames]
    stacks = [f"{name!r} is here:\n{''.join(traceback.format_stack(frame))}" for name, frame in found]
    return "".join("\n" + textwrap.indent(stack.rstrip(), "| ") for stack in stacks)


def _left(before: Snapshot) -> list[str]:
    left = [f"process {pid}: {_describe(pid)}" for pid in sorted(_new_processes(before))]
    left += [
        f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"
        for thread in threading.enumerate()
        if thread not in before.threads
        and not thread.name.startswith(KEPT_THREADS)
        and not type(thread).__module__.startswith(KEPT_THREAD_MODULES)
    ]
    left += [f"open socket {name}" for name in sorted(_sockets() - before.sockets)]
    segments = _names(SHARED_MEMORY) - before.segments
    if segments:
        held, foreign = _holders_of_segments()
        segments &= _names(SHARED_MEMORY)  # some may have been removed before the search for their holders
        # /dev/shm belongs to the whole machine. A killed multiprocessing program leaves semaphores without an owner.
        orphans = {name for name in segments - foreign if not name.startswith("sem.")}
        left += [f"shared memory {SHARED_MEMORY / name}" for name in sorted(orphans | segments & held)]
    new = _names(SCRATCH) - before.scratch
    left += [f"in the temporary directory: {name}" for name in sorted(new) if name.startswith("monarch-")]
    return [line for line in left if line not in _reported]


def _processes() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}


def _new_processes(before: Snapshot) -> set[int]:
    """Find this session's processes among those that are new since ``before``: marked ones, and descendants of this process."""
    new = _processes() - before.processes
    parents = {pid: _parent(pid) for pid in new}
    ours = {pid for pid in new if _is_marked(pid)}
    for pid in new:
        line, ancestor = {pid}, parents[pid]
        while ancestor in new and ancestor not in ours:
            line.add(ancestor)
            ancestor = parents[ancestor]
        if ancestor == os.getpid() or ancestor in ours:
            ours |= line
    kept = {pid for pid in ours if any(kept in _read(pid, "cmdline") for kept in KEPT_PROCESSES)}
    return {pid for pid in ours - kept if not _is_started_by_a_fixture(pid)}


def _is_started_by_a_fixture(pid: int) -> bool:
    while pid and pid not in _starting_others:
        pid = _parent(pid)
    return pid in _starting_others


def _is_marked(pid: int) -> bool:
    """Whether a process has the mark in its environment.

    In the middle of an exec() the environment is empty for a moment, and the arguments only for a part of this moment. So a
    process counts as one without an environment if it has had arguments in several looks, one after the other.
    """
    deadline, n_looks = time.monotonic() + GRACE_S, 0
    while not (environ := _read(pid, "environ")) and n_looks < _LOOKS and _has_readable_environment(pid):
        if time.monotonic() > deadline:
            break
        n_looks = n_looks + 1 if _read(pid, "cmdline") else 0
        time.sleep(0.001)
    return f"MONARCH_KERNEL_TEST_MARK={MARK}".encode() in environ.split(b"\0")


def _has_readable_environment(pid: int) -> bool:
    """Whether a process is neither a zombie nor a thread of the kernel, and is one that this user may read."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    is_program = bool(fields) and fields[0] not in (b"Z", b"X") and fields[1] != b"2"
    return is_program and os.geteuid() in (0, _owner(pid))


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def _parent(pid: int) -> int:
    # The second field is the command in parentheses, which may contain spaces and parentheses.
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def _describe(pid: int) -> str:
    state = _read(pid, "stat").rpartition(b")")[2].split()[:1]
    if state == [b"Z"]:
        return "a zombie that its parent has not waited for"
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip() or "(no command line)"


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # the process is gone, or belongs to another user
        return b""


def _sockets() -> set[str]:
    return {link for link in _links("/proc/self/fd") if link.startswith("socket:")}


def _holders_of_segments() -> tuple[set[str], set[str]]:
    """Names of shared memory that processes of this session hold, and of shared memory that only other processes hold."""
    ours: set[str] = set()
    others: set[str] = set()
    for pid in _processes():
        mapped = _read(pid, "maps").decode(errors="replace").splitlines()
        paths = [
            *(line.partition("/dev/shm/")[2] for line in mapped),
            *(link.partition("/dev/shm/")[2] for link in _links(f"/proc/{pid}/fd")),
        ]
        names = {path.removesuffix(" (deleted)").partition("/")[0] for path in paths if path}
        (ours if pid == os.getpid() or _is_marked(pid) else others).update(names)
    return ours, others - ours


def _links(folder: str) -> set[str]:
    links = set()
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):  # the descriptor that lists the folder is closed by now
                links.add(os.readlink(f"{folder}/{name}"))
    return links


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()
