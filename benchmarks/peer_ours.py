"""monarch_kernel as a peer: one actor in each rank; a cell is the runtime's own `ProcMesh.run`, without Jupyter."""

from __future__ import annotations

import os
import time
from typing import Any, cast

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as in ranks; must be set before torch is imported

import torch

from benchmarks import peer
from benchmarks.bulk import copies, ends, receive
from monarch_kernel.actor import Actor, endpoint, shutdown_context, this_host
from monarch_kernel.rdma import RDMABuffer


class Echo(Actor):
    """Returns its argument."""

    def __init__(self) -> None:
        self.given_count = 0

    @endpoint
    def ready(self) -> int:
        import torch  # noqa: F401

        return os.getpid()

    @endpoint
    def echo(self, value: int) -> int:
        return value

    @endpoint
    def ask(self, other: Any, count: int) -> list[float]:
        """Call another rank repeatedly; gives the seconds of each call."""
        times = []
        for value in range(count):
            begin = time.perf_counter()
            answer = other.echo.call_one(value).get()
            times.append(time.perf_counter() - begin)
            assert answer == value
        return times

    @endpoint
    def nothing(self, *args: Any) -> None:
        pass

    @endpoint
    def take(self, value: Any) -> float:
        return ends(value)

    @endpoint
    def give(self, count: int) -> Any:
        if count != self.given_count:
            self.given_count, self.given = count, torch.ones(count)
        return self.given

    @endpoint
    def copies(self, count: int, repeat: int) -> list[float]:
        return copies(count, repeat)

    @endpoint
    def lend(self, count: int) -> Any:
        return RDMABuffer(torch.ones(count))

    @endpoint
    def fetches(self, other: Any, count: int, repeat: int, is_fresh: bool) -> list[float]:
        buffer = other.lend.call_one(count).get()
        times = receive(lambda target: buffer.read_into(target).get(), count, repeat, is_fresh)
        buffer.drop().get()
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

    def empty(self, *args: Any) -> None:
        self.first.nothing.call_one(*args).get()

    def values(self, count: int) -> Any:
        return torch.ones(count)

    def take(self, value: Any) -> float:
        found: float = self.first.take.call_one(value).get()
        return found

    def take_all(self, value: Any) -> list[float]:
        return [found for _, found in self.actors.take.call(value).get()]

    def give(self, count: int) -> Any:
        return self.first.give.call_one(count).get()

    def copies(self, count: int, repeat: int) -> list[float]:
        times: list[float] = self.first.copies.call_one(count, repeat).get()
        return times

    def fetches(self, count: int, repeat: int, is_fresh: bool) -> list[float]:
        times: list[float] = self.first.fetches.call_one(self.actors.slice(gpus=1), count, repeat, is_fresh).get()
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
