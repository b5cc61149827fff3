"""A shell on a host, with the standard input and output of the program."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.integrations.monarch import terminal
from monarch_kernel.integrations.monarch.job import shell
from tests.support.waiting import LONG_S

SHELL = {"SHELL": "/bin/sh", "PS1": "", "ENV": ""}


@pytest.fixture
def warm(procs: ProcMesh) -> None:
    """The session is up."""


@contextmanager
def terminals(monkeypatch: pytest.MonkeyPatch, source: int, sink: int) -> Iterator[None]:
    """Make these descriptors the standard input and output."""

    class File:
        def __init__(self, fd: int) -> None:
            self.fileno = lambda: fd

    with monkeypatch.context() as patch:
        patch.setattr(terminal.sys, "stdin", File(source))
        patch.setattr(terminal.sys, "stdout", File(sink))
        yield


def run(monkeypatch: pytest.MonkeyPatch, text: bytes, tmp_path: Path, **options: Any) -> tuple[int, str]:
    """Run a shell with this input, and return its exit status and its output."""
    source, typed = os.pipe()
    os.write(typed, text)
    os.close(typed)
    output = tmp_path / "output"
    with output.open("wb") as sink, terminals(monkeypatch, source, sink.fileno()):
        try:
            status = shell(this_host(), **options)
        finally:
            os.close(source)
    return status, output.read_text(errors="replace")


def test_the_shell_has_the_given_environment_and_directory(
    warm: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status, output = run(
        monkeypatch,
        b'echo "said: $WORD $(pwd)"; tty; exit 7\n',
        tmp_path,
        env={**SHELL, "WORD": "hello"},
        workdir=str(tmp_path),
    )
    assert status == 7
    assert f"said: hello {tmp_path}" in output
    assert "/dev/pts/" in output


def test_the_end_of_the_input_ends_the_shell_and_what_runs_in_it(
    warm: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(terminal, "_HANGUP_S", 0.2)
    status, _ = run(monkeypatch, b"echo started; exec cat\n", tmp_path, env=SHELL)
    assert status == 0
    status, _ = run(monkeypatch, b"exec sleep 1000\n", tmp_path, env=SHELL)
    assert status != 0


def test_the_end_of_the_input_ends_a_shell_below_nohup() -> None:
    """Programs below nohup ignore SIGHUP, unless the shell takes the signal back."""
    code = "import sys; from monarch_kernel.integrations.monarch import terminal; terminal._HANGUP_S = 0.2\n"
    code += "from monarch_kernel.actor import shutdown_context, this_host\n"
    code += "status = terminal.shell(this_host(), env={'SHELL': '/bin/sh'}); shutdown_context().get(); sys.exit(status != 0)"
    command = ["nohup", sys.executable, "-c", code]
    done = subprocess.run(
        command, input=b"exec sleep 1000\n", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LONG_S
    )
    assert done.returncode == 1, done.stdout


def test_an_output_that_is_closed_raises(warm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    source, typed = os.pipe()
    read, sink = os.pipe()
    os.close(read)
    os.write(typed, b"echo hello\n")
    try:
        with terminals(monkeypatch, source, sink), pytest.raises(BrokenPipeError):
            shell(this_host(), env=SHELL)
    finally:
        for fd in (source, typed, sink):
            os.close(fd)


def test_a_terminal_gives_its_size_and_is_restored(warm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = pty.openpty()
    found = b""

    def read() -> None:
        nonlocal found
        while b"12 34" not in found:
            found += os.read(mine, 1024)

    import fcntl
    import struct
    import termios

    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 34, 0, 0))
    before = termios.tcgetattr(theirs)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        os.write(mine, b"stty size; exit\n")
        with terminals(monkeypatch, theirs, theirs):
            assert shell(this_host(), env=SHELL) == 0
        reader.join(30)
        assert not reader.is_alive()
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(theirs)
        reader.join(30)
        os.close(mine)


def test_a_shell_needs_one_host() -> None:
    class Several:
        def size(self) -> int:
            return 2

    with pytest.raises(ValueError, match=r"slice\(\)"):
        shell(Several())  # type: ignore[arg-type]
