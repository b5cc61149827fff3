"""dask.distributed as a peer: one single-threaded worker process for each rank, each with an actor.

Of several ways to say the same, the fastest is taken: an actor's method for one rank, `Client.run` for all of them.
"""

# The peer is optional, so its types are not known everywhere.
# mypy: disable-error-code="import-not-found,import-untyped,misc,untyped-decorator"

from __future__ import annotations

import os
from typing import Any

from distributed import Client, LocalCluster

from benchmarks import peer


class Echo:
    """Returns what it gets."""

    def ready(self) -> int:
        import torch  # noqa: F401

        return os.getpid()

    def echo(self, value: int) -> int:
        return value


def echo(value: int) -> int:
    """Return what comes in."""
    return value


def run(source: str) -> None:
    """Run code as a cell."""
    exec(compile(source, "<cell>", "exec"), {})


class DaskMesh:
    """The workers of a cluster, each with one actor."""

    def __init__(self, client: Any, ranks: int) -> None:
        self.client = client
        workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
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
