"""The log of actor meshes that one process has spawned, so that processes that replace others make them, too. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from monarch_kernel.net.wire.codec import Packed

__all__ = ["MakeSpawn", "RespawnLog", "SpawnRecord"]

MakeSpawn = Callable[[int, "Sequence[int] | None"], Packed]
"""Makes the `Spawn` for a request id; for a process that replaces another, also takes those that still have the actor."""


@dataclass(slots=True)
class SpawnRecord:
    """One actor mesh.

    ``procs`` are the processes that have it, or died with it. ``coming`` maps requests to the processes that make it again.
    ``failed`` are the processes that live on without it.
    """

    actor: int
    description: str
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

    def add(self, actor: int, procs: Iterable[int], description: str, make: MakeSpawn, request: int) -> None:
        """Record a spawn that is sent as a request."""
        kept = self._by_actor[actor] = SpawnRecord(actor, description, make, set(procs))
        self._by_request[request] = kept

    def again(self, kept: SpawnRecord, request: int, procs: Sequence[int], dead: Collection[int]) -> Packed:
        """Make the message for processes that replace others.

        They may ask the processes where the actor lives on. These do not include others that are making it again, which may be
        asking *them*.
        """
        others = kept.procs.difference(procs, dead, kept.failed, *kept.coming.values())
        kept.failed.difference_update(procs)
        kept.coming[request] = tuple(procs)
        self._by_request[request] = kept
        return kept.make(request, sorted(others))

    def over(self, request: int) -> None:
        """Note that a request has resolved."""
        kept = self._by_request.pop(request, None)
        if kept is not None:
            kept.coming.pop(request, None)

    def refused(self, request: int, proc: int) -> None:
        """Note that a request has failed in a process that lives: there was never such an actor there.

        If an actor fails to be made *again*, it stays in the log: the next process may succeed.
        """
        kept = self._by_request.get(request)
        if kept is not None and request not in kept.coming:
            self.forget((proc,), kept.actor)

    def ended(self, actor: int, proc: int) -> None:
        """Note that an actor has died, but not its process."""
        if actor in self._by_actor:
            self._by_actor[actor].failed.add(proc)

    def forget(self, procs: Iterable[int], actor: int = 0) -> None:
        """Do not make an actor again in these processes; any actor, if none is named."""
        gone = set(procs)
        for kept in list(self._by_actor.values()):
            if actor in (0, kept.actor):
                kept.procs -= gone
                if not kept.procs:
                    del self._by_actor[kept.actor]

    def of(self, procs: Iterable[int]) -> Iterator[tuple[SpawnRecord, tuple[int, ...]]]:
        """Yield the actor meshes that these processes must have, in the order of the spawns, each with those processes."""
        wanted = tuple(procs)
        for kept in list(self._by_actor.values()):
            having = tuple(proc for proc in wanted if proc in kept.procs)
            if having:
                yield kept, having
