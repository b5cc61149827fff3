"""Recordings of ranks as torch and the sampler make them, without ranks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from typing import Any

from monarch_kernel.features.profiling.recording import LOOP, Place, Recording, Sample, Started

STEP_S = 0.1
BEGIN_S = 1_790_000_000.0
BASE_NS = 1_789_999_000_000_000_000
AUGMENT = Place("<remote cell [12]>", 8, "augment")
TRAIN = Place("<remote cell [12]>", 20, "<module>")
REDUCE = Place("<remote cell [12]>", 21, "<module>")


def event(name: str, start_s: float, end_s: float, cat: str = "cpu_op", tid: int = 7, pid: int = 900) -> dict[str, Any]:
    ts = (start_s - BASE_NS / 1e9) * 1e6
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": ts,
        "dur": (end_s - start_s) * 1e6,
        "args": {},
    }


def packed(events: list[dict[str, Any]]) -> bytes:
    return gzip.compress(json.dumps({"baseTimeNanoseconds": BASE_NS, "traceEvents": events}).encode())


def recordings(
    slow: Mapping[int, float],
    steps: int = 5,
    ranks: int = 4,
    *,
    loader_s: float = 0.0,
    ahead_s: Mapping[int, float] | None = None,
) -> dict[int, Recording]:
    """Ranks that load, augment, compute for 40 ms, and reduce for 5 ms, in each step.

    Args:
        slow: rank -> the seconds that it spends in ``augment``.
        steps: the number of steps.
        ranks: the number of ranks.
        loader_s: how long each waits for a batch.
        ahead_s: rank -> by how much its clock is ahead.
    """
    found = {}
    step_s = loader_s + max([*slow.values(), 0.0]) + 0.045
    for rank in range(ranks):
        ahead = (ahead_s or {}).get(rank, 0.0)
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 900, "tid": 7, "args": {"name": "python"}},
            event("PyTorch Profiler (0)", BEGIN_S, BEGIN_S + 1, "Trace") | {"pid": "Spans", "tid": "PyTorch Profiler"},
        ]
        samples, started, marks = [], [], [BEGIN_S + ahead]
        for step in range(steps):
            at = BEGIN_S + ahead + step * step_s
            began, own_s = at + loader_s, slow.get(rank, 0.0)
            arrives = began + own_s + 0.04
            ends = began + max([*slow.values(), 0.0]) + 0.045
            if loader_s:
                events.append(event("enumerate(DataLoader)#_X.__next__", at, began, "user_annotation"))
            events += [
                event("aten::linear", began + own_s, arrives),
                event("aten::addmm", began + own_s, arrives),
                event("c10d::allreduce_", arrives, arrives + 0.0001),
                event("gloo:all_reduce", arrives, ends, "user_annotation", tid=8),
            ]
            arrow = {"cat": "fwdbwd", "name": "fwdbwd", "id": step, "pid": 900, "tid": 7, "ts": events[-4]["ts"]}
            events += [{"ph": "s", **arrow}, {"ph": "f", **arrow}]
            started.append(Started("0", "", tuple(range(ranks)), 17 + step, "gloo:all_reduce", arrives))
            look = at
            while look + 0.004 < ends:
                look += 0.004
                place = AUGMENT if look <= began + own_s else TRAIN if look <= arrives else REDUCE
                samples.append(Sample(look, 0.004, place))
            marks.append(at + step_s)
        found[rank] = Recording(
            4000 + rank, "here", marks[0], marks[-1], LOOP, tuple(marks), tuple(samples), tuple(started), packed(events)
        )
    return found
