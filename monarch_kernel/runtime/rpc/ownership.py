"""Tracks which actors one process has spawned, and which owner gets a failure: no I/O, no threads, no clock.

Theory of operation
===================

Each process has one `OwnershipTree`. It knows two things: the *children*, meshes of actors that this process's actors or its
program have spawned; and the *hosted* actors, which live here, each with the process of its owner. A child and its owner are
in different families unless they share a process, and a family knows of others only from messages.

An actor ends in one of two ways. *Stopped*: the program or an actor requested it. *Failed*: by an exception that no caller
receives, by a child's failure that it did not handle, or by the death of its process. In every case its children are stopped,
and so on down the tree, because each stopped child does the same in its own process. A failure is reported to the owner's
process (`TellOwner`); the transport reports the death of a process to every process that watches it.

So an owner may learn of one end twice: from the actor, and from the death of its process. Only the first report counts,
because an actor of a child is either alive or not. The failures of a child that its owner has not looked at yet are one
`MeshFailure`: four ranks that fail together are handled once. `NotifyOwner` asks the owner to look, which it does when it can
(`take`). If it does not handle a failure, it ends, with that as the cause (`ended`), and its own owner gets the failure: it
goes up until an owner handles it, or as far as the program.

If a process dies, nothing is left to stop the actors that its actors had spawned elsewhere. So a process that hosts an actor
watches the process of the owner (`Watch`), and ends the actor with it (`StopOrphan`).

A failure ends in exactly one of these ways: an owner takes it; its owner ends before that, for any cause, together with
all its children; or the owner has stopped the mesh before the failure arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from monarch_kernel.errors import Failure, MeshFailure

__all__ = ["PROGRAM", "Effect", "NotifyOwner", "OwnershipTree", "Process", "Stop", "StopOrphan", "TellOwner", "Watch"]

PROGRAM = 0
"""The owner of meshes that the program, and no actor, has spawned."""


class Process(NamedTuple):
    """A process: its number in the session, and how many processes had this number before it."""

    proc: int
    incarnation: int = 0


class NotifyOwner(NamedTuple):
    """Effect: ask an owner to look at failures, by `OwnershipTree.take`, as soon as it can."""

    owner: int


class Stop(NamedTuple):
    """Effect: stop a mesh of actors in these processes."""

    actor: int
    procs: tuple[int, ...]
    reason: str


class TellOwner(NamedTuple):
    """Effect: report to a process that an actor it has spawned is over; without a failure, the actor was stopped."""

    process: Process
    actor: int
    failure: Failure | None
    cause: MeshFailure | None


class StopOrphan(NamedTuple):
    """Effect: end an actor that lives here; its end calls `OwnershipTree.ended`."""

    actor: int
    reason: str


class Watch(NamedTuple):
    """Effect: report to the family when this process is gone, at once if it is gone already."""

    process: Process


Effect = NotifyOwner | StopOrphan | Stop | TellOwner | Watch


@dataclass(slots=True)
class _Child:
    """A mesh of actors that was spawned here.

    ``ranks`` maps each process to the flat rank there. ``alive`` maps the processes whose actor is not over to their
    incarnation, which is None while the message that makes the actor is still held.
    """

    actor: int
    name: str
    owner: int
    ranks: dict[int, int]
    alive: dict[int, int | None]
    mesh: Any


@dataclass(slots=True)
class _News:
    """Failures of one child that its owner has not looked at."""

    child: _Child
    reports: dict[int, Failure] = field(default_factory=dict)
    causes: dict[int, MeshFailure] = field(default_factory=dict)


class OwnershipTree:
    """The meshes that one process has spawned, and the actors that it hosts."""

    def __init__(self) -> None:
        self._children: dict[int, _Child] = {}
        self._of_owner: dict[int, dict[int, _Child]] = {}  # owner -> its children
        self._hosted: dict[int, Process] = {}  # actor that lives here -> process of its owner
        self._orphans: set[int] = set()  # hosted actors that have a message to end
        self._news: dict[int, list[_News]] = {}  # owner -> failures that it has not looked at
        self._up: dict[int, int] = {}  # process -> its incarnation, as last reported

    @property
    def children(self) -> frozenset[int]:
        """Numbers of the meshes that were spawned here and are not over."""
        return frozenset(self._children)

    @property
    def hosted(self) -> Mapping[int, Process]:
        """Actors that live here, each with the process of its owner."""
        return self._hosted

    def has_news(self, owner: int) -> bool:
        """Whether an owner has failures to look at."""
        return owner in self._news

    # -- what is spawned here

    def spawned(self, actor: int, name: str, owner: int, procs: Sequence[int], mesh: Any = None) -> list[Effect]:
        """Register a mesh of actors that an actor of this process, or its program, spawns in these processes, by flat rank.

        ``mesh`` is the owner's handle, which the owner gets with failures.
        """
        if owner != PROGRAM and owner not in self._hosted:
            return [Stop(actor, tuple(procs), "its owner ended")]  # a moment ago
        alive = {proc: self._up.get(proc) for proc in procs}
        child = _Child(actor, name, owner, {proc: rank for rank, proc in enumerate(procs)}, alive, mesh)
        self._children[actor] = child
        self._of_owner.setdefault(owner, {})[actor] = child
        return []

    def refused(self, actor: int, deaths: Mapping[int, Failure]) -> list[Effect]:
        """Handle a mesh that is not made at all, because some of its processes are dead."""
        child = self._children.get(actor)
        if child is None:
            return []
        not_made = Failure("stopped", "NotSent", "it was not made, because another rank is dead")
        procs = list(child.alive)
        return [effect for proc in procs for effect in self._failed(child, proc, deaths.get(proc, not_made), None)]

    def respawned(self, actor: int, proc: int) -> list[Effect]:
        """Note that an actor of a mesh spawned here was made again, in the process that replaces the former one."""
        child = self._children.get(actor)
        if child is not None and proc in child.ranks:
            child.alive[proc] = self._up.get(proc)
        return []

    def stopped(self, actor: int, procs: Iterable[int] | None = None) -> list[Effect]:
        """Note that the owner stops a mesh, or its actors in these processes: their end is no longer a failure."""
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
        """Handle the report that an actor spawned here is over; without a failure, it was stopped."""
        child = self._children.get(actor)
        if child is None or child.alive.get(process.proc, -1) not in (None, process.incarnation):
            return []  # it is known, or is of a process that was replaced
        if failure is None:
            return self.stopped(actor, [process.proc])
        return self._failed(child, process.proc, failure, cause)

    def take(self, owner: int) -> MeshFailure | None:
        """Return the oldest failure of the meshes that an owner has spawned, for it to handle; None if there are no more.

        An owner that does not handle it must fail, too: `ended`, with this failure as the cause.
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
        """Register an actor that is made here, for an owner in another process or this one."""
        self._hosted[actor] = owner
        return [Watch(owner)]

    def ended(self, actor: int, failure: Failure | None = None, cause: MeshFailure | None = None) -> list[Effect]:
        """Handle the end of an actor that lives here: it was stopped, or failed, perhaps because of a child (``cause``)."""
        owner = self._hosted.pop(actor, None)
        if owner is None:
            return []
        effects = self.owner_ended(actor, "its owner has failed" if failure else "its owner ended")
        cause = None if cause is None else cause.without_mesh()
        if actor in self._orphans:  # its owner's process is gone
            self._orphans.remove(actor)
            return effects
        return [*effects, TellOwner(owner, actor, failure, cause)]

    def owner_ended(self, owner: int, reason: str) -> list[Effect]:
        """Stop the children of an owner that is over."""
        self._news.pop(owner, None)
        effects: list[Effect] = []
        for child in list(self._of_owner.get(owner, {}).values()):
            effects.append(
                Stop(child.actor, tuple(child.ranks), reason)
            )  # actors that failed still answer until they are stopped
            self._forget(child)
        return effects

    # -- other processes

    def process_up(self, process: Process) -> list[Effect]:
        """Note that a process is up; all former processes of its number are gone."""
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
        """Handle the end of a process: it has died, or was stopped, which is no failure."""
        if self._up.get(process.proc, -1) <= process.incarnation:
            self._up.pop(process.proc, None)
        return self._gone(process, death, held=True)

    # -- inside

    def _gone(self, process: Process, death: Failure, *, held: bool) -> list[Effect]:
        """Fail children in a process that is gone, and end actors here whose owners were in it."""
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
        return effects + [StopOrphan(actor, why) for actor in sorted(orphans)]

    def _failed(self, child: _Child, proc: int, failure: Failure, cause: MeshFailure | None) -> list[Effect]:
        del child.alive[proc]
        rank, owner = child.ranks[proc], child.owner
        is_first = owner not in self._news
        news = self._news.setdefault(owner, [])
        found = next((each for each in news if each.child is child and rank not in each.reports), None)
        if found is None:  # or this rank has failed twice, before and after it was replaced
            found = _News(child)
            news.append(found)
        found.reports[rank] = failure
        if cause is not None:
            found.causes[rank] = cause
        return [NotifyOwner(owner)] if is_first else []

    def _forget(self, child: _Child) -> None:
        del self._children[child.actor]
        siblings = self._of_owner[child.owner]
        del siblings[child.actor]
        if not siblings:
            del self._of_owner[child.owner]
