"""Shared memory of a GPU that a killed process has left is removed, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from monarch_kernel.actor import this_host
from monarch_kernel.runtime.host.segments import SHARED_MEMORY, remove_segments
from tests.support.waiting import LONG_S, wait_until

UID = f"{os.getuid():x}"


def test_only_segments_of_the_process_are_removed(tmp_path: Path) -> None:
    own = ["torch_480_2086995056_0", "torch_480_1_12", f"cuda.shm.{UID}.1e0.1"]
    others = ["torch_4801_1_0", "torch_48_1_0", f"cuda.shm.{UID}.1e.1", f"cuda.shm.{UID}.1e01.1", "sem.480", "psm_480"]
    for name in own + others:
        (tmp_path / name).touch()
    remove_segments(480, 0.0, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == set(others)


def test_older_segments_are_of_another_process(tmp_path: Path) -> None:
    (tmp_path / "torch_480_1_0").touch()
    os.utime(tmp_path / "torch_480_1_0", (1000.0, 1000.0))
    remove_segments(480, 1001.0, str(tmp_path))
    assert list(tmp_path.iterdir())
    remove_segments(480, 1000.0, str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_directory_that_does_not_exist_has_no_segments(tmp_path: Path) -> None:
    remove_segments(480, 0.0, str(tmp_path / "nothing"))


def test_the_agent_removes_the_segments_of_a_rank_that_was_killed(session: None) -> None:
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    code = "import os, pathlib; path = pathlib.Path(f'/dev/shm/torch_{os.getpid()}_1_0'); path.touch(); str(path)"
    left = Path(mesh.run(code).get(LONG_S).item(r=0))
    assert str(left.parent) == SHARED_MEMORY
    assert left.exists()
    mesh.stop(grace_s=0).get(LONG_S)
    wait_until(lambda: not left.exists(), "the agent to remove the file")
