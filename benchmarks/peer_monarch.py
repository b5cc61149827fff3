"""torchmonarch as a peer: one actor in each process of a local mesh; a cell is an endpoint that runs code."""

# The peer is optional, so its types are not known everywhere.
# mypy: disable-error-code="import-not-found,import-untyped,misc,untyped-decorator"

from __future__ import annotations

import os
import time
from typing import Any

from monarch.actor import Actor, endpoint, shutdown_context, this_host

from benchmarks import peer


class Echo(Actor):
    """Returns what it gets, and runs code."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {}

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

    @endpoint
    def run(self, source: str) -> None:
        exec(compile(source, "<cell>", "exec"), self.namespace)


class MonarchMesh:
    """A spawned actor mesh."""

    def __init__(self, ranks: int) -> None:
        self.actors: Any = this_host().spawn_procs(per_host={"gpus": ranks}).spawn("echo", Echo)
        self.rank_pids = [pid for _, pid in self.actors.ready.call().get()]
        self.first: Any = self.actors.slice(gpus=0)

    def call(self, value: int) -> list[int]:
        return [answer for _, answer in self.actors.echo.call(value).get()]

    def call_one(self, value: int) -> int:
        answer: int = self.first.echo.call_one(value).get()
        return answer

    def cell(self) -> None:
        self.actors.run.call("pass").get()

    def outstanding(self, count: int) -> list[int]:
        futures = [self.first.echo.call_one(value) for value in range(count)]
        return [future.get() for future in futures]

    def between(self, count: int) -> list[float]:
        times: list[float] = self.first.ask.call_one(self.actors.slice(gpus=1), count).get()
        return times

    def pids(self) -> list[int]:
        return self.rank_pids


class MonarchPeer:
    """Starts process meshes on this host."""

    def start(self, ranks: int) -> MonarchMesh:
        return MonarchMesh(ranks)

    def start_again(self, ranks: int) -> MonarchMesh:
        return MonarchMesh(ranks)

    def stop(self) -> None:
        shutdown_context().get()


if __name__ == "__main__":
    peer.main(MonarchPeer())
