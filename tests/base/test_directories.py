"""Directories of sessions are short enough for sockets, and can be written."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.base import directories
from monarch_kernel.base.directories import LONGEST_ROOT, make_session_directory, session_roots, temporary_directory
from monarch_kernel.net.transport.base import host_peer, rank_peer
from monarch_kernel.runtime.detached.registry import default_root
from tests.support.stranger import NOBODY, run_as_nobody


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


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory that all users can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        os.chmod(root, 0o755)
        yield Path(root)


RENAME = """
try:
    os.rename(sys.argv[1], sys.argv[1] + "-theirs")
except PermissionError:
    print("refused")
else:
    os.mkdir(sys.argv[1])
    print("replaced")
"""


def test_no_other_user_can_replace_the_directory_of_a_session(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    root.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    directory = make_session_directory()
    try:
        assert run_as_nobody(RENAME, directory) == "refused\n"
    finally:
        os.rmdir(directory)


@pytest.mark.parametrize("mode", [0o755, 0o700, 0o775, 0o1777, 0o1775])
def test_a_directory_of_the_user_or_with_the_sticky_bit_comes_first(
    monkeypatch: pytest.MonkeyPatch, root: Path, mode: int
) -> None:
    root.chmod(mode)
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    assert session_roots()[0] == str(root)
    assert default_root({}, str(root)).parent == root
    assert default_root({"XDG_RUNTIME_DIR": str(root)}, "/tmp") == root / "monarch-kernel"


@pytest.mark.parametrize(
    ("uid", "gid", "mode"), [(-1, -1, 0o777), (-1, NOBODY, 0o775), (NOBODY, -1, 0o1777), (NOBODY, -1, 0o700)]
)
def test_a_directory_in_which_others_replace_files_comes_last(
    monkeypatch: pytest.MonkeyPatch, root: Path, uid: int, gid: int, mode: int
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a directory to another user")
    os.chown(root, uid, gid)
    root.chmod(mode)
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    assert session_roots() == ["/tmp", "/var/tmp", str(root)]
    assert default_root({"XDG_RUNTIME_DIR": str(root)}, str(root)) == Path(f"/tmp/monarch-{os.getuid()}")


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
