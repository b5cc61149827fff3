"""One round of `benchmarks.compare`: runs the package that is on the path, in one mesh, and prints its costs as JSON.

It runs as a file, beside any commit of the package, so it uses only what all of them have. Processor time comes from the
scheduler's own counters, which are exact to a nanosecond; a busy machine changes it far less than elapsed time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from monarch_kernel.actor import Actor, endpoint, shutdown_context, this_host

TENSOR_NBYTES = 64 << 20


class Echo(Actor):
    """Returns its argument."""

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


def spent(pid: int) -> tuple[float, int]:
    """Return the processor time of a process, in us, and how often its threads were switched away from."""
    us, switches = 0.0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        us += int((task / "schedstat").read_text().split()[0]) / 1e3
        for line in (task / "status").read_text().splitlines():
            if "ctxt_switches" in line:
                switches += int(line.split()[1])
    return us, switches


def measure(groups: dict[str, Sequence[int]], times: int, do: Callable[[], object]) -> dict[str, float]:
    """Execute something many times; returns the costs of one execution by kind of process, and the median of its time."""

    def sums() -> dict[str, tuple[float, int]]:
        of_each = {name: [spent(pid) for pid in pids] for name, pids in groups.items()}
        return {name: (sum(us for us, _ in each), sum(n for _, n in each)) for name, each in of_each.items()}

    for _ in range(20):
        do()
    before = sums()
    took = []
    for _ in range(times):
        begin = time.perf_counter()
        do()
        took.append(time.perf_counter() - begin)
    after = sums()
    found = {"elapsed, us": 1e6 * statistics.median(took)}
    for name in groups:
        found[f"{name}, CPU us"] = (after[name][0] - before[name][0]) / times
        found[f"{name}, switches"] = (after[name][1] - before[name][1]) / times
    return found


def start(ranks: int) -> tuple[Any, float]:
    """Start a mesh; returns it, and the time that it took, in us."""
    begin = time.perf_counter()
    procs = this_host().spawn_procs(per_host={"gpus": ranks})
    procs.run("pass").get()
    return procs, 1e6 * (time.perf_counter() - begin)


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--times", type=int, default=300)
    args = parser.parse_args()
    procs, first_us = start(args.ranks)
    actors = cast(Any, procs.spawn("echo", Echo))
    actors.initialized.get()
    first = actors.slice(gpus=0)
    ranks = [rank.pid for rank in procs.view().ranks]
    others = [child for child in psutil.Process().children(recursive=True) if child.pid not in ranks]
    agents = [child.pid for child in others if "agent" in child.cmdline()]
    groups = {"controller": [os.getpid()], "ranks": ranks, "agent": agents}
    found = {
        "call to one rank": measure(groups, args.times, lambda: first.echo.call_one(1).get()),
        "call on all ranks": measure(groups, args.times, lambda: actors.echo.call(1).get()),
        "silent cell": measure(groups, args.times, lambda: procs.run("pass").get()),
        "cell with a value": measure(groups, args.times, lambda: procs.run("x = 1\nx + 1").get()),
    }
    begin = time.perf_counter()
    futures = [first.echo.call_one(i) for i in range(20 * args.times)]
    assert [future.get() for future in futures] == list(range(len(futures)))
    each_us = 1e6 * (time.perf_counter() - begin) / len(futures)
    found["outstanding call to one rank"] = {"elapsed, us": each_us}
    tensor = torch.ones(TENSOR_NBYTES // 4)
    found["64 MiB to a rank and back"] = measure(groups, 20, lambda: first.echo.call_one(tensor).get())
    next_us = []
    for _ in range(5):
        other, took_us = start(args.ranks)
        next_us.append(took_us)
        other.stop().get()
    found["start of the first mesh"] = {"elapsed, us": first_us}
    found["start of another mesh"] = {"elapsed, us": statistics.median(next_us)}
    seconds = 3.0
    before = {name: [spent(pid) for pid in pids] for name, pids in groups.items()}
    time.sleep(seconds)
    idle = {}
    for name, pids in groups.items():
        now = [spent(pid) for pid in pids]
        idle[f"{name}, CPU us"] = sum(b[0] - a[0] for a, b in zip(before[name], now, strict=True)) / seconds
        idle[f"{name}, switches"] = sum(b[1] - a[1] for a, b in zip(before[name], now, strict=True)) / seconds
    found["one idle second"] = idle
    shutdown_context().get()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
