"""monarch_kernel as a peer: one actor in each rank; a cell is the runtime's own `ProcMesh.run`, without Jupyter."""

from __future__ import annotations

import os
import time
from typing import Any, cast

from benchmarks import peer
from monarch_kernel.actor import Actor, endpoint, shutdown_context, this_host


class Echo(Actor):
    """Returns what it gets."""

    @endpoint
    def ready(self) -> int:
        import torch  # noqa: F401

        return os.getpid()

    @endpoint
    def echo(self, value: int) -> int:
        return value

    @endpoint
    def ask(self, other: Any, count: int) -> list[float]:
        """Call another, again and again; gives the seconds that each call took."""
        times = []
        for value in range(count):
            begin = time.perf_counter()
            answer = other.echo.call_one(value).get()
            times.append(time.perf_counter() - begin)
            assert answer == value
        return times


class OurMesh:
    """A spawned actor mesh, and the processes it lives in."""

    def __init__(self, ranks: int) -> None:
        self.procs = this_host().spawn_procs(per_host={"gpus": ranks})
        self.actors = cast(Any, self.procs.spawn("echo", Echo))
        self.rank_pids = [pid for _, pid in self.actors.ready.call().get()]
        self.first = self.actors.slice(gpus=0)

    def call(self, value: int) -> list[int]:
        return [answer for _, answer in self.actors.echo.call(value).get()]

    def call_one(self, value: int) -> int:
        answer: int = self.first.echo.call_one(value).get()
        return answer

    def cell(self) -> None:
        self.procs.run("pass").get()

    def outstanding(self, count: int) -> list[int]:
        futures = [self.first.echo.call_one(value) for value in range(count)]
        return [future.get() for future in futures]

    def between(self, count: int) -> list[float]:
        times: list[float] = self.first.ask.call_one(self.actors.slice(gpus=1), count).get()
        return times

    def pids(self) -> list[int]:
        return self.rank_pids


class OurPeer:
    """Starts process meshes on this host; the second one finds the zygote warm."""

    def start(self, ranks: int) -> OurMesh:
        return OurMesh(ranks)

    def start_again(self, ranks: int) -> OurMesh:
        return OurMesh(ranks)

    def stop(self) -> None:
        shutdown_context().get()


if __name__ == "__main__":
    peer.main(OurPeer())
