"""Directories of sessions are short enough for sockets, and can be written."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from monarch_kernel.base import directories
from monarch_kernel.base.directories import LONGEST_ROOT, make_session_directory, session_roots, temporary_directory
from monarch_kernel.net.transport.base import host_peer, rank_peer
from monarch_kernel.runtime.detached.registry import default_root


@pytest.fixture(autouse=True)
def _no_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def use(monkeypatch: pytest.MonkeyPatch, *roots: Path) -> None:
    monkeypatch.setattr(directories, "session_roots", lambda: [str(root) for root in roots])


def test_the_temporary_directory_is_used_if_its_path_is_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    short, long = "/x" * (LONGEST_ROOT // 2), "/" + "x" * LONGEST_ROOT
    monkeypatch.setattr(tempfile, "tempdir", short)
    assert session_roots()[0] == short
    monkeypatch.setattr(tempfile, "tempdir", long)
    assert session_roots() == ["/tmp", "/var/tmp"]
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert session_roots()[0] == "/run/user/7"


def test_detached_meshes_have_a_short_path_too() -> None:
    long = "/" + "x" * LONGEST_ROOT
    assert default_root({}, long) == Path(f"/tmp/monarch-{os.getuid()}")


def test_the_longest_socket_fits_in_the_longest_directory() -> None:
    directory = "x" * LONGEST_ROOT + "/monarch-12345678"
    for name in rank_peer(10**6, 100).decode(), host_peer(10**6).decode() + ".fds", "controller":
        assert len(f"{directory}/{name}") <= 107


def test_a_directory_is_private_and_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path)
    directory = Path(make_session_directory())
    assert directory.parent == tmp_path
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert list(directory.iterdir()) == []


def test_the_next_directory_is_used_where_one_takes_no_files(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    (short_path / "good").mkdir()
    use(monkeypatch, short_path / "missing", Path("/proc"), short_path / "good")
    assert Path(make_session_directory()).parent == short_path / "good"


def test_the_next_directory_is_used_where_one_takes_no_sockets(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    deep = short_path / ("x" * 100)  # no socket can be bound in it, as on some network file systems
    deep.mkdir()
    use(monkeypatch, deep, short_path)
    assert len(str(short_path)) < LONGEST_ROOT
    assert Path(make_session_directory()).parent == short_path
    assert list(deep.iterdir()) == []


def test_an_error_names_every_directory_and_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path / "missing", Path("/proc"))
    with pytest.raises(OSError, match="no directory for the sockets of a session") as caught:
        make_session_directory()
    assert f"{tmp_path}/missing (No such file or directory), /proc (" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_any_writable_directory_there_is_still_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    assert temporary_directory() == "/tmp"


def test_a_bound_socket_would_not_fit_in_a_long_directory(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError, match="too long"):
        listener.bind(str(tmp_path / ("x" * 100)))
