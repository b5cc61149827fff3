"""Measure whether the watch reports what goes wrong, and nothing else, and what it costs: ``python -m benchmarks.watch``.

Eight ranks run a loop whose steps take 30 ms, most of it asleep, so that few cores suffice. In half of the runs one rank
sleeps 20 ms longer, in a function. A profile of 10 steps must name that rank and the function, and none in the other runs. Then
each fault of `FAULTS` is made once: the cell and the view must report it within 10 s. Then a healthy loop runs for some
minutes, while the watch of loops and of waits must say nothing. Last, the costs of the times that are always noted are measured
in a rank. The program ends with status 1 if a measure is missed.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from monarch_kernel.actor import ProcMesh, shutdown_context, this_host
from monarch_kernel.features.live.controller import LoopControl
from monarch_kernel.notebook.cells.loop_watch import LoopWatch
from monarch_kernel.notebook.cells.wait_watch import WaitWatch
from monarch_kernel.notebook.view.errors import error_block
from monarch_kernel.train.process_group.worker import GroupStore

RANKS = 8
STEPS = 10
PRELUDE = """
import random, time, torch, torch.distributed as dist
from monarch_kernel import live
def augment():
    time.sleep(0.02)
"""
LOOP = """
for step in live.loop():
    time.sleep(0.025 + random.random() * 0.005)
    if rank == {slow}:
        augment()
    dist.all_reduce(torch.ones(4))
"""
MODEL = """
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
def step_of_model(step):
    model.zero_grad()
    model(torch.full((2, 8), 0.5)).sum().backward()
    for each in model.parameters():
        dist.all_reduce(each.grad)
"""
FAULTS = {
    "hang": (
        "time.sleep(60) if rank == 3 else None\ndist.all_reduce(torch.ones(4))",
        "[3] has not started it",
    ),
    "not a number": (
        "for step in live.loop():\n    time.sleep(0.02)\n    live.log(loss=float('nan') if (rank, step) == (2, 9) else 1.0)",
        "loss is nan in step 9, first on [2]",
    ),
    "loss spike": (
        "for step in live.loop():\n    time.sleep(0.01)\n"
        "    live.log(loss=50.0 if step == 200 else 2 + random.random() / 10)",
        "in step 200 on [0-7]",
    ),
    "out of memory": ("kept = torch.zeros(1 << 20)\nhuge = torch.empty(1 << 60)", "you tried to allocate"),
    "drift": (
        f"{MODEL}for step in live.loop():\n    time.sleep(0.02)\n    live.check(model=model, every=10)\n"
        "    with torch.no_grad(): model.weight += 0.5 if (rank, step) == (5, 14) else 0.25",
        "model.weight: [5] differs",
    ),
    "slow loader": (
        "class Rows(torch.utils.data.Dataset):\n    def __len__(self): return 100_000\n"
        "    def __getitem__(self, i):\n        time.sleep(0.04)\n        return i\n"
        "rows = iter(torch.utils.data.DataLoader(Rows()))\n"
        "for step in live.loop():\n    next(rows)\n    time.sleep(0.005)",
        "wait for the DataLoader",
    ),
    "straggler": (LOOP.format(slow=6).replace("augment()", "time.sleep(0.2)"), "the other ranks wait for [6]"),
    "flipped bit": (
        f"{MODEL}for step in live.loop():\n    time.sleep(0.02)\n    step_of_model(step)\n"
        "    if (rank, step) == (4, 14): model.weight.grad.view(torch.int32)[2, 3] ^= 1 << 12\n"
        "    live.check(model=model, every=2)",
        "the gradient of model.weight: [4] differs",
    ),
}
"""Fault -> a cell that makes it, and a part of the line about it; what a row of the table of rules promises."""

TOLD_S = 10.0
COSTS = """
import statistics
from monarch_kernel.features.profiling.arrivals import Arrivals
def cost_of_note():
    arrivals, members = Arrivals(), tuple(range(8))
    began = time.perf_counter()
    for number in range(1, 20_001):
        arrivals.note("0", members, number, began)
    return (time.perf_counter() - began) / 20_000
def cost_of_take():
    arrivals, members = Arrivals(), tuple(range(8))
    for number in range(1, 65):
        arrivals.note("0", members, number, 0.0)
    began = time.perf_counter()
    arrivals.take()
    return time.perf_counter() - began
