"""The endpoints of an actor, as all its handles in one process know them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any
from weakref import WeakSet

from monarch_kernel.actor.actor import Actor, EndpointSpec, from_outline

__all__ = ["Interface", "interface_of"]


class Interface:
    """The endpoints of an actor: one object for its handles, slices included, so that all of them change with its class.

    Attributes:
        cls: the class, or its name where the class is elsewhere.
        endpoints: by name.
        removed: names of those that the class had once.
        handles: which keep what they have found here as attributes.
        is_changed: whether the class is another one than at first, or has other code.
    """

    def __init__(self, cls: type[Actor] | str, endpoints: Mapping[str, EndpointSpec]) -> None:
        self.cls = cls
        self.endpoints = dict(endpoints)
        self.removed: set[str] = set()
        self.is_changed = False
        self.handles: WeakSet[Any] = WeakSet()

    @property
    def kind(self) -> str:
        """Name of the class."""
        return self.cls if isinstance(self.cls, str) else self.cls.__name__

    def find(self, name: str) -> EndpointSpec:
        """An endpoint.

        Raises:
            AttributeError: there is none; says which there are, and whether there was one.
        """
        spec = self.endpoints.get(name)
        if spec is None:
            have = ", ".join(sorted(self.endpoints)) or "none"
            more = " any more: its class has been reloaded" if name in self.removed else ""
            raise AttributeError(f"{self.kind} has no endpoint {name!r}{more}; it has: {have}")
        return spec

    def change(self, cls: type[Actor] | str, endpoints: Mapping[str, EndpointSpec]) -> None:
        """Be the endpoints of the class as it is now."""
        self.removed = (self.removed | self.endpoints.keys()) - endpoints.keys()
        self.cls, self.endpoints, self.is_changed = cls, dict(endpoints), True
        for handle in list(self.handles):
            for name in self.removed & vars(handle).keys():
                del vars(handle)[name]

    def hear(self, kind: str, outlines: Iterable[tuple[Any, ...]]) -> None:
        """The class has changed, elsewhere; where it is here, too, it is no other one."""
        self.change(
            self.cls if isinstance(self.cls, type) else kind, {spec.name: spec for spec in map(from_outline, outlines)}
        )


def interface_of(
    shared: MutableMapping[int, Any], actor: int, cls: type[Actor] | str, endpoints: Mapping[str, EndpointSpec]
) -> Interface:
    """The interface for one more handle of an actor; what it has brought along holds for the others, too.

    Args:
        shared: what the handles of this process share, by number of the actor.
        actor: its number.
        cls: as the handle knows it.
        endpoints: as the handle knows them.
    """
    known: Interface | None = shared.get(actor)
    if known is None:
        known = shared[actor] = Interface(cls, endpoints)
    elif isinstance(cls, str) and isinstance(known.cls, str) and known.endpoints.keys() != endpoints.keys():
        known.change(cls, endpoints)
    return known
