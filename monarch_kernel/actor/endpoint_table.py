"""The endpoints of an actor, shared by all its handles in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any
from weakref import WeakSet

from monarch_kernel.actor.actor import Actor, EndpointSpec, from_outline

__all__ = ["Interface", "interface_of"]


class Interface:
    """The endpoints of an actor. All its handles, slices included, share this object, so that they change with the class.

    Attributes:
        cls: the class; its name in a process that does not have the class.
        endpoints: the endpoints by name.
        removed: names of endpoints that an earlier version of the class had.
        handles: the handles, which keep the endpoints that they have looked up as attributes.
        is_changed: whether the class was replaced, or has new code.
    """

    def __init__(self, cls: type[Actor] | str, endpoints: Mapping[str, EndpointSpec]) -> None:
        self.cls = cls
        self.endpoints = dict(endpoints)
        self.removed: set[str] = set()
        self.is_changed = False
        self.handles: WeakSet[Any] = WeakSet()

    @property
    def kind(self) -> str:
        """The name of the class."""
        return self.cls if isinstance(self.cls, str) else self.cls.__name__

    def find(self, name: str) -> EndpointSpec:
        """Return an endpoint.

        Raises:
            AttributeError: there is no such endpoint. The text lists the endpoints, and says whether this one was removed.
        """
        spec = self.endpoints.get(name)
        if spec is None:
            have = ", ".join(sorted(self.endpoints)) or "none"
            more = " any more: its class has been reloaded" if name in self.removed else ""
            raise AttributeError(f"{self.kind} has no endpoint {name!r}{more}; it has: {have}")
        return spec

    def change(self, cls: type[Actor] | str, endpoints: Mapping[str, EndpointSpec]) -> None:
        """Use the endpoints of the class as it is now."""
        self.removed = (self.removed | self.endpoints.keys()) - endpoints.keys()
        self.cls, self.endpoints, self.is_changed = cls, dict(endpoints), True
        for handle in list(self.handles):
            for name in self.removed & vars(handle).keys():
                del vars(handle)[name]

    def update(self, kind: str, outlines: Iterable[tuple[Any, ...]]) -> None:
        """Use the endpoints of a class that has changed in another process. A class that this process has is kept."""
        self.change(
            self.cls if isinstance(self.cls, type) else kind, {spec.name: spec for spec in map(from_outline, outlines)}
        )


def interface_of(
    shared: MutableMapping[int, Any], actor: int, cls: type[Actor] | str, endpoints: Mapping[str, EndpointSpec]
) -> Interface:
    """Return the interface for a new handle of an actor. The endpoints of the new handle apply to the other handles, too.

    Args:
        shared: the interfaces of this process, by number of the actor.
        actor: the number of the actor.
        cls: the class as the handle knows it.
        endpoints: the endpoints as the handle knows them.
    """
    known: Interface | None = shared.get(actor)
    if known is None:
        known = shared[actor] = Interface(cls, endpoints)
    elif isinstance(cls, str) and isinstance(known.cls, str) and known.endpoints.keys() != endpoints.keys():
        known.change(cls, endpoints)
    return known
