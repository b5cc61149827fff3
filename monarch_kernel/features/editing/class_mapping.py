"""Maps existing classes of this process to their edited versions.

Most classes change in place (`features.editing.patch`). A class that can't change in place, and has no instances, is replaced:
references to it become references to the new class. An Enum that has changed is replaced, too, with its members. An Enum that
has not changed stays, and references to the members of the new Enum become references to the existing members.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from monarch_kernel.features.editing.patch import become, has_instances, objections

__all__ = ["ClassMapping"]


class ClassMapping:
    """Maps new classes to the existing classes that they update.

    Attributes:
        pairs: new class -> the existing class that takes over its members.
        aliases: further classes -> the classes that replace them.
        swaps: members of Enums, each with the member that replaces it.
    """

    def __init__(self) -> None:
        self.pairs: dict[type, type] = {}
        self.aliases: dict[type, type] = {}
        self.swaps: list[tuple[object, object]] = []

    def add(self, new: type, living: Sequence[type], lives_on: type) -> type:
        """Map several classes of one name to a new class, and return the class that has this name from now on.

        Args:
            new: the new class.
            living: the existing classes.
            lives_on: the one of them to keep.
        """
        if not issubclass(new, enum.Enum):
            self.pairs[new] = lives_on
            self.aliases |= {other: lives_on for other in living if other is not lives_on}
            return lives_on
        stays = _values(new) == _values(lives_on)
        remains = lives_on if stays else new
        for other in (new, *living):
            if other is not remains:
                self._alias(other, remains)
        return remains

    def add_same(self, new: type, lives_on: type) -> None:
        """Keep an existing class unchanged, because the new class is the same."""
        self._alias(new, lives_on)

    def _alias(self, other: type, remains: type) -> None:
        self.aliases[other] = remains
        if issubclass(remains, enum.Enum):
            ours, theirs = remains.__members__, vars(other).get("_member_map_", {})
            self.swaps += [(member, ours[name]) for name, member in theirs.items() if name in ours]

    def objections(self) -> dict[type, str]:
        """Find existing classes that can't take over their new version: class -> reason. Changes no class."""
        found: dict[type, str] = {}
        for old, why in objections(self.pairs, self.aliases).items():
            if has_instances([old]):
                found[old] = why
            else:  # without instances the new class can replace it
                new = self.new_of(old)
                self.leave(old)
                self.aliases = {other: new if to is old else to for other, to in self.aliases.items()} | {old: new}
        return found

    def new_of(self, old: type) -> type:
        """The new version of an existing class."""
        return next(new for new, living in self.pairs.items() if living is old)

    def leave(self, old: type) -> None:
        """Drop an existing class from the edit, so that it stays unchanged."""
        del self.pairs[self.new_of(old)]

    def becomes(self) -> dict[type, type]:
        """Existing class -> the class that it will be."""
        found = {old: new for new, old in self.pairs.items()}
        return found | {old: found.get(to, to) for old, to in self.aliases.items() if old not in self.pairs}

    def become(self) -> None:
        """Apply the mapping."""
        become(self.pairs, self.aliases, self.swaps)


def _values(cls: Any) -> dict[str, Any]:
    return {name: member.value for name, member in cls.__members__.items()} if issubclass(cls, enum.Enum) else {}