[statistics.median(cost() for _ in range(20)) for cost in (cost_of_note, cost_of_take)]
"""


@contextmanager
def running(mesh: ProcMesh, code: str) -> Iterator[int]:
    """Run a cell with a loop until the end of the block; gives the number of its request."""
    future = mesh.run_cell(code, cell=2)
    while not any(loop.view().state == "running" for loop in mesh.loops):
        time.sleep(0.01)
    try:
        yield future.id
    finally:
        mesh.loop.stop()
        future.get()


def named(mesh: ProcMesh, slow: int) -> tuple[int, str]:
    """The rank that a profile names, and the function; -1 if it names none."""
    with running(mesh, LOOP.format(slow=slow)):
        found = mesh.profile(STEPS, seconds=60.0).findings.straggler
    return (-1, "") if found is None else (found.rank, "" if found.place is None else found.place.function)


class Watched:
    """What the notebook says about a cell while it runs.

    Args:
        mesh: the mesh.
        request: the request of the cell.
        after_s: the age from which a wait is reported.

    Attributes:
        said: the lines.
    """

    def __init__(self, mesh: ProcMesh, request: int, after_s: float) -> None:
        now = time.monotonic()
        control = LoopControl(mesh.runtime)
        self.said: list[str] = []
        self._loops = LoopWatch(mesh, mesh.ranks, lambda: control.trouble(request), self.said.append, now)
        self._waits = WaitWatch(mesh, mesh.ranks, self.said.append, after_s, now)

    def poll(self) -> None:
        now = time.monotonic()
        self._loops.poll(now)
        self._waits.poll([None] * RANKS, now)

    def end(self) -> None:
        self._loops.end(time.monotonic())
        self._waits.end(time.monotonic(), succeeded=False)


def told(mesh: ProcMesh, store: GroupStore, fault: str) -> tuple[float, str]:
    """After how many seconds the cell and the view have told a fault, and how; infinity if that takes too long."""
    code, expected = FAULTS[fault]
    future = mesh.run_cell(code, cell=2)
    watched = Watched(mesh, future.id, after_s=5.0)
    began = time.monotonic()
    found: dict[str, str] = {}
    while len(found) < 2 and time.monotonic() < began + 3 * TOLD_S:
        watched.poll()
        view = mesh.view()
        error = future.exception(0.0) if future.done() else None
        places = {
            "cell": [*watched.said, "" if error is None else "\n".join(error_block(error, color=False))],
            "view": [*(wait.text for wait in view.waits), *(rank.last_error for rank in view.ranks)],
        }
        for place, texts in places.items():
            if (text := next((each for each in texts if expected in each), None)) is not None:
                found.setdefault(place, text)
        time.sleep(0.05)
    took_s = time.monotonic() - began
    watched.end()
    if not future.done():
        if any(loop.view().state != "over" for loop in mesh.loops):
            mesh.loop.stop()
        else:
            mesh.interrupt()
    failed = future.exception() is not None
    if failed:
        store.form(mesh).get()
    return (took_s, found["cell"]) if len(found) == 2 else (math.inf, f"only in {' and '.join(found) or 'no place'}")


def alarms(mesh: ProcMesh, minutes: float) -> list[str]:
    """What the notebook says about a healthy loop."""
    with running(mesh, LOOP.format(slow=-1)) as request:
        watched = Watched(mesh, request, after_s=10.0)
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            watched.poll()
            time.sleep(0.05)
        watched.end()
    return watched.said


def main() -> int:
    """Measure, and print the results; returns 1 if a measure is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="runs with a slow rank, and as many without (%(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="length of the healthy run (%(default)s)")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mesh = this_host().spawn_procs({"gpus": RANKS}, name="t", device="cpu")
    store = GroupStore()
    store.form(mesh).get()
    mesh.run_cell(PRELUDE, cell=1).get()
    slow = [random.randrange(RANKS) for _ in range(options.runs)]
    found = [named(mesh, rank) for rank in slow]
    right = sum(one == (rank, "augment") for one, rank in zip(found, slow))
    print(
        f"20 ms on one of {RANKS} ranks: {right} of {options.runs} profiles of {STEPS} steps name it and its function"
    )
    blamed = sum(named(mesh, -1) != (-1, "") for _ in range(options.runs))
    print(f"no slow rank: {blamed} of {options.runs} profiles name one")
    missed = []
    for fault in FAULTS:
        took_s, text = told(mesh, store, fault)
        missed += [fault] * (took_s > TOLD_S)
        print(
            f"{fault}: {'not reported' if took_s == math.inf else f'reported after {took_s:.1f} s'}: {first_line(text)}"
        )
    print(
        f"{len(FAULTS) - len(missed)} of {len(FAULTS)} faults are reported in the cell and in the view within {TOLD_S:g} s"
    )
    said = alarms(mesh, options.minutes)
    print(f"a healthy loop for {options.minutes:g} min: {len(said)} messages {said or ''}")
    costs = mesh.run_cell(COSTS, want_value=True).get()
    note_s, take_s = (statistics.median(each.value[at] for each in costs.values()) for at in (0, 1))
    print(f"always on: {note_s * 1e6:.2f} us for a collective, and {take_s * 1e6:.0f} us a second for the report")
    store.close()
    shutdown_context().get()
    return int(right < options.runs or blamed > 0 or bool(missed) or bool(said))


def first_line(text: str) -> str:
    """The first line of a text that is not empty, cut to a readable length."""
    line = next(iter(text.split("\n")), "")
    return line if len(line) <= 120 else f"{line[:119]}…"


if __name__ == "__main__":
    sys.exit(main())
