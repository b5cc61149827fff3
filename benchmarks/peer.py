"""What all peers share: two Protocols, the timing loops, and the command line of a peer's process.

A peer is a script, `python -m benchmarks.peer_NAME --ranks 4 start call_one ...`, that starts one mesh, measures, and prints
one JSON line for each measure: `{"measure": "call/4", "value": 971.0}`, or `{"measure": ..., "error": "why"}`. The code below
times all peers, so that their figures are comparable.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from benchmarks.bulk import ends, timed
from benchmarks.measures import BULK, row_key

__all__ = ["STARTED_VARIABLE", "Mesh", "Peer", "Timing", "main"]

STARTED_VARIABLE = "BENCHMARK_STARTED_S"
"""Environment variable with the time (`time.monotonic`) at which the runner started the peer's process."""

MIB = 1024 * 1024
BULK_REPEAT = 9


class Mesh(Protocol):
    """Ranks that are up, have torch imported and have answered once."""

    def call(self, value: int) -> list[int]:
        """Send `value` to every rank and return the answers."""

    def call_one(self, value: int) -> int:
        """Send `value` to the first rank and return its answer."""

    def cell(self) -> None:
        """Run the code ``pass`` on every rank and wait until all have finished."""

    def outstanding(self, count: int) -> list[int]:
        """Send 0, 1, ... to the first rank without waiting, then return all its answers."""

    def between(self, count: int) -> list[float]:
        """Call the second rank from the first with 0, 1, ... one after the other; gives the seconds of each call.

        Raises:
            NotImplementedError: the library's ranks can't call each other.
        """

    def empty(self, *args: Any) -> None:
        """Call the first rank with or without arguments, and get no result."""

    def values(self, count: int) -> Any:
        """Make this many float32 ones in the library's best format: a torch tensor or a NumPy array."""

    def take(self, value: Any) -> float:
        """Send values to the first rank and return the sum of their first and last element there."""

    def take_all(self, value: Any) -> list[float]:
        """Send values to every rank and return what `take` does, for each rank."""

    def give(self, count: int) -> Any:
        """Return this many ones from the first rank."""

    def copies(self, count: int, repeat: int) -> list[float]:
        """Copy this many float32 values within the first rank; gives the seconds of each repetition."""

    def fetches(self, count: int, repeat: int, is_fresh: bool) -> list[float]:
        """Read this many float32 values of the second rank from the first, into fresh or used memory.

        Returns:
            The seconds of each repetition.

        Raises:
            NotImplementedError: the library's ranks can't do this.
        """

    def pids(self) -> list[int]:
        """Return the process id of every rank."""


class Peer(Protocol):
    """A library that can start ranks."""

    def start(self, ranks: int) -> Mesh:
        """Start ranks from nothing and return when each has imported torch and answered."""

    def start_again(self, ranks: int) -> Mesh:
        """Start more ranks beside those that are up; `NotImplementedError` if the library can't do this."""

    def stop(self) -> None:
        """End everything that was started."""


@dataclass(frozen=True)
class Timing:
    """Numbers of repetitions within one process."""

    warmup: int = 50
    calls: int = 300
    outstanding: int = 20_000


def median_us(work: Callable[[int], object], expected: Callable[[int], object], timing: Timing) -> float:
    """Return the median time of a round trip in microseconds, after a warm-up, and check every answer."""
    samples = []
    for index in range(timing.warmup + timing.calls):
        begin = time.perf_counter()
        answer = work(index)
        elapsed = time.perf_counter() - begin
        if answer != expected(index):
            raise AssertionError(f"round trip {index} returned {answer!r}, not {expected(index)!r}")
        if index >= timing.warmup:
            samples.append(elapsed)
    return statistics.median(samples) * 1e6


def bulk_rate(name: str, mesh: Mesh) -> float:
    """Measure the rate of a bulk operation, in GB/s."""
    work, _, mib = name.partition("_")
    count, repeat = int(mib) * MIB // 4, BULK_REPEAT
    if work == "copy":
        times = mesh.copies(count, repeat)
    elif work == "send":
        value = mesh.values(count)
        times = timed(lambda: check_ends(mesh.take(value)), repeat)
    elif work == "give":
        times = timed(lambda: check_ends(ends(mesh.give(count))), repeat)
    else:
        times = mesh.fetches(count, repeat, is_fresh=work == "fresh")
    return count * 4 / statistics.median(times) / 1e9


