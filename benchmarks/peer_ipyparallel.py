"""ipyparallel as a peer: one engine for each rank; a call is ``apply`` of a function, a cell is ``DirectView.execute``."""

# The peer is optional, so its types may be missing.

from __future__ import annotations

import logging
from typing import Any

import ipyparallel
import numpy

from benchmarks import peer
from benchmarks.bulk import copies, ends


def ready() -> int:
    """Import torch and return the process id."""
    import os

    import torch  # noqa: F401

    return os.getpid()


def echo(value: int) -> int:
    """Return the argument."""
    return value


def nothing(*args: Any) -> None:
    """Take any arguments, and return nothing."""


def give(count: int) -> Any:
    """Return this many ones, which are made once."""
    import numpy

    kept = globals().setdefault("_kept", {})
    if count not in kept:
        kept.clear()
        kept[count] = numpy.ones(count, "f4")
    return kept[count]


class IpyparallelMesh:
    """Views of all engines and of the first."""

    def __init__(self, client: Any) -> None:
        self.every: Any = client[:]
        self.first: Any = client[0]
        self.rank_pids: list[int] = self.every.apply_sync(ready)

    def call(self, value: int) -> list[int]:
        answers: list[int] = self.every.apply_sync(echo, value)
        return answers

    def call_one(self, value: int) -> int:
        answer: int = self.first.apply_sync(echo, value)
        return answer

    def cell(self) -> None:
        self.every.execute("pass", block=True)

    def outstanding(self, count: int) -> list[int]:
        results = [self.first.apply_async(echo, value) for value in range(count)]
        return [result.get() for result in results]

    def between(self, count: int) -> list[float]:
        raise NotImplementedError("engines of ipyparallel do not call each other")

    def empty(self, *args: Any) -> None:
        self.first.apply_sync(nothing, *args)

    def values(self, count: int) -> Any:
        return numpy.ones(count, "f4")

    def take(self, value: Any) -> float:
        found: float = self.first.apply_sync(ends, value)
        return found

    def take_all(self, value: Any) -> list[float]:
        found: list[float] = self.every.apply_sync(ends, value)
        return found

    def give(self, count: int) -> Any:
        return self.first.apply_sync(give, count)

    def copies(self, count: int, repeat: int) -> list[float]:
        times: list[float] = self.first.apply_sync(copies, count, repeat)
        return times

    def fetches(self, count: int, repeat: int, is_fresh: bool) -> list[float]:
        raise NotImplementedError("engines of ipyparallel do not call each other")

    def pids(self) -> list[int]:
        return self.rank_pids


class IpyparallelPeer:
    """Starts a local cluster: a controller and its engines."""

    def start(self, ranks: int) -> IpyparallelMesh:
        self.cluster: Any = ipyparallel.Cluster(n=ranks, log_level=logging.ERROR)
        return IpyparallelMesh(self.cluster.start_and_connect_sync())

    def start_again(self, ranks: int) -> IpyparallelMesh:
        raise NotImplementedError("an ipyparallel client has one cluster")

    def stop(self) -> None:
        self.cluster.stop_cluster_sync()


if __name__ == "__main__":
    peer.main(IpyparallelPeer())
