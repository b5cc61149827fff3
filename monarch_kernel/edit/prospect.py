"""What an edit comes to on a rank, as the rank says before anything changes, and on all of them, as the user reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.errors import format_ranks

__all__ = ["ClassChange", "Prospect", "Reloaded"]


@dataclass(frozen=True)
class ClassChange:
    """What becomes of the members of a living class that are functions.

    Attributes:
        name: of the class.
        changed: members that do something else.
        added: that are new.
        removed: that are there no more.
    """

    name: str
    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = [
            f"{verb} {', '.join(names)}"
            for verb, names in (("changed", self.changed), ("added", self.added), ("removed", self.removed))
            if names
        ]
        return f"{self.name}: {'; '.join(said) or 'no method has changed'}"


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
    """

    actors: Mapping[int, str] = field(default_factory=dict)
    outlines: Mapping[int, tuple[tuple[Any, ...], ...]] = field(default_factory=dict)
    changes: tuple[ClassChange, ...] = ()
    refused: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()


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
        where = ", ".join(f"{name} on {self.mesh}{format_ranks(ranks)}" for name, ranks in self.actors.items())
        lines = [f"reloaded {where}" if where else f"reloaded on {self.mesh}; no actor is of these classes"]
        return "\n".join([*lines, *(f"    {change}" for change in self.changes), *(f"    {why}" for why in self.left)])
