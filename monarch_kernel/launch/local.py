"""This machine: the host agent is a child process in a session of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from monarch_kernel.wire.config import AgentConfig

__all__ = ["LocalLauncher"]

_AGENT = (sys.executable, "-m", "monarch_kernel.bootstrap", "agent")
_TERMINATE_S = 2.0


class LocalLauncher:
    """Starts agents as child processes.

    Args:
        address: where the controller listens.
        directory: private directory of the session; the agent removes it if the controller dies.
        command: what is run; its standard input is the agent's configuration.
    """

    def __init__(self, address: str, directory: Path, command: Sequence[str] = _AGENT) -> None:
        self._address = address
        self._directory = directory
        self._command = command

    def launch(self, host: int, token: str) -> LocalHost:
        """Start an agent; the token goes over its standard input, so that no one else on the machine sees it."""
        log = self._directory / f"agent-{host}.log"
        config = AgentConfig(
            host=host,
            token=token,
            address=self._address,
            directory=str(self._directory),
            controller_pid=os.getpid(),
            log=str(log),
        )
        with log.open("wb") as sink:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, as its handle tells
            process.stdin.write(config.encode())
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return LocalHost(process, log)


class LocalHost:
    """An agent on this machine."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def poll(self) -> str | None:
        """None while it runs; else how it ended."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the host agent (pid {self._process.pid}) {how}"

    def log_tail(self) -> tuple[str, ...]:
        """The last lines that the agent wrote."""
        try:
            return tuple(self._log.read_text(errors="replace").splitlines()[-20:])
        except FileNotFoundError:
            return ()

    def close(self, timeout_s: float) -> None:
        """Wait for its end; force it when the time is up."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.terminate()  # with all that it started
            try:
                self._process.wait(_TERMINATE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
