"""What an edit comes to on a rank, as the rank says before anything changes, and on all of them, as the user reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.errors import format_ranks

__all__ = ["ClassChange", "ModulesChange", "Prospect", "Reloaded", "Synced"]


@dataclass(frozen=True)
class ClassChange:
    """What becomes of the members of a living class.

    Attributes:
        name: of the class.
        changed: members that do something else, or have another value.
        added: that are new.
        removed: that are there no more.
    """

    name: str
    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether all does what it did."""
        return not (self.changed or self.added or self.removed)

    def __str__(self) -> str:
        said = [
            f"{verb} {', '.join(names)}"
            for verb, names in (("changed", self.changed), ("added", self.added), ("removed", self.removed))
            if names
        ]
        return f"{self.name}: {'; '.join(said) or 'as it was'}"


@dataclass(frozen=True)
class ModulesChange:
    """What becomes of modules.

    Attributes:
        edited: names of those that are imported and differ.
        dependents: of those that import them, in the order in which they are run.
        unchanged: imported, and equal.
        absent: not imported there.
    """

    edited: tuple[str, ...] = ()
    dependents: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prospect:
    """What an edit comes to on one rank.

    Attributes:
        actors: number of each actor whose class changes -> its name.
        outlines: number of each of these -> its endpoints then, as plain data.
        changes: of the classes that live here.
        refused: what speaks against it; nothing may happen then.
        left: why classes that only came along stay what they are.
        others: names and classes of the actors that are here, where no class is concerned.
        modules: what becomes of modules.
    """

    actors: Mapping[int, str] = field(default_factory=dict)
    outlines: Mapping[int, tuple[tuple[Any, ...], ...]] = field(default_factory=dict)
    changes: tuple[ClassChange, ...] = ()
    refused: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    modules: ModulesChange = ModulesChange()


@dataclass(frozen=True)
class Synced:
    """What `sync` has changed.

    Attributes:
        mesh: name of the mesh of processes.
        edited: module that was loaded anew, for it differs -> flat ranks in that mesh.
        dependents: module that was loaded anew, for it imports one of these -> flat ranks.
        unchanged: modules that are the same everywhere.
        absent: modules that some ranks have not imported -> these; an import there gives them as they are now.
        here: modules that were loaded anew in this process.
        actors: name of each actor whose class has changed -> flat ranks.
        changes: of classes.
    """

    mesh: str
    edited: Mapping[str, tuple[int, ...]]
    dependents: Mapping[str, tuple[int, ...]]
    unchanged: tuple[str, ...]
    absent: Mapping[str, tuple[int, ...]]
    here: tuple[str, ...]
    actors: Mapping[str, tuple[int, ...]]
    changes: tuple[ClassChange, ...]

    def __repr__(self) -> str:
        def where(names: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str]]:
            by_ranks: dict[tuple[int, ...], list[str]] = {}
            for name, ranks in names.items():
                by_ranks.setdefault(ranks, []).append(name)
            for ranks, these in by_ranks.items():
                yield f"{self.mesh}{format_ranks(ranks)}", ", ".join(these)

        lines = [f"{place}: loaded {names} anew" for place, names in where(self.edited)]
        lines += [f"{place}: and, since they import these, {names}" for place, names in where(self.dependents)]
        if not lines:
            lines = [f"{self.mesh}: nothing that is imported there has been edited"]
        if self.here:
            lines.append(f"here: loaded {', '.join(self.here)} anew")
        lines += [f"{place}: not imported yet, {names}" for place, names in where(self.absent)]
        lines += [f"{place}: actor {names} has its class as it is now" for place, names in where(self.actors)]
        return "\n".join([*lines, *(f"    {change}" for change in self.changes)])


@dataclass(frozen=True)
class Reloaded:
    """What `reload` has changed.

    Attributes:
        mesh: name of the mesh of processes.
        actors: name of each actor whose class has changed -> flat ranks in that mesh.
        changes: of the classes.
        left: why classes that only came along are what they were.
    """

    mesh: str
    actors: Mapping[str, tuple[int, ...]]
    changes: tuple[ClassChange, ...]
    left: tuple[str, ...] = ()

    def __repr__(self) -> str:
        if not self.changes:
            return f"no class of the notebook that lives on {self.mesh} was defined anew"
        where = ", ".join(f"{name} on {self.mesh}{format_ranks(ranks)}" for name, ranks in self.actors.items())
        lines = [f"reloaded {where}" if where else f"reloaded on {self.mesh}; no actor is of these classes"]
        return "\n".join([*lines, *(f"    {change}" for change in self.changes), *(f"    {why}" for why in self.left)])
