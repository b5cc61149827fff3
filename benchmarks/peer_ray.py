"""Ray as a peer: one actor for each rank on a local cluster; a cell is a method that runs code."""

# The peer is optional, so its types may be missing.

from __future__ import annotations

import os
import time
from typing import Any

import numpy
import ray

from benchmarks import peer
from benchmarks.bulk import copies, ends, receive


class Echo:
    """Returns its argument, and runs code."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {}
        self.given_count = 0

    def ready(self) -> int:
        import torch  # noqa: F401

        return os.getpid()

    def echo(self, value: int) -> int:
        return value

    def ask(self, other: Any, count: int) -> list[float]:
        """Call another rank repeatedly; gives the seconds of each call."""
        times = []
        for value in range(count):
            begin = time.perf_counter()
            answer = ray.get(other.echo.remote(value))
            times.append(time.perf_counter() - begin)
            assert answer == value
        return times

    def run(self, source: str) -> None:
        exec(compile(source, "<cell>", "exec"), self.namespace)

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

    def fetches(self, other: Any, count: int, repeat: int, is_fresh: bool) -> list[float]:
        def read(target: Any) -> None:
            target.numpy()[:] = ray.get(other.give.remote(count))

        return receive(read, count, repeat, is_fresh)


RemoteEcho: Any = ray.remote(num_cpus=0)(Echo)


class RayMesh:
    """A list of actors, which is how Ray addresses many at once."""

    def __init__(self, ranks: int) -> None:
        self.actors: list[Any] = [RemoteEcho.remote() for _ in range(ranks)]
        self.rank_pids: list[int] = ray.get([actor.ready.remote() for actor in self.actors])

    def call(self, value: int) -> list[int]:
        answers: list[int] = ray.get([actor.echo.remote(value) for actor in self.actors])
        return answers

    def call_one(self, value: int) -> int:
        answer: int = ray.get(self.actors[0].echo.remote(value))
        return answer

    def cell(self) -> None:
        ray.get([actor.run.remote("pass") for actor in self.actors])

    def outstanding(self, count: int) -> list[int]:
        answers: list[int] = ray.get([self.actors[0].echo.remote(value) for value in range(count)])
        return answers

    def between(self, count: int) -> list[float]:
        times: list[float] = ray.get(self.actors[0].ask.remote(self.actors[1], count))
        return times

    def empty(self, *args: Any) -> None:
        ray.get(self.actors[0].nothing.remote(*args))

    def values(self, count: int) -> Any:
        return numpy.ones(count, "f4")

    def take(self, value: Any) -> float:
        found: float = ray.get(self.actors[0].take.remote(value))
        return found

    def take_all(self, value: Any) -> list[float]:
        stored = ray.put(value)
        found: list[float] = ray.get([actor.take.remote(stored) for actor in self.actors])
        return found

    def give(self, count: int) -> Any:
        return ray.get(self.actors[0].give.remote(count))

    def copies(self, count: int, repeat: int) -> list[float]:
        times: list[float] = ray.get(self.actors[0].copies.remote(count, repeat))
        return times

    def fetches(self, count: int, repeat: int, is_fresh: bool) -> list[float]:
        times: list[float] = ray.get(self.actors[0].fetches.remote(self.actors[1], count, repeat, is_fresh))
        return times

    def pids(self) -> list[int]:
        return self.rank_pids


class RayPeer:
    """Starts a local cluster with as many CPUs as ranks, without dashboard and log forwarding."""

    def __init__(self) -> None:
        self.meshes: list[RayMesh] = []

    def start(self, ranks: int) -> RayMesh:
        ray.init("local", num_cpus=ranks, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        return self.start_again(ranks)

    def start_again(self, ranks: int) -> RayMesh:
        # An actor ends with its last handle, so the meshes are kept.
        self.meshes.append(RayMesh(ranks))
        return self.meshes[-1]

    def stop(self) -> None:
        ray.shutdown()


if __name__ == "__main__":
    peer.main(RayPeer())
