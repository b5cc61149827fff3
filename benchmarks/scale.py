"""Measure how costs grow with hosts and ranks: many light ranks on many hosts, all on this machine.

``python -m benchmarks.scale`` runs each size in a separate process, and writes ``docs/scale/measured.json`` and a plot.

The hosts are agents of `LocalLauncher`: each has its connection (TCP, CURVE), its zygote and its ranks, as if it were remote.
But all hosts share the cores of one machine. So the wall time is about the total work of all ranks divided by the number of
cores, work that real hosts would do at the same time. The processor time and the memory of the controller grow as on real
hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import describe_machine
from benchmarks.plot import Chart, Curve, draw
from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.actor.host_mesh import HostMesh, serve_ranks, shutdown_context
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.launch.local import LocalLauncher
from monarch_kernel.runtime.controller.session import current_session

__all__ = ["measure"]

BY_HOSTS = [(1, 20), (5, 20), (10, 20), (20, 20), (50, 20)]
BY_RANKS = [(10, 2), (10, 5), (10, 10), (10, 20), (10, 50), (10, 100)]
FOLDER = Path("docs/scale")

RANK_MIB, HOST_MIB, SPARE_MIB = 9, 30, 3000
"""Largest memory of a rank and of a host, and the memory to leave for other programs."""

SAMPLE = 40
DEADLINE_S = 400.0


class Echo(Actor):
    """Returns its argument."""

    def __init__(self) -> None:
        self.calls = 0

    @endpoint
    def echo(self, value: int) -> int:
        self.calls += 1
        return value

    @endpoint
    def take(self, data: bytes) -> int:
        return len(data)


def pss_mib(pid: int) -> float:
    """Memory of a process, with its share of each shared page."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def timed(name: str, times: int, do: Callable[[], object], figures: dict[str, float]) -> None:
    """Measure an operation: the median of its wall time, and the mean of the controller's processor time."""
    do()
    gc.collect()
    walls = []
    before = time.process_time()
    for _ in range(times):
        begin = time.perf_counter()
        do()
        walls.append(time.perf_counter() - begin)
    figures[f"{name}_ms"] = 1e3 * statistics.median(walls)
    figures[f"{name}_least_ms"] = 1e3 * min(walls)
    figures[f"{name}_controller_ms"] = 1e3 * (time.process_time() - before) / times


