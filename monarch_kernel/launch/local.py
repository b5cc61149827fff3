"""The launcher for this machine: each host agent is a child process in its own session."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import agent_command
from monarch_kernel.launch.text import how_ended
from monarch_kernel.net.wire.config import LOOPBACK, AgentConfig

__all__ = ["AdoptedHost", "LocalHost", "LocalLauncher"]

_TERMINATE_S = 2.0


class LocalLauncher:
    """Starts agents as child processes: one for this machine, or several that behave like remote hosts.

    Args:
        directory: directory for their logs; by default the logs are unnamed files, which need no cleanup.
        command: the command to run; it gets the agent's configuration on its standard input.
        python: interpreter of the hosts, if no command is given.

    Attributes:
        environment: environment of the next agents; None for that of this process.
        listens_at: the address at which the controller and the agents listen; no other machine can reach it.
    """

    name = "local"
    listens_at = LOOPBACK

    def __init__(self, directory: Path | None = None, command: Sequence[str] = (), *, python: str = "") -> None:
        self._directory = directory
        self._command = command or agent_command(python)
        self._hosts: list[LocalHost] = []
        self.environment: Mapping[str, str] | None = None

    def launch(self, configs: Sequence[AgentConfig]) -> list[LocalHost]:
        """Start agents; pass their configs on standard input, so that other users of the machine can't see the token."""
        return [self._start(config) for config in configs]

    def progress(self) -> str:
        """Return an empty text: agents start at once."""
        return ""

    def close(self, timeout_s: float) -> None:
        """Wait for all agents to end, and kill those that remain after the timeout."""
        deadline = time.monotonic() + timeout_s
        while self._hosts:
            self._hosts.pop().close(max(0.0, deadline - time.monotonic()))

    def _start(self, config: AgentConfig) -> LocalHost:
        log = _nameless() if self._directory is None else self._directory / f"agent-{config.host}.log"
        with open(log, "ab", opener=_private, closefd=isinstance(log, Path)) as sink:
            try:
                process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=self.environment,
                )
            except OSError as error:
                if isinstance(log, int):
                    os.close(log)
                raise LaunchError(f"{self._command[0]} can't be run: {error.strerror}") from error
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; its handle reports that
            process.stdin.write(config.encode())
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        host = LocalHost(process, log)
        self._hosts.append(host)
        return host


class LocalHost:
    """An agent on this machine.

    Args:
        process: the agent.
        log: the file with its output, or a descriptor, which `close` closes.
    """

    address = ""  # the agent dials
    node = ""

    def __init__(self, process: subprocess.Popen[bytes], log: Path | int) -> None:
        self._process = process
        self._log = log
        self._said: tuple[str, ...] = ()  # the end of the log when it was closed

    @property
    def pid(self) -> int:
        """The process id of the agent."""
        return self._process.pid

    def poll(self) -> str | None:
        """Return None while the agent runs, else how it ended."""
        code = self._process.poll()
        if code is None:
            return None
        return f"the host agent (pid {self._process.pid}) {how_ended(code)}"

    def log_tail(self) -> tuple[str, ...]:
        """Return the last lines that the agent wrote."""
        if isinstance(self._log, Path):
            return _tail(self._log)
        return self._said if self._log < 0 else _tail(Path(f"/proc/self/fd/{self._log}"))

    def close(self, timeout_s: float) -> None:
        """Wait for the agent to end, and kill it after the timeout."""
        self._end(timeout_s)
        if isinstance(self._log, int) and self._log >= 0:
            self._said = self.log_tail()
            os.close(self._log)
            self._log = -1

    def _end(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.terminate()  # the agent then ends its children too
            try:
                self._process.wait(_TERMINATE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class AdoptedHost:
    """An agent on this machine that another process launched.

    Args:
        pid: the process id of the agent.
        pidfd: a pidfd of the agent, which `close` closes; -1 if it has ended.
        log: the file with its output.
    """

    address = ""
    node = ""

    def __init__(self, pid: int, pidfd: int, log: Path) -> None:
        self._pid = pid
        self._fd = pidfd
        self._log = log

    def poll(self) -> str | None:
        """Return None while the agent runs, else that it ended."""
        if self._fd >= 0 and not self._ended(0.0):
            return None
        return f"the host agent (pid {self._pid}) ended"

    def log_tail(self) -> tuple[str, ...]:
        """Return the last lines that the agent wrote."""
        return _tail(self._log)

    def close(self, timeout_s: float) -> None:
        """Wait for the agent to end, and kill it after the timeout."""
        for signum, wait_s in ((0, timeout_s), (signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _TERMINATE_S)):
            if self._fd < 0:
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signum)
            if self._ended(wait_s) or signum == signal.SIGKILL:
                self.release()

    def release(self) -> None:
        """Stop watching the agent, and let it run."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _ended(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))


def _nameless() -> int:
    """Create an unnamed file and return its descriptor."""
    try:
        fd, name = tempfile.mkstemp(prefix="monarch-")
    except OSError:  # no directory can be written
        return os.memfd_create("monarch-log", os.MFD_CLOEXEC)
    os.unlink(name)
    return fd


def _tail(log: Path) -> tuple[str, ...]:
    try:
        return tuple(log.read_text(errors="replace").splitlines()[-20:])
    except FileNotFoundError:
        return ()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
