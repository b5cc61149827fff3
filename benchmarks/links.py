"""Measure the cost of a network between hosts, and the time until a cut-off host is reported as lost.

``python -m benchmarks.links`` writes ``docs/scale/links.json`` and prints the same as tables. Hosts are network namespaces of
this machine (``tests/bed``), so they have addresses, a router and cables, but share the cores. It needs ``CAP_NET_ADMIN``.

The meshes take turns, so that other work of the machine affects all of them alike; ``least`` is the result without such work.
Cables are as fast as the machine. Only cables with a delay and those that are cut are processes of the bed, which add about 50
us each way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import describe_machine
from monarch_kernel.actor import Actor, HostMesh, ProcMesh, endpoint, shutdown_context
from monarch_kernel.actor.host_mesh import serve_ranks
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.launch.base import agent_command
from monarch_kernel.launch.local import LocalHost, LocalLauncher
from monarch_kernel.net.wire.config import AgentConfig
from monarch_kernel.runtime.controller.session import current_session
from tests.bed.bed import Bed, BedHost, why_not

__all__ = ["main"]

OUT = Path("docs/scale/links.json")
ROUNDS, CALLS = 10, 100
CUTS = 12
LOST_AFTER_S = 1.0
DELAY_S = 0.001
UP_S = 60.0

Figures = dict[str, float]


class Nothing(Actor):
    """Does nothing."""

    @endpoint
    def nothing(self) -> None:
        """Answer."""


class BedLauncher:
    """Starts agents, each on a host of the bed."""

    name = "bed"

    def __init__(self, bed: Bed, *, has_faults: bool) -> None:
        self._bed = bed
        self._has_faults = has_faults
        self._launchers: list[LocalLauncher] = []
        self.hosts: list[BedHost] = []

    def launch(self, configs: Sequence[AgentConfig]) -> list[LocalHost]:
        """Start agents."""
        return [self._launch(config) for config in configs]

    def _launch(self, config: AgentConfig) -> LocalHost:
        self.hosts.append(self._bed.add(has_faults=self._has_faults))
        self._launchers.append(LocalLauncher(command=self.hosts[-1].command(agent_command())))
        (host,) = self._launchers[-1].launch([config])
        return host

    def progress(self) -> str:
        """Give no text, since the agents start at once."""
        return ""

    def close(self, timeout_s: float) -> None:
        """Wait for the end of all agents."""
        while self._launchers:
            self._launchers.pop().close(timeout_s)


@contextlib.contextmanager
def bed_with_session() -> Iterator[Bed]:
    """A bed with this thread on the controller's machine; all ends with the block."""
    shutdown_context().get()  # the session before listens on another network
    bed = Bed()
    try:
        with bed.entered():
            try:
                yield bed
            finally:
                shutdown_context().get()
    finally:
        bed.close()


def elsewhere(bed: Bed, hosts: int, per_host: int, *, has_faults: bool = False) -> tuple[ProcMesh, BedLauncher]:
    """Ranks on hosts of a bed, the same number on each."""
    session = current_session()
    serve_ranks(session)
    launcher = BedLauncher(bed, has_faults=has_faults)
    numbers = session.add_hosts(launcher, hosts, is_light=True, lost_after_s=LOST_AFTER_S)
    host_mesh = HostMesh(session.runtime, Region.whole(Extent({"hosts": hosts})), numbers)
    return host_mesh.spawn_procs({"gpus": per_host}, device="cpu"), launcher


def here(ranks: int) -> ProcMesh:
    """Ranks on the controller's machine."""
    session = current_session()
    serve_ranks(session)
    hosts = HostMesh(session.runtime, Region.whole(Extent({"hosts": 1})), (session.local_host(),))
    return hosts.spawn_procs({"gpus": ranks}, device="cpu")


def in_turns(what: dict[str, Callable[[], object]]) -> dict[str, Figures]:
    """Time these functions in turns of a hundred calls each, in microseconds."""
    took: dict[str, list[float]] = {name: [] for name in what}
    for name in [*what, *list(what) * ROUNDS]:
        do, times = what[name], []
        for _ in range(CALLS):
            begin = time.perf_counter()
            do()
            times.append(1e6 * (time.perf_counter() - begin))
        took[name] += times
    return {name: spread(times[CALLS:]) for name, times in took.items()}  # without the first round, the warm-up