def check_ends(found: float) -> None:
    """Check that the received values are ones."""
    if found != 2.0:
        raise AssertionError(f"the received values are not ones: the first and the last have the sum {found}")


def pss_mib(pid: int) -> float:
    """Return the proportional set size of a process in MiB: shared pages are split among the processes that share them."""
    return float(psutil.Process(pid).memory_full_info().pss) / MIB


def measure(name: str, peer: Peer, mesh: Mesh, ranks: int, timing: Timing) -> float:
    """Take one figure of a mesh that is up."""
    if name == "memory":
        pids = mesh.pids()
        if len(set(pids)) != ranks:
            raise AssertionError(f"{ranks} ranks live in {len(set(pids))} processes")
        return statistics.fmean(pss_mib(pid) for pid in pids)
    if name == "memory_all":
        below = {child.pid for child in psutil.Process().children(recursive=True)} | set(mesh.pids())
        total = 0.0
        for pid in below:
            with contextlib.suppress(psutil.NoSuchProcess):  # a helper of the peer has ended since it was listed
                total += pss_mib(pid)
        return total / ranks
    if name == "call_one":
        return median_us(mesh.call_one, lambda value: value, timing)
    if name == "call":
        return median_us(mesh.call, lambda value: [value] * ranks, timing)
    if name == "cell":
        return median_us(lambda _: mesh.cell(), lambda _: None, timing)
    if name == "outstanding":
        mesh.outstanding(timing.warmup)
        begin = time.perf_counter()
        values = mesh.outstanding(timing.outstanding)
        elapsed = time.perf_counter() - begin
        if values != list(range(timing.outstanding)):
            raise AssertionError("an outstanding call returned a wrong value or no value")
        return timing.outstanding / elapsed
    if name == "between":
        return statistics.median(mesh.between(timing.warmup + timing.calls)[timing.warmup :]) * 1e6
    if name == "empty":
        return median_us(lambda _: mesh.empty(), lambda _: None, timing)
    if name == "one_kib":
        return median_us(lambda _: mesh.empty(bytes(1024)), lambda _: None, timing)
    if name == "small_tensor":
        small = mesh.values(256)
        return median_us(lambda _: mesh.empty(small), lambda _: None, timing)
    if name == "to_one_64":
        value = mesh.values(64 * MIB // 4)
        return statistics.median(timed(lambda: check_ends(mesh.take(value)), BULK_REPEAT)) * 1e3
    if name == "to_all_64":
        value = mesh.values(64 * MIB // 4)
        return statistics.median(timed(lambda: [check_ends(each) for each in mesh.take_all(value)], BULK_REPEAT)) * 1e3
    if name.partition("_")[0] in {what for what, _, _ in BULK}:
        return bulk_rate(name, mesh)
    if name == "start_again":
        begin = time.perf_counter()
        peer.start_again(ranks)
        return time.perf_counter() - begin
    raise ValueError(f"no measure is called {name!r}")


def report(name: str, ranks: int, **fields: object) -> None:
    """Print one figure as a JSON line, in a single write that output of the ranks can't cut in two."""
    sys.stdout.flush()
    os.write(1, ("\n" + json.dumps({"measure": row_key(name, ranks), **fields}) + "\n").encode())


def main(peer: Peer) -> None:
    """Run a peer's process: read the command line, start the ranks, print the figures, end the ranks."""
    parser = argparse.ArgumentParser(description="Measure one peer; see python -m benchmarks.")
    parser.add_argument("measures", nargs="+", metavar="MEASURE")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--calls", type=int, default=Timing.calls)
    parser.add_argument("--outstanding", type=int, default=Timing.outstanding)
    options = parser.parse_args()
    ranks = options.ranks
    timing = Timing(calls=options.calls, outstanding=options.outstanding)

    begin = time.perf_counter()
    mesh = peer.start(ranks)
    started_s = time.perf_counter() - begin
    script_s = time.monotonic() - float(os.environ[STARTED_VARIABLE]) if STARTED_VARIABLE in os.environ else None

    for name in options.measures:
        try:
            if name == "start":
                report(name, ranks, value=started_s)
            elif name == "script":
                if script_s is None:
                    raise RuntimeError(
                        f"only available when python -m benchmarks starts this script ({STARTED_VARIABLE})"
                    )
                report(name, ranks, value=script_s)
            else:
                report(name, ranks, value=measure(name, peer, mesh, ranks, timing))
        # A failed measure must not stop the others; the report shows the error.
        except Exception as error:
            report(name, ranks, error=f"{type(error).__name__}: {error}")
    peer.stop()
