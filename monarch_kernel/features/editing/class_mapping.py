"""Which living classes become which new ones, whatever kind of class it is.

Most change in place (`features.editing.patch`). One that can't, and of which there are no instances, is replaced: references
to it become references to the new one. So is an Enum that has changed, with its members; one that has not stays what it is,
and references to the members of the new one become references to its own.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from monarch_kernel.features.editing.patch import become, has_instances, objections

__all__ = ["Succession"]


class Succession:
    """Which living classes become which new ones.

    Attributes:
        pairs: new class -> the living one that takes over what it has.
        aliases: further classes -> those that take their places.
        swaps: the same for members of Enums.
    """

    def __init__(self) -> None:
        self.pairs: dict[type, type] = {}
        self.aliases: dict[type, type] = {}
        self.swaps: list[tuple[object, object]] = []

    def add(self, new: type, living: Sequence[type], lives_on: type) -> type:
        """Have several classes of one name become a new one; gives the one that is the class of that name from now on.

        Args:
            new: the new class.
            living: those that there are.
            lives_on: one of these.
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
        """Have a living class stay what it is, although a new one has come that is the same."""
        self._alias(new, lives_on)

    def _alias(self, other: type, remains: type) -> None:
        self.aliases[other] = remains
        if issubclass(remains, enum.Enum):
            ours, theirs = remains.__members__, vars(other).get("_member_map_", {})
            self.swaps += [(member, ours[name]) for name, member in theirs.items() if name in ours]

    def objections(self) -> dict[type, str]:
        """What keeps living classes from becoming what new ones are: living class -> why; nothing has changed afterwards."""
        found: dict[type, str] = {}
        for old, why in objections(self.pairs, self.aliases).items():
            if has_instances([old]):
                found[old] = why
            else:  # nothing is lost if the new one takes its place
                new = self.new_of(old)
                self.leave(old)
                self.aliases = {other: new if to is old else to for other, to in self.aliases.items()} | {old: new}
        return found

    def new_of(self, old: type) -> type:
        """The new class that a living one is to become."""
        return next(new for new, living in self.pairs.items() if living is old)

    def leave(self, old: type) -> None:
        """Have a living class stay what it is."""
        del self.pairs[self.new_of(old)]

    def becomes(self) -> dict[type, type]:
        """Living class -> what it will be."""
        found = {old: new for new, old in self.pairs.items()}
        return found | {old: found.get(to, to) for old, to in self.aliases.items() if old not in self.pairs}

    def become(self) -> None:
        """Have it happen."""
        become(self.pairs, self.aliases, self.swaps)


def _values(cls: Any) -> dict[str, Any]:
    return {name: member.value for name, member in cls.__members__.items()} if issubclass(cls, enum.Enum) else {}
