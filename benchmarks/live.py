"""Measure the cost of a live loop on a rank, and the delay of a changed knob: ``python -m benchmarks.live``.

Blocks of steps by ``live.loop``, with a knob and a metric, and by ``range`` take turns in one process, so that other work of
the machine affects both alike. The results are medians of their differences.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

from monarch_kernel.actor import ProcMesh, shutdown_context, this_host
from monarch_kernel.features.live.handle import LiveLoop

RANKS = 2
BLOCK = 20_000
BARE = f"""
import time
def block(steps, body):
    began = time.perf_counter()
    for step in steps:
        body()
    return (time.perf_counter() - began) / {BLOCK} * 1e6
def used():
    live.knob("lr", 3e-4, low=1e-6, high=1e-2)
    live.log(loss=0.5)
bodies = {{"loop": lambda: None, "loop, knob and metric": used}}
[
    {{name: block(live.loop({BLOCK}), body) - block(range({BLOCK}), lambda: None) for name, body in bodies.items()}}
    for _ in range(pairs)
]
"""
FELT = """
import time
felt = []
was = 0.0
for step in live.loop():
    now = live.knob("value", 0.0)
    if now != was:
        felt.append((now, time.time()))
        was = now
    time.sleep(step_s)
felt
"""


def cost(mesh: ProcMesh, pairs: int) -> dict[str, float]:
    """Microseconds a step, minus those of ``range`` with an empty body; the median of all pairs of all ranks."""
    mesh["pairs"] = pairs
    values = mesh.run_cell(BARE, want_value=True).get().values()
    found = [block for result in values for block in result.value]
    return {name: statistics.median(block[name] for block in found) for name in found[0]}


def felt(mesh: ProcMesh, step_s: float, times: int) -> list[float]:
    """Seconds from the call of ``set`` until the last rank is in a step with the new value."""
    mesh["step_s"] = step_s
    future = mesh.run_cell(FELT, want_value=True)
    loop = _started_loop(mesh)
    turned = {}
    for i in range(1, times + 1):
        time.sleep(random.uniform(0.3, 0.5) + step_s)
        turned[float(i)] = time.time()
        loop.set("value", float(i))
    time.sleep(0.5 + 3 * step_s)
    loop.stop()
    took: dict[float, float] = {}
    for result in future.get().values():
        for value, at in result.value:
            took[value] = max(took.get(value, 0.0), at - turned[value])
    return [took[value] for value in turned]


def _started_loop(mesh: ProcMesh) -> LiveLoop:
    """Wait for the loop that the ranks are in, until it has knobs."""
    while True:
        for loop in mesh.loops:
            if (view := loop.view()).state != "over" and view.knobs:
                return loop
        time.sleep(0.01)


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30, help="pairs of blocks (%(default)s)")
    parser.add_argument("--times", type=int, default=20, help="changes of a knob (%(default)s)")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mesh = this_host().spawn_procs({"gpus": RANKS}, device="cpu")
    mesh.initialized.get()
    for name, us in cost(mesh, options.pairs).items():
        print(f"{name}: {us:.2f} us a step more than `for step in range(n)`")
    for step_s in (0.001, 0.05, 0.3):
        took = felt(mesh, step_s, options.times)
        print(
            f"steps of {step_s * 1000:g} ms: all {RANKS} ranks have a new value after {statistics.median(took) * 1000:.0f} ms"
            f" (median of {len(took)}, at most {max(took) * 1000:.0f})"
        )
    shutdown_context().get()


if __name__ == "__main__":
    main()
