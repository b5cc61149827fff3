"""The Ray actor of a host: it starts the host agent, reports its output and its end, and stops it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from monarch_kernel.net.wire.config import LISTENS

__all__ = ["AgentActor"]

_TAIL = 20
_TERMINATE_S = 2.0
_TIDY_S = 1.5
"""Delay before the actor kills what the agent left behind: the zygote of a killed agent still removes its directory."""

_BATCH_S = 0.1
_LAST_WORDS_S = 1.0
"""How long to wait for the last output of an agent that has ended: a process that it left may hold the pipe open."""

# Runs between the actor and the agent: a fork of a process with threads must not run Python code before exec.
_BIND = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the Ray actor ended")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]} can't be run: {error.strerror}")
"""
_SUBREAPER = 36


class AgentActor:
    """The Ray actor of one host: its child is the agent, and its methods return the agent's output and exit code.

    Ray sends the code of this class to the host, so that the actor can report that this package is not installed there.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._lines: deque[str] = deque(maxlen=_TAIL)
        self._count = 0
        self._port = 0
        self._code: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)

    def start(self, config: bytes, command: Sequence[str], gpus: str | None) -> tuple[str, int]:
        """Start the agent; return the node's address and the agent's pid.

        Args:
            config: input for its standard input.
            command: command of the agent; an empty interpreter stands for the one that Ray runs here.
            gpus: value of CUDA_VISIBLE_DEVICES; None keeps Ray's value.
        """
        import ray

        address_of_node: Callable[[], str] = ray.util.get_node_ip_address
        python = command[0] or sys.executable
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BIND, str(os.getpid()), python, *command[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(gpus),
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.write(config)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._reader.start()
        threading.Thread(target=self._wait, daemon=True).start()
        return address_of_node(), self._process.pid

    def watch(self, seen: int, timeout_s: float) -> tuple[int, list[str], int, int | None]:
        """Wait for news of the agent; return the number of lines that it wrote, the last lines, its port, and its exit code."""
        with self._lock:
            self._changed.wait_for(lambda: self._count > seen or self._code is not None, timeout_s)
            self._changed.wait_for(lambda: self._code is not None, _BATCH_S)  # collect more lines
            return self._count, list(self._lines), self._port, self._code

    def end(self, timeout_s: float) -> None:
        """Wait for the agent to end, kill it after ``timeout_s`` seconds, and kill what it left behind."""
        process = self._process
        if process is not None:
            for stop, wait_s in ((None, timeout_s), (process.terminate, _TERMINATE_S), (process.kill, _TERMINATE_S)):
                if stop is not None:
                    stop()
                with self._lock:
                    if self._changed.wait_for(lambda: self._code is not None, wait_s):
                        break
        started = time.monotonic()
        while (left := _descendants(os.getpid())) and time.monotonic() < started + _TIDY_S + _TERMINATE_S:
            if time.monotonic() >= started + _TIDY_S:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.005)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            print(line, flush=True)  # into Ray's own log of this worker
            first, _, rest = line.partition(" ")
            with self._lock:
                if first == LISTENS and rest.isdecimal():
                    self._port = int(rest)
                else:
                    self._lines.append(line)
                self._count += 1
                self._changed.notify_all()

    def _wait(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        self._reader.join(_LAST_WORDS_S)
        with self._lock:
            self._code = code
            self._changed.notify_all()


def _environment(gpus: str | None) -> dict[str, str]:
    """Return the environment of the node, without what Ray set for its own workers."""
    environment = dict(os.environ)
    with open("/proc/self/environ", "rb") as file:
        given = {entry.partition(b"=")[0].decode() for entry in file.read().split(b"\0")}
    for name in ("OMP_NUM_THREADS", "PYTHONBREAKPOINT"):
        if name not in given or environment.get(name, "").startswith(
            "ray."
        ):  # Ray's own value, also if the node inherited it from another Ray process
            environment.pop(name, None)
    for name in ("RAY_JOB_ID", "RAY_RAYLET_PID"):
        environment.pop(name, None)
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    return environment


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                for child in map(int, file.read().split()):
                    found += [child, *_descendants(child)]
    return found
