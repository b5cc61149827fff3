"""A process that runs cells: each script gets one of its own, for the shell is the process's `__main__`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PRELUDE = """\
import dataclasses, gc, json, os, signal, sys, threading, time, weakref
from monarch_kernel.rank.cell import CellShell
from monarch_kernel.rank.light import LightShell
from monarch_kernel.rank.shell import prepare

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
    struck = threading.Event()
    def strike(*_):
        struck.set()
        raise KeyboardInterrupt
    signal.signal(signal.SIGINT, strike)
    def interrupt():
        started.wait(60)
        while not struck.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            struck.wait(0.05)
    thread = threading.Thread(target=interrupt)
    thread.start()
    begin = time.monotonic()
    outcome = run(code, number)
    thread.join()
    return {**(told(outcome) or {}), "seconds": time.monotonic() - begin}
"""


@dataclass(frozen=True)
class Ran:
    """What a script reported, and what it wrote."""

    report: dict[str, Any]
    stdout: str
    stderr: str


Script = Callable[[str], Ran]


@pytest.fixture
def rank(tmp_path: Path, request: pytest.FixtureRequest) -> Script:
    """Runs a script that has a `shell`, fills `report` and may use what the prelude defines; a parameter names its class."""
    shell = getattr(request, "param", "CellShell")
    home = tmp_path / "home"
    home.mkdir()

    def script(body: str) -> Ran:
        file, answer = tmp_path / "script.py", tmp_path / "report.json"
        end = "\nshell.close()\njson.dump(report, open(sys.argv[1], 'w'))\n"
        file.write_text(PRELUDE.replace("SHELL", shell) + textwrap.dedent(body) + end)
        environment = {**os.environ, "HOME": str(home), "IPYTHONDIR": str(home / ".ipython"), "SHELL": "/bin/sh"}
        done = subprocess.run(
            [sys.executable, str(file), str(answer)],
            env=environment,
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert not list(home.iterdir()), "the shell wrote files"
        return Ran(json.loads(answer.read_text()), done.stdout, done.stderr)

    return script
