"""What has been spawned, kept by whoever has spawned it, so that processes that come in place of others make it, too. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from monarch_kernel.wire.codec import Packed

__all__ = ["KeptSpawn", "KeptSpawns", "MakeSpawn"]

MakeSpawn = Callable[[int, "Sequence[int] | None"], Packed]
"""Gives the `Spawn` for a request id; for a process in the place of another also with the processes that live on."""


@dataclass(slots=True)
class KeptSpawn:
    """One actor mesh: ``procs`` are those that have it, or died with it."""

    actor: int
    note: str
    make: MakeSpawn
    procs: set[int]


class KeptSpawns:
    """The actor meshes that one process has spawned and not stopped, oldest first."""

    def __init__(self) -> None:
        self._by_actor: dict[int, KeptSpawn] = {}
        self._by_request: dict[int, KeptSpawn] = {}

    def __len__(self) -> int:
        return len(self._by_actor)

    def add(self, actor: int, procs: Iterable[int], note: str, make: MakeSpawn, request: int) -> None:
        """Keep a spawn that is sent as a request."""
        kept = self._by_actor[actor] = KeptSpawn(actor, note, make, set(procs))
        self._by_request[request] = kept

    def over(self, request: int) -> None:
        """All have answered a request."""
        self._by_request.pop(request, None)

    def refused(self, request: int, proc: int) -> None:
        """The request has failed in a process that lives: there never was such an actor there.

        One that fails to be made *again* is another matter: its next process may have more luck.
        """
        kept = self._by_request.get(request)
        if kept is not None:
            self.forget((proc,), kept.actor)

    def forget(self, procs: Iterable[int], actor: int = 0) -> None:
        """These processes are no more to have an actor, or any if none is named."""
        gone = set(procs)
        for kept in list(self._by_actor.values()):
            if actor in (0, kept.actor):
                kept.procs -= gone
                if not kept.procs:
                    del self._by_actor[kept.actor]

    def of(self, procs: Iterable[int]) -> Iterator[tuple[KeptSpawn, tuple[int, ...]]]:
        """What these processes are to have, and which of them; in the order in which it was spawned."""
        wanted = tuple(procs)
        for kept in list(self._by_actor.values()):
            having = tuple(proc for proc in wanted if proc in kept.procs)
            if having:
                yield kept, having
