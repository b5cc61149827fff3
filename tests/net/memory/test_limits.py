"""The free memory is what the tightest of all limits leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from monarch_kernel.net.memory.limits import Room, cores, processes, room

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB of available memory, as Linux describes it."""
    put(
        tmp_path / "proc/meminfo",
        f"MemTotal:       16777216 kB\nMemAvailable:   {8 * GIB // 1024} kB\nHugePages_Total: 0\n",
    )
    put(tmp_path / "proc/sys/vm/overcommit_memory", "0\n")
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def unified(root: Path, path: str, top: str = "sys/fs/cgroup", **files: str) -> None:
    for name, text in files.items():
        put(root / top / path / f"memory.{name}", text)


def test_without_limits_the_memory_of_the_machine_counts(root: Path) -> None:
    assert room(root) == Room(8 * GIB, "free memory")


def test_this_machine_has_free_memory() -> None:
    found = room()
    assert 0 < found.nbytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("top", ["sys/fs/cgroup", "sys/fs/cgroup/unified"])
@pytest.mark.parametrize("name", ["max", "high"])
def test_cached_files_of_control_groups_do_not_count(root: Path, name: str, top: str) -> None:
    put(root / "proc/self/cgroup", "0::/jobs/mine\n")
    unified(root, "jobs/mine", top, current=f"{3 * GIB}\n", stat=f"anon 5\ninactive_file {GIB}\n")
    unified(root, "jobs/mine", top, max="max\n", high="max\n")
    unified(root, "jobs/mine", top, **{name: f"{4 * GIB}\n"})
    assert room(root) == Room(2 * GIB, f"free memory within memory.{name} (4.0 GiB) of the control group")


def test_outer_groups_count_too(root: Path) -> None:
    put(root / "proc/self/cgroup", "0::/jobs/mine\n")
    unified(root, "jobs/mine", current=f"{GIB}\n", max=f"{6 * GIB}\n", stat="")
    unified(root, "jobs", current=f"{3 * GIB}\n", max=f"{4 * GIB}\n", stat="")
    assert room(root).nbytes == GIB


def test_a_group_above_its_limit_leaves_nothing(root: Path) -> None:
    put(root / "proc/self/cgroup", "0::/\n")
    unified(root, "", current=f"{5 * GIB}\n", high=f"{4 * GIB}\n", stat="")
    assert room(root).nbytes == 0


def test_in_a_container_the_group_is_found_by_the_visible_path(root: Path) -> None:
    put(root / "proc/self/cgroup", "9:name=systemd:/docker/1f\n4:cpu,memory:/docker/1f\n0::/docker/1f\n")
    memory = root / "sys/fs/cgroup/memory"
    put(memory / "memory.limit_in_bytes", f"{2 * GIB}\n")
    put(memory / "memory.usage_in_bytes", f"{GIB}\n")
    put(memory / "memory.stat", f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n")
    assert room(root) == Room(GIB + GIB // 2, "free memory within memory.limit_in_bytes (2.0 GiB) of the control group")


def test_the_large_number_of_version_1_is_no_limit(root: Path) -> None:
    put(root / "proc/self/cgroup", "4:memory:/\n")
    put(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    put(root / "sys/fs/cgroup/memory/memory.usage_in_bytes", "100\n")
    assert room(root).nbytes == 8 * GIB


def test_committed_memory_counts_where_overcommit_is_off(root: Path) -> None:
    put(root / "proc/sys/vm/overcommit_memory", "2\n")
    put(root / "proc/meminfo", "MemAvailable: 9000000 kB\nCommitLimit: 3072 kB\nCommitted_AS: 1024 kB\n")
    assert room(root) == Room(2048 * 1024, "memory that may still be committed")


def test_unknown_limits_refuse_nothing(tmp_path: Path) -> None:
    assert room(tmp_path).nbytes > 1 << 50


def test_a_cpu_quota_reduces_the_cores(root: Path) -> None:
    put(root / "proc/self/cgroup", "0::/jobs/mine\n")
    put(root / "sys/fs/cgroup/jobs/mine/cpu.max", "max 100000\n")
    assert cores(root) == len(os.sched_getaffinity(0))
    put(root / "sys/fs/cgroup/jobs/cpu.max", "50000 100000\n")
    assert cores(root) == 0.5


def test_a_quota_of_version_1_counts_too(root: Path) -> None:
    put(root / "proc/self/cgroup", "3:cpu,cpuacct:/mine\n")
    put(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    put(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    assert cores(root) == len(os.sched_getaffinity(0))
    put(root / "sys/fs/cgroup/cpu/mine/cpu.cfs_period_us", "100000\n")
    put(root / "sys/fs/cgroup/cpu/mine/cpu.cfs_quota_us", "25000\n")
    assert cores(root) == 0.25


def test_the_tightest_group_limits_the_processes(root: Path) -> None:
    assert processes(root) is None
    put(root / "proc/self/cgroup", "0::/jobs/mine\n")
    put(root / "sys/fs/cgroup/jobs/mine/pids.max", "max\n")
    put(root / "sys/fs/cgroup/jobs/mine/pids.current", "7\n")
    assert processes(root) is None
    put(root / "sys/fs/cgroup/jobs/pids.max", "100\n")
    put(root / "sys/fs/cgroup/jobs/pids.current", "30\n")
    assert processes(root) == 70
