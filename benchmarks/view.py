"""Measure the cost and the delay of the view: `python -m benchmarks.view` uses JupyterLab in Chromium, as a user does.

- *Delay*: a rank of a real mesh fails, by its own clock; the page notes when the frame after the change is painted.
- *1,024 ranks*: ranks that are only records, all of which change their state five times a second. The results are the updates
  that reach the page, the processor time of the page's main thread as Chromium counts it, and the kernel's processor time as
  Linux counts it, minus the kernel's time while the same ranks change and no page is visible. A widget and the panel are
  visible.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import sync_playwright

from benchmarks.notebook import Row
from tests.lab.conftest import FLAGS, Lab, Server, chromium, missing

RANKS = 4
CROWD = 1024
PER_S = 5

UP = f"%mesh up t -n {RANKS} --device cpu"
FAILS = "%%remote t[1]\nimport time\nprint('at', time.time(), flush=True)\n1 / 0"
WORKS = "%%remote t[1]\npass"
WATCHES = """() => {
    window.seen = 0;
    const look = () => {
        const is = !!document.querySelector(".jp-Notebook .mk-card[data-state=failed]");
        if (is && !window.seen) requestAnimationFrame(() => setTimeout(() => { window.seen = Date.now() / 1000; }));
        window.seen = is ? window.seen || NaN : 0;
    };
    new MutationObserver(look).observe(document.querySelector(".jp-Notebook"),
        { subtree: true, childList: true, attributes: true, attributeFilter: ["data-state"] });
}"""

CROWDS = f"""
import threading, time
from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.testing import FakeLauncher, FakeRank, MemoryHub, add_host, rank_spec
hub = MemoryHub()
runtime = Runtime(hub.connect(), token="t")
procs, extent = runtime.new_procs({CROWD}), Extent({{"dp": 32, "tp": {CROWD} // 32}})
specs = [rank_spec(proc, rank=rank, world_size={CROWD}, mesh="crowd") for rank, proc in enumerate(procs)]
runtime.start_ranks(add_host(runtime, FakeLauncher()), specs)
ranks = [FakeRank(hub, proc, token="t") for proc in procs]
for each in ranks: each.hello()
mesh = ProcMesh(runtime, Region.whole(extent), procs, "crowd", extent)
while any(rank.state == "starting" for rank in mesh.view().ranks): runtime.run_on_io_thread(lambda: None)
records = [runtime._state.ranks[proc] for proc in mesh.procs]
steps = 0
def turn(now):
    for i, record in enumerate(records):
        k = (i * 7 + steps) % 3
        record.open_requests = {{steps: "cell [5]"}} if k == 0 else {{}}
        record.busy_since = now
        record.last_error = "RuntimeError: no" if k == 1 else ""
    return []
def change():
    global steps
    due = time.monotonic()
    while True:
        steps += 1
        runtime.enter(turn)
        due += 1 / {PER_S}
        time.sleep(max(0, due - time.monotonic()))
threading.Thread(target=change, daemon=True).start()
viewers = get_ipython().kernel.viewers
viewers._meshes = lambda: [mesh]
shown = viewers.widget("crowd")
"""


@dataclass(frozen=True)
class ReceivedFrame:
    """A frame that came to the page.

    Attributes:
        at: time of arrival, in seconds of a monotonic clock.
        seq: its number.
        nbytes: size of the message with its envelope.
    """

    at: float
    seq: int
    nbytes: int


def until_it_shows(lab: Lab, times: int) -> Row:
    """Measure the time from the failure of a rank to the painted frame that shows it."""
    lab.load(lab.server.write("latency.ipynb", UP, FAILS, WORKS))
    lab.run(0)
    lab.page.locator(".mk-card[data-state=idle]").nth(RANKS - 1).wait_for()
    lab.page.evaluate(WATCHES)
    found = []
    for _ in range(times):
        cell = lab.run(1)
        lab.page.wait_for_function("window.seen > 0")
        said = cell.locator(".jp-OutputArea-output").get_by_text("at 1").first.inner_text()
        failed_at = float(said.partition("at ")[2].split()[0])
        found.append(1e3 * (lab.page.evaluate("window.seen") - failed_at))
        lab.run(2)
        lab.page.wait_for_function("window.seen === 0")
        lab.page.wait_for_timeout(50 + 37 * len(found) % 200)  # any moment between two turns
    return Row("a rank fails, until pixels say so", found, "bar 300 at the median")


def crowd(lab: Lab, seconds: float) -> list[str]:
    """Measure the view of 1,024 ranks that all change."""
    frames: list[ReceivedFrame] = []

    def hear(payload: Any) -> None:
        raw = payload if isinstance(payload, bytes) else payload.encode()
        if b'"kind":"frame"' in (tight := raw.replace(b'": ', b'":')) and b'"crowd"' in raw:
            seq = int(tight.partition(b'"seq":')[2].partition(b",")[0].strip(b" }]"))
            frames.append(ReceivedFrame(time.monotonic(), seq, len(raw)))

    lab.page.on("websocket", lambda socket: socket.on("framereceived", hear))
    lab.load(lab.server.write("crowd.ipynb", "%mesh up t -n 1 --device cpu", CROWDS, "import os; os.getpid()"))
    lab.show_panel()
    lab.run(0)
    lab.run(1)
    pid = int(lab.run(2).locator(".jp-OutputArea-executeResult pre").inner_text())
    kernel = psutil.Process(pid)
    lab.cell(1).locator(".mk-live canvas").first.wait_for()
    lab.panel.locator("canvas").first.wait_for()
    session = lab.page.context.new_cdp_session(lab.page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def page_s() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")

    def kernel_share(for_s: float) -> float:
        before, started_at = kernel.cpu_times(), time.monotonic()
        lab.page.wait_for_timeout(1e3 * for_s)
        after = kernel.cpu_times()
        return (after.user + after.system - before.user - before.system) / (time.monotonic() - started_at)

    lab.page.wait_for_timeout(3000)
    frames.clear()
    before = page_s()
    looked_at = kernel_share(seconds)
    busy = page_s() - before
    received = list(frames)
    lab.page.goto("about:blank")
    lab.page.wait_for_timeout(20_000)  # until the kernel has noticed that no page is visible
    frames.clear()
    alone = kernel_share(seconds / 2)
    seqs = sorted({frame.seq for frame in received})
    missed = seqs[-1] - seqs[0] + 1 - len(seqs)
    sizes = [frame.nbytes for frame in received]
    rate = len(seqs) / seconds
    times = sorted(_first(received).values())
    gaps = [1e3 * (after - before) for before, after in pairwise(times)]
    return [
        f"{CROWD:,} ranks, all change {PER_S} times a second, for {seconds:.0f} s; a widget and the panel are visible",
        f"  updates received                       {len(seqs):6d}        {rate:.2f} a second; missed {missed}",
        f"  time between two updates         {statistics.median(gaps):8.0f} ms     at most {max(gaps):.0f}",
        f"  size of an update with envelope  {statistics.median(sizes):8.0f} B      at most {max(sizes)}; bar 2,048",
        f"  page's time for an update in both{1e3 * busy / len(seqs):8.1f} ms     bar 35 for each",
        f"  kernel's processor for updates   {100 * (looked_at - alone):8.2f} %      bar 5",
        f"  kernel without a visible page    {100 * alone:8.2f} %      including these changes; updates then: {len(frames)}",
    ]


def idle(lab: Lab, seconds: float) -> str:
    """Measure a kernel whose meshes are idle and not visible on any page."""
    lab.load(lab.server.write("idle.ipynb", UP, "import os; os.getpid()"))
    lab.run(0)
    kernel = psutil.Process(int(lab.run(1).locator(".jp-OutputArea-executeResult pre").inner_text()))
    lab.page.goto("about:blank")
    lab.page.wait_for_timeout(20_000)
    before, started_at = kernel.cpu_times(), time.monotonic()
    lab.page.wait_for_timeout(1e3 * seconds)
    after = kernel.cpu_times()
    share = (after.user + after.system - before.user - before.system) / (time.monotonic() - started_at)
    return f"kernel with {RANKS} idle ranks, none visible {100 * share:6.2f} %      bar 1"


def _first(received: list[ReceivedFrame]) -> dict[int, float]:
    found: dict[int, float] = {}
    for frame in received:
        found.setdefault(frame.seq, frame.at)
    return found


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.view", description=__doc__)
    parser.add_argument("--times", type=int, default=30, help="number of failures of a rank; default: 30")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of the changes of 1,024 ranks; default: 60"
    )
    options = parser.parse_args()
    if why := missing():
        parser.exit(1, f"not possible: {why}\n")
    with tempfile.TemporaryDirectory(prefix="mk-view-") as folder, sync_playwright() as playwright:
        server = Server(Path(folder))
        try:
            server.wait()
            browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)

            def lab() -> Lab:
                return Lab(browser.new_page(viewport={"width": 1400, "height": 900}), server)

            row = until_it_shows(lab(), options.times)
            print(f"{'times in ms':<58} {'median':>9} {'least':>9} {'most':>9} {'times':>6}\n{row}", flush=True)
            server.end_kernels()
            print("\n".join(crowd(lab(), options.seconds)), flush=True)
            server.end_kernels()
            print(idle(lab(), options.seconds / 2), flush=True)
            server.end_kernels()
            browser.close()
        finally:
            server.close()


if __name__ == "__main__":
    main()