def spread(values: Sequence[float]) -> Figures:
    """The least, the quartiles, and the number of values."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"least": min(values), "low": low, "median": median, "high": high, "most": max(values), "n": len(values)}


def call(mesh: ProcMesh) -> Callable[[], object]:
    """An empty call on all ranks of a mesh."""
    mesh.initialized.get(UP_S)
    actors = mesh.spawn("nothing", Nothing)
    actors.nothing.call().get(UP_S)
    return lambda: actors.nothing.call().get(UP_S)


@contextlib.contextmanager
def byte_to(host: BedHost) -> Iterator[Callable[[], object]]:
    """One byte to a process on a host, and back, over TCP."""
    source = (
        f"import socket\nlistener = socket.create_server(({host.address!r}, 0))\n"
        "print(listener.getsockname()[1], flush=True)\nend, _ = listener.accept()\n"
        "end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)\nwhile data := end.recv(1): end.sendall(data)\n"
    )
    command = host.command([sys.executable, "-c", source])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with socket.create_connection((host.address, int(process.stdout.readline()))) as ours:
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def there_and_back() -> None:
                ours.sendall(b"x")
                ours.recv(1)

            yield there_and_back


def measure_calls() -> dict[str, Figures]:
    """Measure calls on this machine, and on hosts with a network between them."""
    with bed_with_session() as bed:
        one, launcher = elsewhere(bed, 1, 1)
        what = {
            "1 rank, here": call(here(1)),
            "1 rank, elsewhere": call(one),
            "4 ranks, here": call(here(4)),
            "4 ranks, on 1 host elsewhere": call(elsewhere(bed, 1, 4)[0]),
            "4 ranks, on 2 hosts elsewhere": call(elsewhere(bed, 2, 2)[0]),
        }
        with byte_to(launcher.hosts[0]) as there_and_back:
            return in_turns({"a byte there and back, TCP": there_and_back, **what})


def measure_calls_with_delay() -> dict[str, Figures]:
    """Measure the same with a delay on each cable of a host."""
    with bed_with_session() as bed:
        one, of_one = elsewhere(bed, 1, 4, has_faults=True)
        two, of_two = elsewhere(bed, 2, 2, has_faults=True)
        what = {"4 ranks, on 1 host elsewhere": call(one), "4 ranks, on 2 hosts elsewhere": call(two)}
        for host in (*of_one.hosts, *of_two.hosts):
            host.suffer(delay_s=DELAY_S)
        with byte_to(of_one.hosts[0]) as there_and_back:
            return in_turns({"a byte there and back, TCP": there_and_back, **what})


def measure_cut(clock: Callable[[], float] = time.monotonic) -> float:
    """Seconds, by this clock, from a cut until a program that waits for a rank there gets the error."""
    with bed_with_session() as bed:
        mesh, launcher = elsewhere(bed, 2, 1, has_faults=True)
        mesh.initialized.get(UP_S)
        pending = mesh.slice(hosts=0).run("import time; time.sleep(600)")
        pending.wait(0.5)
        begin = clock()
        launcher.hosts[0].cut()
        assert "has sent nothing for" in str(pending.exception(UP_S))
        return clock() - begin


def print_table(title: str, figures: dict[str, Figures]) -> None:
    """Print a Markdown table."""
    print(f"\n| {title} | least, us | median, us | quartiles |\n|---|---:|---:|---:|")
    for name, row in figures.items():
        print(f"| {name} | {row['least']:.0f} | {row['median']:.0f} | {row['low']:.0f}-{row['high']:.0f} |")


def main() -> None:
    """Measure all of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help=f"file for the figures; default: {OUT}")
    parser.add_argument("--cuts", type=int, default=CUTS, help=f"number of cuts; default: {CUTS}")
    options = parser.parse_args()
    if why := why_not():
        raise SystemExit(why)
    machine = asdict(describe_machine([]))
    calls = measure_calls()
    print_table("an empty call", calls)
    delayed = measure_calls_with_delay()
    print_table(f"with {1e3 * DELAY_S:g} ms of delay each way", delayed)
    cuts = spread([measure_cut() for _ in range(options.cuts)])
    print(
        "\nfrom the cut to the error, s: "
        + ", ".join(f"{name} {cuts[name]:.2f}" for name in ("least", "median", "most"))
    )
    found = {
        "machine": machine,
        "load_after": round(os.getloadavg()[0], 2),
        "calls_us": calls,
        "delay_s": DELAY_S,
        "calls_with_delay_us": delayed,
        "lost_after_s": LOST_AFTER_S,
        "cut_to_told_s": cuts,
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
