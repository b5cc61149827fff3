"""What the processes of a notebook hold, again and again, and what of it grows: leaks by kind."""

from __future__ import annotations

import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import psutil

from tests.support.leftovers import SHARED_MEMORY
from tests.support.processes import command_of

__all__ = ["KINDS", "Growth", "Held", "grown", "held_by", "per_round", "roles_of"]

KINDS = ("processes", "descriptors", "threads", "segments")
"""What is counted; memory is measured beside it."""

SETTLED = 3
"""Samples at the beginning and at the end that are compared, if there are enough."""


@dataclass
class Held:
    """What the processes hold at one moment.

    Attributes:
        counts: for each of `KINDS`: what it is, with the role of the process -> how many.
        memory: role -> private and shared memory in bytes.
        after: what has happened before, for people.
    """

    counts: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})
    memory: dict[str, int] = field(default_factory=dict)
    after: str = ""

    @property
    def n_threads(self) -> int:
        """Number of threads of all processes."""
        return self.counts["threads"].total()


@dataclass(frozen=True)
class Growth:
    """Something of which there is more at the end than at the beginning; ``since`` is what happened before there was more."""

    kind: str
    what: str
    before: int
    after: int
    since: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}: {self.before}, later {self.after}" + (
            f", since {self.since}" * bool(self.since)
        )


def roles_of(kernel: int, processes: Iterable[psutil.Process], ranks: Sequence[int]) -> dict[int, str]:
    """Pid -> the role of each process of a notebook; processes that user code or a library started have their command."""
    roles = {kernel: "kernel", **{pid: f"rank {rank}" for rank, pid in enumerate(ranks)}}
    for process in processes:
        if process.pid in roles:
            continue
        command = command_of(process)
        if command:
            names = [name for name in ("agent", "zygote") if name in command]
            roles[process.pid] = names[0] if names else " ".join(command)[:100]
    return roles


def held_by(roles: dict[int, str]) -> Held:
    """What these processes hold now; ranks are counted together, since some are replaced."""
    held = Held()
    for pid, role in roles.items():
        kind = "ranks" if role.startswith("rank ") else role
        with suppress(OSError):  # it has ended meanwhile
            links = list(_links(pid))
            threads = list(_threads(pid))
            held.memory[role] = held.memory.get(role, 0) + _memory(pid)
            held.counts["processes"][kind] += 1
            held.counts["threads"].update(f"{kind} {name}" for name in threads)
            held.counts["descriptors"].update(f"{kind} {_kind_of(link)}" for link in links)
    held.counts["segments"].update(_segments(roles))
    return held


def _links(pid: int) -> Iterable[str]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            yield os.readlink(f"/proc/{pid}/fd/{name}")


def _threads(pid: int) -> Iterable[str]:
    """The name of each thread; threads of Python have that of the process that made them."""
    for name in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):
            yield Path(f"/proc/{pid}/task/{name}/comm").read_text().strip()


def _kind_of(link: str) -> str:
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*", "N", link.removesuffix(" (deleted)"))


def _segments(roles: Iterable[int]) -> Iterable[str]:
    """Each memory file that the processes share or lend, and each file of theirs in ``/dev/shm``, once."""
    found = {}
    for pid in roles:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    path = f"/proc/{pid}/fd/{name}"
                    link = os.readlink(path)
                    if link.startswith(("/memfd:", f"{SHARED_MEMORY}/")):
                        found[os.stat(path).st_ino] = _kind_of(link)
    return found.values()


def _memory(pid: int) -> int:
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:] if ":" in line
    )
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return 1024 * sum(
        int(source.get(name, "0 kB").split()[0])
        for source, name in (
            (fields, "Private_Dirty"),
            (fields, "Private_Clean"),
            (fields, "Swap"),
            (status, "RssShmem"),
        )
    )


def grown(samples: Sequence[Held]) -> list[Growth]:
    """What has grown for good: there is more of it in each of the last samples than in any of the first ones."""
    few = max(1, min(SETTLED, len(samples) // 2))
    first, last = samples[:few], samples[-few:]
    found = []
    for kind in KINDS:
        for what in sorted(set().union(*(sample.counts[kind] for sample in last))):
            before, after = (
                max(each.counts[kind][what] for each in first),
                min(each.counts[kind][what] for each in last),
            )
            if len(samples) > 1 and after > before:
                few_enough = max(i for i, each in enumerate(samples) if each.counts[kind][what] <= before)
                found.append(Growth(kind, what, before, after, samples[few_enough + 1].after))
    return found


def per_round(values: Sequence[float]) -> float:
    """How much a value grows from one sample to the next: the median slope of all pairs, which outliers do not change."""
    pairs = list(combinations(list(enumerate(values))[:: max(1, len(values) // 200)], 2))
    return statistics.median((b - a) / (j - i) for (i, a), (j, b) in pairs) if pairs else 0.0