def measure(hosts: int, per_host: int) -> dict[str, float]:
    """Start this many ranks, and measure all operations; all processes have ended when this returns."""
    world = hosts * per_host
    times = max(5, min(30, 4000 // world))
    figures: dict[str, float] = {
        "hosts": hosts,
        "per_host": per_host,
        "ranks": world,
        "load_before": os.getloadavg()[0],
    }
    available = psutil.virtual_memory().available
    session = current_session()
    serve_ranks(session)
    try:
        begin = time.perf_counter()
        numbers = session.add_hosts(LocalLauncher(session.directory), hosts, is_light=True, lost_after_s=60.0)
        host_mesh = HostMesh(session.runtime, Region.whole(Extent({"hosts": hosts})), numbers)
        host_mesh.initialized.get()
        figures["hosts_up_s"] = time.perf_counter() - begin
        begin = time.perf_counter()
        procs = host_mesh.spawn_procs({"procs": per_host}, name="crowd")
        procs.initialized.get()
        figures["ranks_up_s"] = time.perf_counter() - begin
        begin = time.perf_counter()
        actors = procs.spawn("echo", Echo)
        actors.initialized.get()
        figures["spawn_s"] = time.perf_counter() - begin

        first = actors.slice(hosts=0, procs=0)
        timed("call_one", 50, lambda: first.echo.call_one(1).get(), figures)
        timed("call", times, lambda: actors.echo.call(1).get(), figures)
        before = sum(actors.echo.call(0).get().values())
        assert before == 0

        def broadcasts() -> None:
            for _ in range(20):
                actors.echo.broadcast(1)
            actors.echo.call(1).get()

        timed("broadcasts", 3, broadcasts, figures)
        for kind in ("", "_least", "_controller"):  # time of one broadcast, without the call that waits for all of them
            alone = figures[f"call{kind}_ms"]
            figures[f"broadcast{kind}_ms"] = max(0.0, figures.pop(f"broadcasts{kind}_ms") - alone) / 20
        megabyte = bytes(1 << 20)
        timed("megabyte", 3, lambda: actors.take.call(megabyte).get(), figures)
        timed("cell", times, lambda: procs.run_cell("pass", cell=1).get(), figures)
        heard: list[Any] = []
        timed(
            "printing_cell",
            times,
            lambda: procs.run_cell("print('the same on all ranks')", cell=1, listen=heard.append).get(),
            figures,
        )
        assert len(heard) >= (times + 1) * world, f"{len(heard)} pieces of output came"

        me = psutil.Process()
        figures["controller_mib"] = pss_mib(me.pid)
        figures["controller_threads"] = me.num_threads()
        figures["controller_files"] = me.num_fds()
        ranks = [rank.pid for rank in procs.view().ranks]
        step = max(1, world // SAMPLE)
        figures["rank_mib"] = statistics.mean(pss_mib(pid) for pid in ranks[::step])
        figures["rank_threads"] = psutil.Process(ranks[0]).num_threads()
        agents = [child.pid for child in me.children()]
        figures["agent_mib"] = statistics.mean(pss_mib(pid) for pid in agents)
        figures["machine_mib"] = (available - psutil.virtual_memory().available) / 2**20
        idle = me.cpu_times()
        time.sleep(2.0)
        now = me.cpu_times()
        figures["controller_idle_percent"] = 50 * (now.user + now.system - idle.user - idle.system)
        figures["load_after"] = os.getloadavg()[0]
    finally:
        begin = time.perf_counter()
        shutdown_context().get()
    figures["down_s"] = time.perf_counter() - begin
    return figures


def run(hosts: int, per_host: int) -> dict[str, float] | str:
    """Measure one size in a separate process; gives the reason if that is not possible."""
    needed = RANK_MIB * hosts * per_host + HOST_MIB * hosts + SPARE_MIB
    available = psutil.virtual_memory().available / 2**20
    if available < needed:
        return f"{needed} MiB are needed, but {available:.0f} are available"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.scale", "--one", f"{hosts}x{per_host}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        output, errors = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # its agents notice that it is gone, and end
        process.communicate()
        return f"not done after {DEADLINE_S:g} s"
    for line in output.splitlines():
        if line.startswith('{"hosts"'):
            return {name: float(value) for name, value in json.loads(line).items()}
    return (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]


def plots(results: list[dict[str, float]]) -> dict[str, str]:
    """The plots of the measurements, as SVG by name."""
    charts = []
    for by, label, sizes in (
        ("hosts", "hosts of 20 ranks each", BY_HOSTS),
        ("per_host", "ranks on each of 10 hosts", BY_RANKS),
    ):
        rows = [row for row in results if (int(row["hosts"]), int(row["per_host"])) in sizes]
        rows.sort(key=lambda row: row[by])

        def curve(name: str, key: str, rows: list[dict[str, float]] = rows, by: str = by) -> Curve:
            return Curve(name, [(row[by], row[key]) for row in rows if key in row])

        charts += [
            Chart(
                "wall time on this machine, ms",
                label,
                [
                    curve("call on all ranks", "call_ms"),
                    curve("one of many broadcasts", "broadcast_ms"),
                    curve("a cell, all print the same", "printing_cell_ms"),
                    curve("1 MiB to all ranks", "megabyte_ms"),
                    curve("call on one rank", "call_one_ms"),
                ],
            ),
            Chart(
                "processor time of the controller, ms",
                label,
                [
                    curve("call on all ranks", "call_controller_ms"),
                    curve("one of many broadcasts", "broadcast_controller_ms"),
                    curve("a cell, all print the same", "printing_cell_controller_ms"),
                    curve("1 MiB to all ranks", "megabyte_controller_ms"),
                    curve("call on one rank", "call_one_controller_ms"),
                ],
            ),
            Chart(
                "time until they are up, s",
                label,
                [curve("hosts", "hosts_up_s"), curve("ranks", "ranks_up_s"), curve("actors", "spawn_s")],
            ),
            Chart(
                "memory, MiB",
                label,
                [
                    curve("the controller", "controller_mib"),
                    curve("an agent", "agent_mib"),
                    curve("a rank", "rank_mib"),
                ],
            ),
        ]
    return {"measured.svg": draw(charts, columns=2)}


def size(text: str) -> tuple[int, int]:
    """Parse ``50x20``."""
    hosts, _, ranks = text.partition("x")
    return int(hosts), int(ranks)


def main() -> None:
    """Measure all sizes, or one of them in this process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--one", type=size, help=argparse.SUPPRESS)
    parser.add_argument(
        "--sizes", default="", help="hosts x ranks on each, such as 5x20,50x20; default: those of the plots"
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder for figures and plots; default: {FOLDER}")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)), flush=True)
        return
    chosen = [size(text) for text in options.sizes.split(",") if text] or list(dict.fromkeys([*BY_HOSTS, *BY_RANKS]))
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "measured.json"
    results: dict[tuple[int, int], dict[str, float]] = {}
    if file.exists() and options.sizes:  # keeps the other sizes
        with contextlib.suppress(ValueError, KeyError):
            results = {(int(row["hosts"]), int(row["per_host"])): row for row in json.loads(file.read_text())["sizes"]}
    for hosts, per_host in chosen:
        figures = run(hosts, per_host)
        if isinstance(figures, str):
            print(f"{hosts} x {per_host}: {figures}", file=sys.stderr)
            continue
        results[hosts, per_host] = figures
        print(
            f"{hosts:3} hosts x {per_host:3}: up {figures['hosts_up_s'] + figures['ranks_up_s']:6.2f} s, "
            f"call {figures['call_ms']:7.1f} ms (controller {figures['call_controller_ms']:5.1f}), "
            f"cell {figures['printing_cell_ms']:7.1f} ms (controller {figures['printing_cell_controller_ms']:5.1f}), "
            f"controller {figures['controller_mib']:.0f} MiB, {figures['controller_threads']:.0f} threads, "
            f"load {figures['load_before']:.1f}",
            flush=True,
        )
    rows = [results[key] for key in sorted(results)]
    file.write_text(json.dumps({"machine": asdict(describe_machine([])), "sizes": rows}, indent=1) + "\n")
    for name, text in plots(rows).items():
        (options.out / name).write_text(text)


if __name__ == "__main__":
    main()
