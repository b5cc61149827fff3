"""Measure a call on many processes that are only Python: ``python -m benchmarks.floor``.

Each rank is a forked process that sends back what it receives, without an actor, a driver or an agent. So no library with a
Python process for each rank can be faster on as many cores. The results go to ``docs/scale/floor.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import zmq

from benchmarks.machine import describe_machine
from monarch_kernel.runtime.host.processes import die_with_parent

__all__ = ["KINDS", "floor"]

MESSAGE = b"x" * 100
PER_HOST = 20
WARM_UP = 5
FILE = Path("docs/scale/floor.json")

Call = Callable[[], None]


@contextmanager
def forked(run: Callable[[], NoReturn]) -> Iterator[int]:
    """Run a function in a forked process, and kill the process at the end of the block."""
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(signal.SIGKILL)
            run()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def echo(end: socket.socket) -> NoReturn:
    """Act as a rank."""
    while data := end.recv(4096):
        end.send(data)
    os._exit(0)


class Pairs:
    """Ranks with a socket pair each."""

    def __init__(self, stack: ExitStack, ranks: int, run: Callable[[socket.socket], NoReturn] = echo) -> None:
        self._ends: dict[int, socket.socket] = {}
        self._epoll = stack.enter_context(closing(select.epoll()))
        for _ in range(ranks):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(ours)
            held = [ours, *self._ends.values()]

            def be(theirs: socket.socket = theirs, held: list[socket.socket] = held) -> NoReturn:
                for end in held:
                    end.close()
                run(theirs)

            stack.enter_context(forked(be))
            theirs.close()
            self._ends[ours.fileno()] = ours
            self._epoll.register(ours, select.EPOLLIN)

    def call(self) -> None:
        """Send a message to all ranks, and receive all answers."""
        for end in self._ends.values():
            end.send(MESSAGE)
        left = len(self._ends)
        while left:
            for fd, _ in self._epoll.poll():
                self._ends[fd].recv(4096)
                left -= 1


def host(end: socket.socket) -> NoReturn:
    """Act as an agent: call the ranks, and send one answer for all of them."""
    with ExitStack() as stack:
        ranks = Pairs(stack, PER_HOST)
        end.send(b"up")
        while data := end.recv(4096):
            ranks.call()
            end.send(data)
    os._exit(0)


def by_pairs(stack: ExitStack, ranks: int) -> Call:
    """One process calls all ranks, over socket pairs."""
    return Pairs(stack, ranks).call


def by_hosts(stack: ExitStack, ranks: int) -> Call:
    """One process calls others, each of which calls 20 ranks."""
    hosts = Pairs(stack, ranks // PER_HOST, host)
    for end in hosts._ends.values():
        end.recv(4096)
    return hosts.call


def by_zmq(stack: ExitStack, ranks: int) -> Call:
    """One process calls all ranks over ZeroMQ, which has a thread in each."""
    address = f"ipc://{stack.enter_context(tempfile.TemporaryDirectory())}/c"

    def be(name: bytes) -> NoReturn:
        dealer = zmq.Context().socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, name)
        dealer.connect(address)
        dealer.send(b"up")
        while True:
            dealer.send(dealer.recv())

    names = [b"%d" % i for i in range(ranks)]
    for name in names:
        stack.enter_context(forked(lambda name=name: be(name)))  # type: ignore[misc]
    context = stack.enter_context(zmq.Context())
    router = stack.enter_context(context.socket(zmq.ROUTER))
    router.linger = 0
    router.set_hwm(0)
    router.bind(address)
    for _ in names:
        router.recv_multipart()

    def call() -> None:
        for name in names:
            router.send_multipart([name, MESSAGE])
        for _ in names:
            router.recv_multipart()

    return call


KINDS: dict[str, Callable[[ExitStack, int], Call]] = {
    "socket pairs": by_pairs,
    "socket pairs, by way of hosts": by_hosts,
    "ZeroMQ": by_zmq,
}


def floor(kind: str, ranks: int, times: int = 30) -> dict[str, float]:
    """Milliseconds for a call on this many processes, which have ended when this returns."""
    walls = []
    with ExitStack() as stack:
        call = KINDS[kind](stack, ranks)
        for _ in range(WARM_UP):
            call()
        for _ in range(times):
            begin = time.perf_counter()
            call()
            walls.append(1e3 * (time.perf_counter() - begin))
    return {"ranks": ranks, "median_ms": statistics.median(walls), "least_ms": min(walls)}


def main() -> None:
    """Measure all kinds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floor", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=FILE, help=f"file for the figures; default: {FILE}")
    options = parser.parse_args()
    machine = describe_machine([])
    figures = {kind: floor(kind, options.ranks) for kind in KINDS}
    for kind, each in figures.items():
        print(f"{kind:30} {each['median_ms']:7.1f} ms (least {each['least_ms']:.1f})")
    options.out.write_text(json.dumps({"machine": asdict(machine), "kinds": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
