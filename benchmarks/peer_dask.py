"""dask.distributed as a peer: one single-threaded worker process for each rank, each with an actor.

The benchmark uses the fastest of several equivalent calls: an actor's method for one rank, ``Client.run`` for all of them.
"""

# The peer is optional, so its types may be missing.

from __future__ import annotations

import os
import time
from typing import Any

import numpy
from distributed import Client, LocalCluster, wait

from benchmarks import peer
from benchmarks.bulk import WARMUP, copies, ends


class Echo:
    """Returns its argument."""

    def __init__(self) -> None:
        self.given_count = 0

    def ready(self) -> int:
        import torch  # noqa: F401

        return os.getpid()

    def echo(self, value: int) -> int:
        return value

    def nothing(self, *args: Any) -> None:
        pass

    def take(self, value: Any) -> float:
        return ends(value)

    def give(self, count: int) -> Any:
        if count != self.given_count:
            self.given_count, self.given = count, numpy.ones(count, "f4")
        return self.given

    def copies(self, count: int, repeat: int) -> list[float]:
        return copies(count, repeat)


def echo(value: int) -> int:
    """Return the argument."""
    return value


def run(source: str) -> None:
    """Run code as a cell."""
    exec(compile(source, "<cell>", "exec"), {})


def ones(count: int) -> Any:
    """Make values in the process where they are needed."""
    return numpy.ones(count, "f4")


class DaskMesh:
    """The workers of a cluster, each with one actor."""

    def __init__(self, client: Any, ranks: int) -> None:
        self.client = client
        workers = self.workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
        if len(workers) != ranks:
            raise RuntimeError(f"{len(workers)} of {ranks} workers came up")
        pending = [client.submit(Echo, actor=True, workers=[worker], pure=False) for worker in workers]
        self.actors: list[Any] = [future.result() for future in pending]
        self.rank_pids: list[int] = [answer.result() for answer in [actor.ready() for actor in self.actors]]

    def call(self, value: int) -> list[int]:
        return list(self.client.run(echo, value).values())

    def call_one(self, value: int) -> int:
        answer: int = self.actors[0].echo(value).result()
        return answer

    def cell(self) -> None:
        self.client.run(run, "pass")

    def outstanding(self, count: int) -> list[int]:
        futures = [self.actors[0].echo(value) for value in range(count)]
        return [future.result() for future in futures]

    def between(self, count: int) -> list[float]:
        raise NotImplementedError("tasks of Dask are not addressed by other tasks")

    def empty(self, *args: Any) -> None:
        self.actors[0].nothing(*args).result()

    def values(self, count: int) -> Any:
        return numpy.ones(count, "f4")

    def take(self, value: Any) -> float:
        found: float = self.actors[0].take(value).result()
        return found

    def take_all(self, value: Any) -> list[float]:
        return list(self.client.run(ends, value).values())

    def give(self, count: int) -> Any:
        return self.actors[0].give(count).result()

    def copies(self, count: int, repeat: int) -> list[float]:
        times: list[float] = self.actors[0].copies(count, repeat).result()
        return times

    def fetches(self, count: int, repeat: int, is_fresh: bool) -> list[float]:
        if not is_fresh:
            raise NotImplementedError("Dask decides where values arrive")
        there, here = self.workers[1], self.workers[0]
        times = []
        for _ in range(WARMUP + repeat):  # what a worker's memory holds after the read
            made = self.client.submit(ones, count, workers=[there], pure=False)
            wait(made)
            begin = time.perf_counter()
            assert self.client.submit(ends, made, workers=[here], pure=False).result() == 2.0
            times.append(time.perf_counter() - begin)
        return times[WARMUP:]

    def pids(self) -> list[int]:
        return self.rank_pids


class DaskPeer:
    """Starts a local cluster."""

    def start(self, ranks: int) -> DaskMesh:
        self.cluster: Any = LocalCluster(n_workers=ranks, threads_per_worker=1, processes=True, dashboard_address=None)
        self.client: Any = Client(self.cluster)
        return DaskMesh(self.client, ranks)

    def start_again(self, ranks: int) -> DaskMesh:
        raise NotImplementedError("a dask cluster grows, but has no second set of workers")

    def stop(self) -> None:
        self.client.close()
        self.cluster.close()


# The workers are spawned by multiprocessing and import this file again.
if __name__ == "__main__":
    peer.main(DaskPeer())
