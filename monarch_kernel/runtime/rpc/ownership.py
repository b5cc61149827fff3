"""Who has spawned whom, as one process knows it, and to whom a failure goes: no I/O, no threads, no clock.

Theory of operation
===================

Each process has one `Family`. It knows two things: the *children*, meshes of actors that this process's actors or its program
have spawned; and the *hosted* actors, those that live here, each with the process of its owner. A child and its owner are
in different families unless they share a process, and these families only know what messages tell them.

An actor ends in one of two ways. *Stopped*: somebody has asked for it. *Failed*: an exception without anybody to answer to, a
child's failure that it did not handle, or the death of its process. In every case what it has spawned is stopped, and so on
down the tree, for each child that is stopped does the same in its own process. What failed is told to the owner's process
(`TellOwner`); the death of a process is told by the transport to every process that has something to do with it.

So an owner may hear of one end twice: from the actor, and from the death of its process. Only the first counts, for a place
of a child is either there or gone. The failures of a child that nobody has looked at yet are one `MeshFailure`: four ranks
that fail together are handled once. `Attend` asks the owner to look, which it does when it can (`take`). If it does not
handle what it has taken it ends, with that as the cause (`ended`), and its own owner is told: a failure goes up until
somebody handles it, or as far as the program.

When a process dies there is nobody left to stop what its actors had spawned elsewhere. So whoever hosts an actor watches the
process of its owner (`Watch`), and ends the actor with it (`EndOrphan`).

A failure ends in exactly one of these ways: an owner takes it; its owner ends before that, of whatever cause, and with the
owner all that it has; or the owner has stopped the mesh before it heard of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from monarch_kernel.errors import Failure, MeshFailure

__all__ = ["PROGRAM", "Attend", "Effect", "EndOrphan", "Family", "Process", "Stop", "TellOwner", "Watch"]

PROGRAM = 0
"""The owner of what no actor has spawned."""


class Process(NamedTuple):
    """A process: its place in the session, and how many have been there before it."""

    proc: int
    incarnation: int = 0


class Attend(NamedTuple):
    """Effect: have an owner look at what has failed, by `Family.take`, as soon as it can."""

    owner: int


class Stop(NamedTuple):
    """Effect: stop a mesh of actors in these processes."""

    actor: int
    procs: tuple[int, ...]
    reason: str


class TellOwner(NamedTuple):
    """Effect: tell a process that an actor which it has spawned is over; without a failure it was stopped."""

    process: Process
    actor: int
    failure: Failure | None
    cause: MeshFailure | None


class EndOrphan(NamedTuple):
    """Effect: end an actor that lives here; `Family.ended` is called when it has ended."""

    actor: int
    reason: str


class Watch(NamedTuple):
    """Effect: have the family told when this process is gone, at once if it is."""

    process: Process


Effect = Attend | EndOrphan | Stop | TellOwner | Watch


@dataclass(slots=True)
class _Child:
    """A mesh of actors that was spawned here.

    ``ranks`` maps each process to the flat rank there. ``alive`` has those where the actor is not over, and the incarnation of
    the process that has it: None until it is known, when the message that makes the actor is still held.
    """

    actor: int
    name: str
    owner: int
    ranks: dict[int, int]
    alive: dict[int, int | None]
    mesh: Any


@dataclass(slots=True)
class _News:
    """What has failed of one child, and has not been looked at."""

    child: _Child
    reports: dict[int, Failure] = field(default_factory=dict)
    causes: dict[int, MeshFailure] = field(default_factory=dict)


class Family:
    """What one process knows of who has spawned whom."""

    def __init__(self) -> None:
        self._children: dict[int, _Child] = {}
        self._of_owner: dict[int, dict[int, _Child]] = {}  # owner -> its children
        self._hosted: dict[int, Process] = {}  # actor that lives here -> process of its owner
        self._orphans: set[int] = set()  # those of them that have been told to end
        self._news: dict[int, list[_News]] = {}  # owner -> what has failed, and has not been looked at
        self._up: dict[int, int] = {}  # process -> its incarnation, as last heard

    @property
    def children(self) -> frozenset[int]:
        """Numbers of the meshes that were spawned here and are not over."""
        return frozenset(self._children)

    @property
    def hosted(self) -> Mapping[int, Process]:
        """Actors that live here -> the process of their owner."""
        return self._hosted

    def has_news(self, owner: int) -> bool:
        """Whether an owner has something to look at."""
        return owner in self._news

    # -- what is spawned here

    def spawned(self, actor: int, name: str, owner: int, procs: Sequence[int], mesh: Any = None) -> list[Effect]:
        """An actor of this process, or its program, has spawned a mesh of actors in these processes, by flat rank.

        ``mesh`` is what the owner has of it, for the failures that it is told.
        """
        if owner != PROGRAM and owner not in self._hosted:
            return [Stop(actor, tuple(procs), "its owner ended")]  # a moment ago
        alive = {proc: self._up.get(proc) for proc in procs}
        child = _Child(actor, name, owner, {proc: rank for rank, proc in enumerate(procs)}, alive, mesh)
        self._children[actor] = child
        self._of_owner.setdefault(owner, {})[actor] = child
        return []

    def refused(self, actor: int, deaths: Mapping[int, Failure]) -> list[Effect]:
        """A mesh is not made at all, because some of its processes are dead."""
        child = self._children.get(actor)
        if child is None:
            return []
        not_made = Failure("stopped", "NotSent", "it was not made, because another rank is dead")
        procs = list(child.alive)
        return [effect for proc in procs for effect in self._failed(child, proc, deaths.get(proc, not_made), None)]

    def respawned(self, actor: int, proc: int) -> list[Effect]:
        """An actor of a mesh that was spawned here was made anew, in the process that has taken its old one's place."""
        child = self._children.get(actor)
        if child is not None and proc in child.ranks:
            child.alive[proc] = self._up.get(proc)
        return []

    def stopped(self, actor: int, procs: Iterable[int] | None = None) -> list[Effect]:
        """The owner has stopped a mesh that it had spawned, or its part in these processes: that no longer fails."""
        child = self._children.get(actor)
        if child is None:
            return []
        for proc in list(child.ranks) if procs is None else procs:
            child.alive.pop(proc, None)
            child.ranks.pop(proc, None)
        if not child.ranks:
            self._forget(child)
        return []

    def child_ended(
        self, actor: int, process: Process, failure: Failure | None = None, cause: MeshFailure | None = None
    ) -> list[Effect]:
        """An actor that was spawned here says that it is over; without a failure somebody has stopped it."""
        child = self._children.get(actor)
        if child is None or child.alive.get(process.proc, -1) not in (None, process.incarnation):
            return []  # it is known, or was one that has been replaced
        if failure is None:
            return self.stopped(actor, [process.proc])
        return self._failed(child, process.proc, failure, cause)

    def take(self, owner: int) -> MeshFailure | None:
        """Give what has failed longest ago of what an owner has spawned, for it to handle; None if there is nothing more.

        An owner that does not handle it has failed, too: `ended`, with what was taken as the cause.
        """
        news = self._news.get(owner)
        if news is None:
            return None
        found = news.pop(0)
        if not news:
            del self._news[owner]
        return MeshFailure(found.child.name, found.reports, found.causes, found.child.actor, found.child.mesh)

    # -- what lives here

    def hosts(self, actor: int, owner: Process) -> list[Effect]:
        """An actor is made here, for an owner in that process."""
        self._hosted[actor] = owner
        return [Watch(owner)]

    def ended(self, actor: int, failure: Failure | None = None, cause: MeshFailure | None = None) -> list[Effect]:
        """An actor that lives here is over: stopped, or by a failure, which may be that of a child (``cause``)."""
        owner = self._hosted.pop(actor, None)
        if owner is None:
            return []
        effects = self.owner_ended(actor, "its owner has failed" if failure else "its owner ended")
        cause = None if cause is None else cause.without_mesh()
        if actor in self._orphans:  # there is nobody to tell
            self._orphans.remove(actor)
            return effects
        return [*effects, TellOwner(owner, actor, failure, cause)]

    def owner_ended(self, owner: int, reason: str) -> list[Effect]:
        """Whoever spawned these children is over, and so are they."""
        self._news.pop(owner, None)
        effects: list[Effect] = []
        for child in list(self._of_owner.get(owner, {}).values()):
            effects.append(
                Stop(child.actor, tuple(child.ranks), reason)
            )  # those that failed answer until they are stopped
            self._forget(child)
        return effects

    # -- other processes

    def process_up(self, process: Process) -> list[Effect]:
        """A process is there; all that were in its place before it are gone."""
        proc, incarnation = process
        effects: list[Effect] = []
        if incarnation:
            replaced = Failure("lost", "RankDied", "the process was replaced")
            effects += self._gone(Process(proc, incarnation - 1), replaced, held=False)
        self._up[proc] = incarnation
        for child in self._children.values():
            if proc in child.alive and child.alive[proc] is None:
                child.alive[proc] = incarnation
        return effects

    def process_gone(self, process: Process, death: Failure) -> list[Effect]:
        """A process is gone: it has died, or was stopped, which is no failure."""
        if self._up.get(process.proc, -1) <= process.incarnation:
            self._up.pop(process.proc, None)
        return self._gone(process, death, held=True)

    # -- inside

    def _gone(self, process: Process, death: Failure, *, held: bool) -> list[Effect]:
        """What follows for children in a process, and for actors here whose owners were in it."""
        proc, incarnation = process
        effects: list[Effect] = []
        for child in list(self._children.values()):
            there = child.alive.get(proc, -1)
            if there == -1 or (there is None and not held) or (there is not None and there > incarnation):
                continue
            if death.kind == "stopped":
                del child.alive[proc]
            else:
                effects += self._failed(child, proc, death, None)
        why = f"the process of its owner is gone: {death.message}"
        orphans = {
            actor
            for actor, owner in self._hosted.items()
            if owner.proc == proc and owner.incarnation <= incarnation and actor not in self._orphans
        }
        self._orphans |= orphans
        return effects + [EndOrphan(actor, why) for actor in sorted(orphans)]

    def _failed(self, child: _Child, proc: int, failure: Failure, cause: MeshFailure | None) -> list[Effect]:
        del child.alive[proc]
        rank, owner = child.ranks[proc], child.owner
        is_first = owner not in self._news
        news = self._news.setdefault(owner, [])
        found = next((each for each in news if each.child is child and rank not in each.reports), None)
        if found is None:  # or this rank has failed twice, with another process in its place
            found = _News(child)
            news.append(found)
        found.reports[rank] = failure
        if cause is not None:
            found.causes[rank] = cause
        return [Attend(owner)] if is_first else []

    def _forget(self, child: _Child) -> None:
        del self._children[child.actor]
        siblings = self._of_owner[child.owner]
        del siblings[child.actor]
        if not siblings:
            del self._of_owner[child.owner]
