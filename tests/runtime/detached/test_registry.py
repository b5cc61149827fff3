"""The registry finds meshes that outlive their kernel, and lets one process at a time own each."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from monarch_kernel.errors import AttachError
from monarch_kernel.net.wire.config import Manifest
from monarch_kernel.net.wire.messages import Run
from monarch_kernel.runtime.detached.registry import Home, default_root, find, home_of
from monarch_kernel.runtime.host.processes import open_process, start_ticks
from monarch_kernel.runtime.worker.replay_log import ReplayLog
from monarch_kernel.testing import rank_spec
from tests.support.waiting import wait_until


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="x-") as directory:
        yield Path(directory) / "meshes"


def manifest(pid: int, started: int) -> Manifest:
    return Manifest("1", "t", "token", 0, 1, pid, started, (rank_spec(1),), False, "cpu", {})


def start_owner(root: Path, then: str = "") -> subprocess.Popen[str]:
    """Start another process, which owns the mesh."""
    code = f"""
import pathlib, sys
from monarch_kernel.runtime.detached.registry import Home
home = Home(pathlib.Path({str(root)!r}), "t")
home.lock()
{then}
print("has it", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "has it\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_the_root_is_in_the_runtime_directory_or_a_directory_of_the_user(short_path: Path) -> None:
    assert default_root({"XDG_RUNTIME_DIR": str(short_path)}, "/tmp") == short_path / "monarch-kernel"
    assert default_root({"XDG_RUNTIME_DIR": str(short_path / "gone")}, "/tmp") == Path(f"/tmp/monarch-{os.getuid()}")
    assert default_root({}, "/tmp") == Path(f"/tmp/monarch-{os.getuid()}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_a_root_that_another_user_has_made_first_is_not_in_the_way(short_path: Path, kind: str) -> None:
    temporary, user = short_path / "t", short_path / "u"
    temporary.mkdir()
    usual = temporary / f"monarch-{os.getuid()}"
    environment = {"HOME": str(user)}
    assert default_root(environment, str(temporary)) == usual
    if kind == "directory":
        usual.mkdir(0o777)
    elif kind == "file":
        usual.touch()
    else:
        usual.symlink_to(user)
    os.chown(usual, 12345, 12345, follow_symlinks=False)
    root = default_root(environment, str(temporary))
    assert root.is_relative_to(user / ".monarch")
    home = Home(root, "t")
    home.create()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    (usual.rmdir if kind == "directory" else usual.unlink)()
    assert default_root(environment, str(temporary)) == root  # there is still a mesh
    home.remove()
    assert default_root(environment, str(temporary)) == usual


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_the_error_says_what_is_in_the_way(short_path: Path) -> None:
    usual = short_path / f"monarch-{os.getuid()}"
    usual.mkdir()
    os.chown(usual, 12345, 12345)
    root = default_root({}, str(short_path))
    assert root == usual
    with pytest.raises(
        AttachError, match=r"belongs to another user \(uid 12345\), and is not used; set XDG_RUNTIME_DIR to"
    ):
        Home(root, "t").create()


def test_only_the_user_can_access_the_directory(root: Path) -> None:
    home = Home(root, "t")
    old = os.umask(0)
    try:
        home.create()
        home.write(manifest(os.getpid(), start_ticks(os.getpid())))
    finally:
        os.umask(old)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (root, home.path)] == [0o700, 0o700]
    assert {stat.S_IMODE(file.stat().st_mode) for file in home.path.iterdir()} == {0o600}
    home.remove()
    assert not root.exists()


@pytest.mark.parametrize("where", ["root", "home"])
def test_a_directory_that_others_may_enter_is_not_used(root: Path, where: str) -> None:
    home = Home(root, "t")
    home.create()
    home.write(manifest(os.getpid(), start_ticks(os.getpid())))
    home.unlock()
    (root if where == "root" else home.path).chmod(0o710)
    for use in (home.lock, home.manifest, home.look, Home(root, "u").create if where == "root" else home.lock):
        with pytest.raises(AttachError, match=r"can be entered by other users \(mode 0710\).* chmod 700"):
            use()


def test_a_link_is_not_followed(root: Path) -> None:
    elsewhere = Home(root.parent, "elsewhere")
    root.mkdir(0o700)
    elsewhere.path.mkdir(0o700)
    (root / "t").symlink_to(elsewhere.path)
    with pytest.raises(AttachError, match="is not a directory; remove it"):
        Home(root, "t").lock()


def test_one_process_owns_a_mesh_until_it_ends(root: Path) -> None:
    home = Home(root, "t")
    home.create()
    home.unlock()
    other = start_owner(root)
    try:
        assert home.owner() == other.pid
        with pytest.raises(AttachError, match=f"attached to another kernel, pid {other.pid}, which is alive"):
            home.lock()
    finally:
        end(other)
    assert home.owner() == 0
    home.lock()
    assert home.owner() == os.getpid()
    home.remove()


def test_the_owner_is_known_without_the_holder_file(root: Path) -> None:
    home = Home(root, "t")
    home.create()
    home.unlock()
    other = start_owner(root, "(home.path / 'holder').unlink()")
    try:
        assert home.owner() == other.pid
        with pytest.raises(AttachError, match=f"attached to another kernel, pid {other.pid}, which is alive"):
            home.lock()
    finally:
        end(other)
    home.lock()
    home.remove()


def test_a_fork_of_the_owner_does_not_own_the_mesh(root: Path) -> None:
    home = Home(root, "t")
    home.create()
    home.unlock()
    other = start_owner(root, "import os, time\nif os.fork() == 0:\n    os.close(1); sys.stdin.read(); os._exit(0)")
    try:
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert home.owner() == 0  # although the child is alive
    finally:
        end(other)


def test_asking_for_the_owner_does_not_release_the_lock(root: Path) -> None:
    home = Home(root, "t")
    home.create()
    assert home.owner() == Home(root, "t").owner() == os.getpid()
    code = f"""
import pathlib
from monarch_kernel.runtime.detached.registry import Home
print(Home(pathlib.Path({str(root)!r}), "t").owner())
"""
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(seen.stdout) == os.getpid()
    home.remove()


def test_a_name_can_be_used_once(root: Path) -> None:
    home = Home(root, "t")
    home.create()
    with pytest.raises(AttachError, match="there is already a mesh in"):
        Home(root, "t").create()
    assert [found.name for found in find(root)] == ["t"]
    assert sorted(path.name for path in root.iterdir()) == ["t"]  # nothing is left of the attempt
    home.remove()


def test_a_long_name_is_refused(root: Path) -> None:
    with pytest.raises(AttachError, match="choose a shorter name"):
        Home(root, "t" * 100).create()


def test_a_mesh_that_has_ended_is_removed(root: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    home = Home(root, "t")
    home.create()
    home.write(manifest(process.pid, start_ticks(process.pid)))
    home.unlock()
    there = home_of(root, "t")
    assert there is not None
    assert there.manifest().agent_pid == process.pid
    process.kill()
    wait_until(lambda: not start_ticks(process.pid), "the process to end")  # a zombie has ended
    assert home_of(root, "t") is None
    assert not root.exists()
    process.communicate()


def test_the_end_of_the_time_limit_is_reported(root: Path) -> None:
    home = Home(root, "t")
    home.create()
    home.write(replace(manifest(os.getpid(), start_ticks(os.getpid())), keep_s=90 * 60.0))
    home.mark_detached(time.time())
    assert home.time_over() == ""
    home.mark_detached(time.time() - 90 * 60)
    assert home.time_over().startswith("its time is over: it was kept for 90 m without a kernel, until ")
    home.mark_attached()
    assert home.time_over() == ""
    home.remove()


def use(root: Path, name: str, times: int) -> subprocess.Popen[str]:
    """Start another process, which brings up and removes a mesh repeatedly."""
    code = f"""
import pathlib
from monarch_kernel.runtime.detached.registry import Home
for _ in range({times}):
    home = Home(pathlib.Path({str(root)!r}), {name!r})
    home.create()
    home.remove()
"""
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def test_the_root_may_be_removed_while_a_mesh_is_created(root: Path) -> None:
    others = [use(root, name, 2000) for name in ("a", "b")]
    assert [other.communicate()[1] for other in others] == ["", ""]
    assert not root.exists()


def test_a_directory_that_is_removed_concurrently_is_gone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Home(root, "t").is_gone()
    root.mkdir(0o700)
    assert Home(root, "t").is_gone()
    monkeypatch.chdir(root)
    root.rmdir()  # the working directory still exists, as for a process that looked before, but nothing can be created in it
    with pytest.raises(AttachError, match="is gone"):
        Home(Path(), "").lock()


def test_a_thread_that_reuses_a_pid_is_not_the_process() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        assert open_process(thread.native_id, start_ticks(thread.native_id)) == -1
    finally:
        over.set()
        thread.join()


def test_a_rank_whose_pid_is_reused_is_dead(root: Path) -> None:
    home = Home(root, "t")
    home.create()
    record = home.path / "rank-1"
    specs = (replace(rank_spec(1), record=str(record)),)
    home.write(replace(manifest(os.getpid(), start_ticks(os.getpid())), specs=specs))
    ledger = ReplayLog(str(record))
    ledger.take(Run(1, "x", 5))
    assert home.look().ranks == ((True, "cell [5]"),)
    written = json.loads(record.read_text())
    record.write_text(json.dumps({**written, "started": written["started"] - 1}))
    assert home.look().ranks == ((False, "cell [5]"),)
    home.remove()


def test_a_reused_pid_belongs_to_another_process() -> None:
    pid = os.getpid()
    assert open_process(pid, start_ticks(pid) + 1) == -1
    pidfd = open_process(pid, start_ticks(pid))
    assert pidfd >= 0
    os.close(pidfd)


def test_a_mesh_that_never_came_up_is_removed_after_its_kernel(root: Path) -> None:
    home = Home(root, "t")
    home.create()
    home.unlock()
    other = start_owner(root)
    assert home_of(root, "t") is not None  # it is being brought up
    end(other)
    assert home_of(root, "t") is None


def test_an_unreadable_manifest_is_rejected_but_not_removed(root: Path) -> None:
    home = Home(root, "t")
    home.create()
    (home.path / "manifest").write_text('{"name": "t"}')
    home.unlock()
    found = home_of(root, "t")
    assert found is not None
    with pytest.raises(AttachError, match="holds no mesh that can be attached"):
        found.look()
    home.lock()
    home.remove()
