"""What ``%mesh up`` says of the GPUs of ranks that were just started, and of the shared memory of the machine."""

from __future__ import annotations

import os
from importlib import invalidate_caches
from pathlib import Path

import pytest

from monarch_kernel.actor.start_notes import gpu_notes, shadow_notes, shared_memory_notes

CPUS, GPUS = ["cpu", "cpu"], ["cuda:0", "cuda:0"]


@pytest.mark.parametrize("visible", ["NoDevFiles", "7", "MIG-1", "abc,,0"])
def test_a_name_that_is_no_gpu_is_named(visible: str) -> None:
    line = f"CUDA_VISIBLE_DEVICES={visible} names no GPU that torch can use: ranks use CPUs"
    assert gpu_notes(CPUS, "auto", 2, {}, visible) == [line]
    assert gpu_notes(CPUS, "auto", 2, {"CUDA_VISIBLE_DEVICES": visible}, "0") == [line]
    (elsewhere,) = gpu_notes(CPUS, "auto", 2, {"CUDA_VISIBLE_DEVICES": visible}, None)
    assert "does not name a GPU that torch can use for each rank: ranks use CPUs" in elsewhere


@pytest.mark.parametrize(
    ("devices", "wanted", "visible"),
    [(CPUS, "auto", ""), (CPUS, "auto", "-1"), (CPUS, "cpu", "NoDevFiles"), (GPUS, "auto", "0,1")],
)
def test_what_was_asked_for_needs_no_line(devices: list[str], wanted: str, visible: str) -> None:
    assert gpu_notes(devices, wanted, 2, {}, visible) == []


def test_a_line_says_that_nccl_refuses_ranks_that_share_a_gpu() -> None:
    (line,) = gpu_notes(GPUS, "auto", 2, {"CUDA_VISIBLE_DEVICES": "0,0,1"}, "")
    assert line.startswith("several ranks share GPU 0: NCCL refuses two ranks on one GPU")
    assert gpu_notes(GPUS, "auto", 2, {"CUDA_VISIBLE_DEVICES": "0,1,0"}, "") == []


def test_a_file_that_hides_a_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert shadow_notes() == []
    (tmp_path / "torch.py").touch()
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").touch()
    invalidate_caches()
    assert [line.split()[0] for line in shadow_notes()] == ["torch.py", "numpy/__init__.py"]


def test_shared_memory_that_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shared_memory_notes(str(tmp_path)) == []
    (line,) = shared_memory_notes(str(tmp_path / "missing"))
    assert line.startswith(
        f"{tmp_path}/missing can't be used (No such file or directory), and workers of DataLoader and NCCL"
    )
    (line,) = shared_memory_notes("/proc/self/fdinfo")
    assert line.startswith("/proc/self/fdinfo ")
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((real.f_bsize, 4096, 16, 1, 1, *tuple(real)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    (line,) = shared_memory_notes(str(tmp_path))
    assert "has only 4.0 KiB free" in line or "has only 4 KiB free" in line
