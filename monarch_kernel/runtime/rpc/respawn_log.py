"""What has been spawned, kept by whoever has spawned it, so that processes that come in place of others make it, too. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from monarch_kernel.net.wire.codec import Packed

__all__ = ["MakeSpawn", "RespawnLog", "SpawnRecord"]

MakeSpawn = Callable[[int, "Sequence[int] | None"], Packed]
"""Gives the `Spawn` for a request id; for a process in the place of another also with the processes that live on."""


@dataclass(slots=True)
class SpawnRecord:
    """One actor mesh.

    ``procs`` are those that have it, or died with it; ``coming`` are, by request, those that are making it again, ``failed``
    those that live on without it.
    """

    actor: int
    note: str
    make: MakeSpawn
    procs: set[int]
    coming: dict[int, tuple[int, ...]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)


class RespawnLog:
    """The actor meshes that one process has spawned and not stopped, oldest first."""

    def __init__(self) -> None:
        self._by_actor: dict[int, SpawnRecord] = {}
        self._by_request: dict[int, SpawnRecord] = {}

    def __len__(self) -> int:
        return len(self._by_actor)

    def add(self, actor: int, procs: Iterable[int], note: str, make: MakeSpawn, request: int) -> None:
        """Keep a spawn that is sent as a request."""
        kept = self._by_actor[actor] = SpawnRecord(actor, note, make, set(procs))
        self._by_request[request] = kept

    def again(self, kept: SpawnRecord, request: int, procs: Sequence[int], dead: Collection[int]) -> Packed:
        """The message for processes that have come in place of others.

        They may ask those where it lives on. Not among these are others that are coming, too: they may be asking *them*.
        """
        others = kept.procs.difference(procs, dead, kept.failed, *kept.coming.values())
        kept.failed.difference_update(procs)
        kept.coming[request] = tuple(procs)
        self._by_request[request] = kept
        return kept.make(request, sorted(others))

    def over(self, request: int) -> None:
        """All have answered a request."""
        kept = self._by_request.pop(request, None)
        if kept is not None:
            kept.coming.pop(request, None)

    def refused(self, request: int, proc: int) -> None:
        """The request has failed in a process that lives: there never was such an actor there.

        One that fails to be made *again* is another matter: its next process may have more luck.
        """
        kept = self._by_request.get(request)
        if kept is not None and request not in kept.coming:
            self.forget((proc,), kept.actor)

    def ended(self, actor: int, proc: int) -> None:
        """An actor has died alone."""
        if actor in self._by_actor:
            self._by_actor[actor].failed.add(proc)

    def forget(self, procs: Iterable[int], actor: int = 0) -> None:
        """These processes are no more to have an actor, or any if none is named."""
        gone = set(procs)
        for kept in list(self._by_actor.values()):
            if actor in (0, kept.actor):
                kept.procs -= gone
                if not kept.procs:
                    del self._by_actor[kept.actor]

    def of(self, procs: Iterable[int]) -> Iterator[tuple[SpawnRecord, tuple[int, ...]]]:
        """What these processes are to have, and which of them; in the order in which it was spawned."""
        wanted = tuple(procs)
        for kept in list(self._by_actor.values()):
            having = tuple(proc for proc in wanted if proc in kept.procs)
            if having:
                yield kept, having
