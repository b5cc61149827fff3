"""Effects of an edit: the preview of one rank, before anything changes, and the report about all ranks for the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.errors import format_ranks

__all__ = ["ClassChange", "EditPreview", "ModulesChange", "Reloaded", "Synced"]


@dataclass(frozen=True)
class ClassChange:
    """Changes to the members of an existing class.

    Attributes:
        name: name of the class.
        changed: members with other code or another value.
        added: new members.
        removed: members that no longer exist.
    """

    name: str
    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no member changes."""
        return not (self.changed or self.added or self.removed)

    def __str__(self) -> str:
        said = [
            f"{verb} {', '.join(names)}"
            for verb, names in (("changed", self.changed), ("added", self.added), ("removed", self.removed))
            if names
        ]
        return f"{self.name}: {'; '.join(said) or 'unchanged'}"


@dataclass(frozen=True)
class ModulesChange:
    """Effects of an edit on modules.

    Attributes:
        edited: names of imported modules whose source differs.
        dependents: names of modules that import them, in the order in which they run.
        unchanged: names of imported modules whose source is the same.
        absent: names of modules that the rank has not imported.
    """

    edited: tuple[str, ...] = ()
    dependents: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class EditPreview:
    """The preview of an edit on one rank.

    Attributes:
        actors: number of each actor whose class changes -> its name.
        outlines: number of each of these actors -> its endpoints after the edit, as plain data.
        changes: changes to the existing classes.
        refused: objections to the edit; with any of them the edit must not happen.
        left: reasons why classes that others refer to stay unchanged.
        others: names and classes of the actors of the rank, if the edit concerns no class there.
        modules: effects on modules.
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
    """The changes that `sync` made.

    Attributes:
        mesh: name of the mesh of processes.
        edited: module that was reloaded because its source differs -> flat ranks in that mesh.
        dependents: module that was reloaded because it imports one of these -> flat ranks.
        unchanged: modules that are the same everywhere.
        absent: modules that some ranks have not imported -> these ranks; an import there loads the current source.
        here: modules that were reloaded in this process.
        actors: name of each actor whose class has changed -> flat ranks.
        changes: changes to classes.
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

        lines = [f"{place}: reloaded {names}" for place, names in where(self.edited)]
        lines += [f"{place}: reloaded {names}, which import these" for place, names in where(self.dependents)]
        if not lines:
            lines = [f"{self.mesh}: no imported module has been edited"]
        if self.here:
            lines.append(f"here: reloaded {', '.join(self.here)}")
        lines += [f"{place}: not imported yet: {names}" for place, names in where(self.absent)]
        lines += [f"{place}: updated the class of actor {names}" for place, names in where(self.actors)]
        return "\n".join([*lines, *(f"    {change}" for change in self.changes)])


@dataclass(frozen=True)
class Reloaded:
    """The changes that `reload` made.

    Attributes:
        mesh: name of the mesh of processes.
        actors: name of each actor whose class has changed -> flat ranks in that mesh.
        changes: changes to the classes.
        left: reasons why classes that others refer to stayed unchanged.
    """

    mesh: str
    actors: Mapping[str, tuple[int, ...]]
    changes: tuple[ClassChange, ...]
    left: tuple[str, ...] = ()

    def __repr__(self) -> str:
        if not self.changes:
            return f"no class of the notebook that {self.mesh} uses has been redefined"
        where = ", ".join(f"{name} on {self.mesh}{format_ranks(ranks)}" for name, ranks in self.actors.items())
        lines = [f"reloaded {where}" if where else f"reloaded on {self.mesh}; no actor has these classes"]
        return "\n".join([*lines, *(f"    {change}" for change in self.changes), *(f"    {why}" for why in self.left)])
