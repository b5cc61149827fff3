"""The plugin that checks that tests leave nothing behind detects each kind of leak."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import repeat
from pathlib import Path

import pytest

from tests.support import leftovers

LEAKS = """
import os, socket, subprocess, sys, tempfile, threading
import pytest

kept = []

def test_clean():
    with socket.socket():
        subprocess.run([sys.executable, "-c", ""], check=True)

def test_child():
    kept.append(subprocess.Popen(["sleep", "60"]))

def test_orphan():
    subprocess.run(["sh", "-c", "setsid sleep 60 </dev/null >/dev/null 2>&1 &"], check=True)

def test_zombie():
    pid = os.fork()
    if not pid:
        os._exit(0)

def test_thread():
    done = threading.Event()
    threading.Thread(target=done.wait, name="left-over", daemon=True).start()

def test_socket():
    kept.append(socket.socket())

def test_shared_memory():
    path = f"/dev/shm/monarch-left-{os.getpid()}"
    open(path, "w").close()
    kept.append(path)

def test_directory():
    tempfile.mkdtemp(prefix="monarch-left-")

def test_clean_again():
    os.unlink(kept.pop())

@pytest.fixture(scope="module")
def wide():
    subprocess.run(["sh", "-c", "setsid sleep 61 </dev/null >/dev/null 2>&1 &"], check=True)

def test_wide_fixture(wide):
    pass

@pytest.fixture(scope="module")
def starter():
    from tests.support.leftovers import starting_others
    with subprocess.Popen(["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell, starting_others([shell.pid]):
        yield shell

def test_starts_another(starter):
    starter.stdin.write(b"sleep 62 </dev/null >/dev/null 2>&1 & echo\\n")
    starter.stdin.flush()
    starter.stdout.readline()
"""


CONFTEST = """
from tests.support import leftovers

pytest_plugins = ["tests.support.leftovers"]
leftovers.GRACE_S = 0.3
"""


def test_each_kind_of_leak_is_reported(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-W", "ignore", "-rN"]
    root = str(Path(__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_leaks.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "11 passed, 8 errors" in run.stdout, run.stdout + run.stderr
    reports = [line.strip() for line in run.stdout.splitlines() if line.startswith("  ")]
    expected = [
        ("process", "sleep 60"),
        ("process", "sleep 60"),
        ("process", "a zombie"),
        ("thread", "'left-over' (daemon)"),
        ("open socket", "socket:["),
        ("shared memory", "/dev/shm/monarch-left-"),
        ("in the temporary directory", "monarch-left-"),
        ("process", "sleep 61"),
        ("process", "sleep 62"),
    ]
    assert len(reports) == len(expected), run.stdout
    assert "| 'left-over' is here:" in run.stdout
    assert re.search(r"\| process \d+ has run for \d+\.\d s, and is sleeping in \w+", run.stdout)
    for report, (kind, name) in zip(reports, expected, strict=True):
        assert report.startswith(kind), report
        assert name in report


@pytest.mark.parametrize("arguments", [[b"sh", b"", b"sleep"], [b"sh", b"sleep", b"sleep"], [b"", b"", b"sleep"]])
def test_a_process_in_the_middle_of_an_exec_is_found(monkeypatch: pytest.MonkeyPatch, arguments: list[bytes]) -> None:
    mark = f"MONARCH_KERNEL_TEST_MARK={leftovers.MARK}".encode()
    files = {
        "environ": iter([b"", b"", mark]),
        "cmdline": iter(arguments),
        "stat": repeat(b"77 (sh) R 1 77"),
    }
    monkeypatch.setattr(leftovers, "_read", lambda pid, name: next(files[name]))
    monkeypatch.setattr(leftovers, "_owner", lambda pid: os.geteuid())
    assert leftovers._is_marked(77)


def test_a_process_without_an_environment_is_not_marked() -> None:
    with subprocess.Popen(["sleep", "60"], env={}) as process:
        try:
            assert not leftovers._is_marked(process.pid)
        finally:
            process.kill()


def test_what_went_during_a_long_look_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([["process 1: ended during this look"], []])
    monkeypatch.setattr(leftovers, "GRACE_S", 0.0)
    monkeypatch.setattr(leftovers, "_left", lambda before: next(looks))
    leftovers.check_nothing_left(leftovers.Snapshot())
