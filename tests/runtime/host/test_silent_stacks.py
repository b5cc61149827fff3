"""A process whose native code holds the GIL has its stacks written when its agent asks; other processes are not harmed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from monarch_kernel.net.wire.messages import ReadLog
from monarch_kernel.runtime.host import silent_stacks
from monarch_kernel.runtime.host.silent_stacks import answer_for
from tests.support.waiting import LONG_S

OTHERS = 30
HOLDS = f"""
import ctypes, os, sys, threading
def wait(depth):
    if depth: wait(depth - 1)
    else: threading.Event().wait()
for _ in range({OTHERS}): threading.Thread(target=wait, args=(40,), daemon=True).start()
def hold():
    empty, _ = os.pipe()
    print("ready", flush=True)
    ctypes.PyDLL(None).read(empty, ctypes.create_string_buffer(1), 1)
{{prepare}}
hold()
"""
PREPARE = "from monarch_kernel.runtime.host.silent_stacks import listen\nlisten({directory!r}, 5)"


@pytest.fixture
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds its GIL forever; the parameter says whether it has prepared."""
    prepare = PREPARE.format(directory=str(tmp_path)) if request.param else ""
    code = HOLDS.format(prepare=prepare)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for stacks as long as they take where the machine has other work."""
    monkeypatch.setattr(silent_stacks, "_PATIENCE_S", LONG_S)
    monkeypatch.setattr(silent_stacks, "_PATIENCE_WITH_RUNNING_S", LONG_S)


@pytest.mark.parametrize("held", [True], indirect=True)
def test_the_stacks_are_written_each_time(
    held: subprocess.Popen[str], tmp_path: Path, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, ranks = ReadLog(1, 5, 0, True), {5: SimpleNamespace(pid=held.pid)}
    for _ in range(2):
        text = answer_for(ask, str(tmp_path), ranks).decode()
        assert text.count("most recent call first") == 1 + OTHERS
        assert " in hold\n" in text
    monkeypatch.setattr(silent_stacks, "_MAX_NBYTES", 100)
    assert " in hold\n" in answer_for(ask, str(tmp_path), ranks).decode(), "the main thread is in the last bytes"
    assert held.poll() is None


@pytest.mark.parametrize("held", [True], indirect=True)
def test_a_process_that_gets_no_processor_writes_its_stacks_once(
    held: subprocess.Popen[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    held.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, held.pid, os.WSTOPPED | os.WNOWAIT)
    for _ in range(3):
        assert silent_stacks._stacks(str(tmp_path), 5, held.pid) == b""
    request.getfixturevalue("patient")
    held.send_signal(signal.SIGCONT)
    text = answer_for(ReadLog(1, 5, 0, True), str(tmp_path), {5: SimpleNamespace(pid=held.pid)}).decode()
    assert text.count("most recent call first") == 1 + OTHERS


@pytest.mark.parametrize("held", [True], indirect=True)
def test_the_last_thread_is_waited_for(
    held: subprocess.Popen[str], tmp_path: Path, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of the user's code. The process loses its processor when it has written the stacks of some others."""
    content, reads = silent_stacks._content, list[bytes]()

    def read(path: os.PathLike[str]) -> bytes:
        if not any(reads) and content(path):
            held.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, held.pid, os.WSTOPPED | os.WNOWAIT)
        reads.append(content(path))
        if sum(map(bool, reads)) == 5:
            held.send_signal(signal.SIGCONT)
        return reads[-1]

    monkeypatch.setattr(silent_stacks, "_content", read)
    text = answer_for(ReadLog(1, 5, 0, True), str(tmp_path), {5: SimpleNamespace(pid=held.pid)}).decode()
    assert text.count("most recent call first") == 1 + OTHERS
    assert text.count(" in hold\n") == 1


@pytest.mark.parametrize("held", [False], indirect=True)
def test_a_process_that_has_not_prepared_gets_no_signal(held: subprocess.Popen[str], tmp_path: Path) -> None:
    (tmp_path / "stack-5").touch()  # of a process that it replaces
    assert answer_for(ReadLog(1, 5, 0, True), str(tmp_path), {5: SimpleNamespace(pid=held.pid)}) == b""
    assert held.poll() is None


def test_a_rank_that_is_not_there_has_no_stacks(tmp_path: Path) -> None:
    ask = ReadLog(1, 5, 0, True)
    assert answer_for(ask, str(tmp_path), {}) == b""
    assert answer_for(ask, str(tmp_path), {5: SimpleNamespace(pid=0)}) == b""
    assert answer_for(ask, str(tmp_path), {5: SimpleNamespace(pid=2**22 + 1)}) == b""


@pytest.mark.parametrize("held", [True], indirect=True)
def test_a_stopped_process_has_its_state_and_gets_no_signal(held: subprocess.Popen[str], tmp_path: Path) -> None:
    ranks = {5: SimpleNamespace(pid=held.pid)}
    assert answer_for(ReadLog(1, 5, 0, True, True), str(tmp_path), ranks) == b""  # it runs
    held.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, held.pid, os.WSTOPPED | os.WNOWAIT)
    for only_state in (True, False):
        ask = ReadLog(1, 5, 0, True, only_state)
        assert answer_for(ask, str(tmp_path), ranks) == f"state: T {held.pid} 0\n".encode()
    status = Path(f"/proc/{held.pid}/status").read_text()
    assert "ShdPnd:\t0000000000000000" in status
    held.send_signal(signal.SIGCONT)
