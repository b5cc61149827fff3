"""Kill and heal one rank of four, hundreds of times, at random moments of streams of calls: `python -m benchmarks.recovery`.

It prints the times of the steps. It fails if a call ends with neither a result nor an error that names the rank, if a healthy
rank loses a call or gets one twice, or if something is left behind.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import threading
import time
from typing import Any

import psutil

from monarch_kernel import actor
from monarch_kernel.actor import Actor, ProcMesh, SupervisionError, endpoint, shutdown_context, this_host

RANKS = 4
VICTIM = 2
CALL_S = 30.0


class Counter(Actor):
    """Counts the calls of each caller; forwards calls to other ranks."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.others: Any = None

    def __restore__(self, peers: Any) -> None:
        if peers is None:
            raise RuntimeError("no other rank is alive")
        self.others = peers.neighbours.choose().get()

    @endpoint
    def meet(self, others: Any) -> None:
        """Store the mesh that this actor belongs to."""
        self.others = others

    @endpoint
    def neighbours(self) -> Any:
        """The mesh that this actor belongs to."""
        return self.others

    @endpoint
    def add(self, caller: str) -> int:
        """Count a call."""
        self.calls[caller] = self.calls.get(caller, 0) + 1
        return self.calls[caller]

    @endpoint
    def count(self, caller: str) -> int:
        """The number of calls so far."""
        return self.calls.get(caller, 0)


class Forwarder(Actor):
    """Calls ranks from a rank."""

    def __init__(self, counter: Any) -> None:
        self.counter = counter

    @endpoint
    def forward(self, rank: int) -> str:
        """Call a rank, and give the error, if any."""
        try:
            self.counter.slice(r=rank).add.call_one("rank").get(CALL_S)
        except SupervisionError as error:
            return str(error)
        return ""


class Stream(threading.Thread):
    """Calls random ranks until `end`, and counts the successful calls on each.

    Args:
        call: calls a rank; gives the error, empty if there was none.
        seed: seed of the choices.
    """

    def __init__(self, call: Any, seed: int) -> None:
        super().__init__(daemon=True)
        self.sent = [0] * RANKS
        self.errors = 0
        self.wrong: list[str] = []
        self._call = call
        self._dice = random.Random(seed)
        self._is_over = threading.Event()

    def run(self) -> None:
        """Make calls until the end."""
        while not self._is_over.is_set():
            rank = self._dice.randrange(RANKS)
            try:
                error = self._call(rank)
            except BaseException as failure:
                self.wrong.append(f"rank {rank}: {failure!r}")
                return
            if not error:
                self.sent[rank] += 1
            elif rank == VICTIM and "killed by SIGKILL" in error:
                self.errors += 1
            else:
                self.wrong.append(f"rank {rank}: {error}")

    def end(self) -> None:
        """Finish the pending call, and end."""
        self._is_over.set()
        self.join(CALL_S + 5)
        if self.is_alive():
            self.wrong.append("a call has not ended")


def footprint(agent: psutil.Process) -> dict[str, int]:
    """The resources that a leak would increase, in this process and in the agent."""
    own = psutil.Process()
    return {
        "descriptors here": own.num_fds(),
        "threads here": own.num_threads(),
        "descriptors of the agent": agent.num_fds(),
        "processes": len(own.children(recursive=True)),
        "MiB here": own.memory_info().rss >> 20,
        "MiB of the agent": agent.memory_info().rss >> 20,
    }


def from_program(counter: Any) -> Any:
    """Make a function that calls ranks from the program."""

    def call(rank: int) -> str:
        try:
            counter.slice(r=rank).add.call_one("program").get(CALL_S)
        except SupervisionError as error:
            return str(error)
        return ""

    return call


def cycle(procs: ProcMesh, dice: random.Random) -> tuple[float, float]:
    """Kill the victim at a random moment, and heal; gives the seconds until the death is known, and the seconds of the heal."""
    time.sleep(dice.uniform(0, 0.03))
    pid = procs.view().ranks[VICTIM].pid
    started_at = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    while VICTIM not in procs.deaths():
        time.sleep(0.0005)
    known = time.perf_counter()
    if procs.heal().get(CALL_S) != (VICTIM,):
        raise RuntimeError("another rank was replaced")
    return known - started_at, time.perf_counter() - known


def run(cycles: int, seed: int) -> list[str]:
    """Run the benchmark; gives the failed checks."""
    procs = this_host().spawn_procs({"r": RANKS}, device="cpu")
    counter: Any = procs.spawn("counter", Counter)
    counter.meet.call(counter).get(CALL_S)
    forwarder: Any = procs.slice(r=0).spawn("forwarder", Forwarder, counter)
    streams = [
        Stream(from_program(counter), seed + 1),
        Stream(lambda rank: forwarder.forward.call_one(rank).get(CALL_S), seed + 2),
    ]
    dice = random.Random(seed)
    agent = psutil.Process(psutil.Process(procs.view().ranks[0].pid).ppid())
    for stream in streams:
        stream.start()
    times = [cycle(procs, dice) for _ in range(10)]  # the first cycles allocate what later ones reuse
    before = footprint(agent)
    times += [cycle(procs, dice) for _ in range(cycles - 10)]
    after = footprint(agent)
    for stream in streams:
        stream.end()
    wrong = [text for stream in streams for text in stream.wrong]
    for caller, stream in zip(("program", "rank"), streams):
        counted = counter.count.call(caller).get(CALL_S).values()
        wrong += [
            f"rank {rank} counted {counted[rank]} calls of the {caller}, but {stream.sent[rank]} had an answer"
            for rank in range(RANKS)
            if rank != VICTIM and counted[rank] != stream.sent[rank]
        ]
    wrong += [
        f"{what}: {before[what]} -> {after[what]}"
        for what in before
        if after[what] > before[what] + (40 if what.startswith("MiB") else 4)
    ]
    known, healed = ([1000 * each for each in column] for column in zip(*times))
    calls, errors = sum(sum(stream.sent) for stream in streams), sum(stream.errors for stream in streams)
    print(f"{cycles} cycles, {calls} calls with a result, {errors} with an error that names the rank")
    for what, column in (("death known", known), ("healed after that", healed)):
        cuts = statistics.quantiles(column, n=20)
        print(
            f"{what}: median {statistics.median(column):.0f} ms, 95 % within {cuts[-1]:.0f} ms, longest {max(column):.0f} ms"
        )
    print("; ".join(f"{what} {before[what]} -> {after[what]}" for what in before))
    return wrong


def main() -> None:
    """Read the command line, run the benchmark, and print the failed checks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cycles", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    actor.unhandled_fault_hook = lambda failure: None
    try:
        wrong = run(max(11, options.cycles), options.seed)
    finally:
        shutdown_context().get()
    if wrong:
        sys.exit("\n".join(["wrong:", *wrong[:20]]))


if __name__ == "__main__":
    main()
