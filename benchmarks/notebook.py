"""Measure what users of a notebook wait for: `python -m benchmarks.notebook` drives the kernel as Jupyter does."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

RANKS = 4
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Row:
    """One measure: times in milliseconds."""

    name: str
    times_ms: list[float]
    bar: str = ""

    def __str__(self) -> str:
        times = sorted(self.times_ms)
        middle, worst = statistics.median(times), times[-1]
        return f"{self.name:<58} {middle:9.1f} {times[0]:9.1f} {worst:9.1f} {len(times):6d}  {self.bar}"


class Kernel:
    """A kernel with a mesh ``t``, and its client."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="monarch")
        self.manager.start_kernel()
        self.client: BlockingKernelClient = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=DEADLINE_S)
        self.run(f"%mesh up t -n {RANKS} --device cpu")
        self.run("%%remote t\nimport os, time")  # the first cell also forms the process group

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel()

    def send(self, code: str) -> str:
        return str(self.client.execute(code))

    def reply(self, id: str) -> dict[str, Any]:
        while True:
            message = self.client.get_shell_msg(timeout=DEADLINE_S)
            if message["parent_header"]["msg_id"] == id:
                return dict(message["content"])

    def wait_idle(self, id: str) -> None:
        while True:
            message = self.client.get_iopub_msg(timeout=DEADLINE_S)
            if message["parent_header"].get("msg_id") == id and message["content"].get("execution_state") == "idle":
                return

    def wait_output(self, id: str) -> None:
        while True:
            message = self.client.get_iopub_msg(timeout=DEADLINE_S)
            if message["parent_header"].get("msg_id") == id and message["msg_type"] == "stream":
                return

    def run(self, code: str, status: str = "ok") -> float:
        """Run a cell; gives the seconds until its reply."""
        started_at = time.perf_counter()
        id = self.send(code)
        content = self.reply(id)
        seconds = time.perf_counter() - started_at
        assert content["status"] == status, content
        self.wait_idle(id)
        return seconds


def times_ms(times: int, measure: Callable[[], float]) -> list[float]:
    return [1e3 * measure() for _ in range(times)]


def cells(kernel: Kernel, times: int) -> list[Row]:
    local, remote = [], []
    for _ in range(times):  # in turns, so that the machine's load is the same for both
        local.append(1e3 * kernel.run("pass"))
        remote.append(1e3 * kernel.run("%%remote t\npass"))
    more = statistics.median(remote) - statistics.median(local)
    return [
        Row("an empty local cell", local),
        Row(f"an empty cell on {RANKS} ranks", remote, f"{more:.1f} more than local; bar 3 at the median"),
    ]


def interrupts(kernel: Kernel, times: int) -> list[Row]:
    """Interrupt a loop at random moments, and check its state after each interrupt."""
    kernel.run("%%remote t\nn = 0")
    pids = "[rank.pid for rank in t.view().ranks]"
    before = kernel.client.execute("", silent=True, user_expressions={"pids": pids})
    was = kernel.reply(before)["user_expressions"]["pids"]["data"]["text/plain"]
    kernel.wait_idle(before)

    def one() -> float:
        id = kernel.send("%%remote t\nprint('loops', flush=True)\nwhile True: n += 1")
        kernel.wait_output(id)
        time.sleep(random.uniform(0, 0.3))
        started_at = time.perf_counter()
        kernel.manager.interrupt_kernel()
        content = kernel.reply(id)
        seconds = time.perf_counter() - started_at
        assert content["ename"] == "RemoteInterrupt", content
        kernel.wait_idle(id)
        kernel.run("%%remote t\nassert n > 0")
        return seconds

    def at_the_end() -> float:
        """An interrupt at about the end of a cell, which stops that cell or nothing, but never the next one."""
        id = kernel.send("%%remote t\nimport time; time.sleep(0.02)")
        time.sleep(random.uniform(0.015, 0.04))
        started_at = time.perf_counter()
        kernel.manager.interrupt_kernel()
        content = kernel.reply(id)
        seconds = time.perf_counter() - started_at
        assert content["status"] == "ok" or content["ename"] == "RemoteInterrupt", content
        kernel.wait_idle(id)
        kernel.run("%%remote t\nassert n > 0")
        return seconds

    rows = [
        Row(
            "interrupt of a loop on the ranks, until the reply",
            times_ms(times, one),
            "bar 500 at the median, 2,000 always",
        ),
        Row("interrupt at about the end of a cell", times_ms(times, at_the_end), "the next cell is never hit"),
    ]
    after = kernel.client.execute("", silent=True, user_expressions={"pids": pids})
    assert kernel.reply(after)["user_expressions"]["pids"]["data"]["text/plain"] == was
    kernel.wait_idle(after)
    return rows


def completions(kernel: Kernel, times: int) -> list[Row]:
    kernel.run("%%remote t\nimport time, torch\nmodel = torch.nn.Linear(2, 2)")
    code = "%%remote t\nmodel.we"

    def one() -> float:
        started_at = time.perf_counter()
        reply = kernel.reply(kernel.client.complete(code))
        seconds = time.perf_counter() - started_at
        assert any(match.endswith("weight") for match in reply["matches"]), reply["matches"]
        return seconds

    rows = [Row("completion of an attribute, ranks idle", times_ms(times, one), "bar 200")]
    for what, body in {"in a Python loop": "while True: pass", "in time.sleep": "while True: time.sleep(1)"}.items():
        kernel.run(f"%%remote t --background --out run\n{body}")
        rows.append(Row(f"completion of an attribute, ranks {what}", times_ms(times, one), "bar 200"))
        kernel.run("run.cancel(); run.exception(10) and None")
    return rows


def death(times: int) -> list[Row]:
    def one() -> float:
        kernel = Kernel()
        try:
            return kernel.run("%%remote t\nif rank == 2: os.kill(os.getpid(), 9)\ntime.sleep(0.1)", "error")
        finally:
            kernel.close()

    return [Row("a rank killed in a cell of 0.1 s, until the error", times_ms(times, one), "bar 1,000")]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.notebook", description=__doc__)
    parser.add_argument("--times", type=int, default=100, help="repetitions of each measure; default: 100")
    options = parser.parse_args()
    kernel = Kernel()
    try:
        rows = cells(kernel, options.times) + interrupts(kernel, options.times) + completions(kernel, options.times)
    finally:
        kernel.close()
    rows += death(max(1, options.times // 20))
    print(f"{'times in ms':<58} {'median':>9} {'least':>9} {'most':>9} {'times':>6}")
    print("\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
