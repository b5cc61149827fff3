"""Processes that run cells: each script has a separate one, because the shell is the `__main__` of its process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import LONG_S

# Imports the modules of the scripts, and forks a process for each script: new imports would take half a second of each test.
SERVER = """\
import asyncio, cloudpickle, dataclasses, gc, inspect, json, os, psutil, signal, sys, threading, time, types, weakref
from monarch_kernel.runtime.worker.cell_shell import CellShell
from monarch_kernel.runtime.worker.light_shell import LightShell
from monarch_kernel.runtime.worker.ipython_shell import prepare

def next_job(replies):
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            os.close(replies)
            return json.loads(line)
        os.write(replies, b"%d\\n" % pid)
        os.write(replies, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.exit()

job = next_job(os.dup(1))
for fd, path in enumerate((os.devnull, job["stdout"], job["stderr"])):
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, fd)
    os.close(opened)
sys.stdin = open(0)
os.environ.clear()
os.environ.update(job["environment"])
os.chdir(job["directory"])
sys.argv[:] = [job["script"], job["answer"]]
sys.path[0] = os.path.dirname(job["script"])
of_the_server = sys.modules["__main__"]
main = sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(open(job["script"]).read(), job["script"], "exec"), main.__dict__)
"""

PRELUDE = """\
import dataclasses, gc, json, os, signal, sys, threading, time, weakref
from monarch_kernel.runtime.worker.cell_shell import CellShell
from monarch_kernel.runtime.worker.light_shell import LightShell
from monarch_kernel.runtime.worker.ipython_shell import prepare

published = []
started = threading.Event()
shell = SHELL({"rank": 3, "started": started}, lambda data, metadata: published.append([data, metadata]))
report = {}

def run(code, number=1):
    return shell.run(code, number)

def told(outcome):
    failure = outcome.failure
    if failure is None:
        return None
    lines = [[f.file, f.line, "".join(f.source[f.line - f.first_line:][:1]), f.user] for f in failure.frames]
    return {"kind": failure.kind, "headline": failure.headline(), "frames": lines, "text": failure.traceback}

def interrupted(code, number=1):
    '''Run a cell that sets `started`, and interrupt it then, as a rank does.'''
    started.clear()
    delivered = threading.Event()
    def interrupt(*_):
        delivered.set()
        raise KeyboardInterrupt
    signal.signal(signal.SIGINT, interrupt)
    def interrupt():
        started.wait(60)
        while not delivered.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            delivered.wait(0.05)
    thread = threading.Thread(target=interrupt)
    thread.start()
    begin = time.monotonic()
    outcome = run(code, number)
    thread.join()
    return {**(told(outcome) or {}), "seconds": time.monotonic() - begin}
"""


@dataclass(frozen=True)
class Ran:
    """The report of a script, and its output."""

    report: dict[str, Any]
    stdout: str
    stderr: str


Script = Callable[[str], Ran]


class ForkServer:
    """A process that has imported the modules of the scripts, and forks one for each of them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def run(self, job: dict[str, Any]) -> int:
        """Run a script; returns the exit code of its process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        pid = self._answer()
        try:
            return self._answer()
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            return self._answer()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], LONG_S)[0]:
            raise TimeoutError
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the server."""
        self._process.communicate(timeout=LONG_S)


@pytest.fixture(scope="session")
def fork_server(nothing_left_by_the_session: None) -> Iterator[ForkServer]:
    """The fork server of this pytest process."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def rank(fork_server: ForkServer, tmp_path: Path, request: pytest.FixtureRequest) -> Script:
    """Runs a script that has a `shell`, fills `report` and may use the prelude's names; a parameter names the shell's class."""
    shell = getattr(request, "param", "CellShell")
    home = tmp_path / "home"
    home.mkdir()

    def script(body: str) -> Ran:
        file, answer = tmp_path / "script.py", tmp_path / "report.json"
        stdout, stderr = tmp_path / "stdout", tmp_path / "stderr"
        end = "\nshell.close()\njson.dump(report, open(sys.argv[1], 'w'))\n"
        file.write_text(PRELUDE.replace("SHELL", shell) + textwrap.dedent(body) + end)
        code = fork_server.run(
            {
                "script": str(file),
                "answer": str(answer),
                "stdout": str(stdout),
                "stderr": str(stderr),
                "directory": str(home),
                "environment": {
                    **os.environ,
                    "HOME": str(home),
                    "IPYTHONDIR": str(home / ".ipython"),
                    "SHELL": "/bin/sh",
                },
            }
        )
        assert code == 0, stderr.read_text()
        assert not list(home.iterdir()), "the shell wrote files"
        return Ran(json.loads(answer.read_text()), stdout.read_text(), stderr.read_text())

    return script
