"""A death is laid to the out-of-memory killer only if its counter rose, or if little memory was free."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch_kernel.net.memory.limits import oom_kills
from monarch_kernel.runtime.host.oom_watch import OomWatch

GROUP = "sys/fs/cgroup/jobs/mine"


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path / "proc/self/cgroup", "0::/jobs/mine\n")
    put(tmp_path / GROUP / "memory.events", "low 0\noom 1\noom_kill 3\n")
    put(tmp_path / "proc/vmstat", "nr_free_pages 100\noom_kill 7\n")
    put(tmp_path / "proc/meminfo", f"MemAvailable: {8 << 20} kB\n")
    return tmp_path


def test_the_counters_of_both_versions_are_read(root: Path) -> None:
    assert oom_kills(root) == {f"/{GROUP}/memory.events": 3, "/proc/vmstat": 7}
    put(root / "proc/self/cgroup", "4:memory:/mine\n")
    put(root / "sys/fs/cgroup/memory/mine/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert oom_kills(root) == {"/sys/fs/cgroup/memory/mine/memory.oom_control": 2, "/proc/vmstat": 7}
    assert oom_kills(root / "nothing") == {}


def test_a_counter_that_rose_is_evidence_for_some_seconds(root: Path) -> None:
    watch = OomWatch(root)
    assert watch.kills() == ""
    put(root / GROUP / "memory.events", "oom_kill 4\n")
    says = f"oom_kill in /{GROUP}/memory.events rose from 3 to 4"
    assert watch.kills() == says
    for now in (0.0, 1.0, 2.0):  # the counter may be read before the agent hears of the death
        watch.read(now)
        assert watch.kills() == says
    for now in (8.0, 9.0, 15.0):
        watch.read(now)
    assert watch.kills() == ""


def test_little_free_memory_at_the_last_reading_is_evidence(root: Path) -> None:
    watch = OomWatch(root)
    watch.read(0.0)
    assert watch.low_memory() == ""
    put(root / GROUP / "memory.current", f"{960 << 20}\n")
    put(root / GROUP / "memory.max", f"{1 << 30}\n")
    watch.read(1.0)
    assert watch.low_memory() == (
        "at the last reading there were 64 MiB of free memory within memory.max (1.0 GiB) of the control group"
    )
