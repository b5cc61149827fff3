"""Restores the state of an actor that replaces another one from the actors of its mesh that still live."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Any

from monarch_kernel.actor.actor import Actor, EndpointSpec
from monarch_kernel.actor.actor_mesh import living_actors
from monarch_kernel.errors import SupervisionError
from monarch_kernel.net.wire.messages import Spawn
from monarch_kernel.runtime.rpc.client import Client

__all__ = ["restore"]


def restore(instance: Any, client: Client, message: Spawn, cls: type[Actor], specs: dict[str, EndpointSpec]) -> Any:
    """Call ``__restore__`` of an actor that replaces another, which takes its state from the surviving actors.

    If ``__restore__`` fails because some of these die, it is called again with the others.

    Args:
        instance: the new actor.
        client: that of its process.
        message: the message that has made it.
        cls: its class as it was spawned.
        specs: the endpoints of the class.

    Returns:
        What the caller must await, if ``__restore__`` is async.
    """
    method = getattr(instance, "__restore__", None)
    if message.living is None or method is None:
        return None
    living = message.living

    def attempt() -> Any:
        return method(living_actors(client, message, living, cls, specs))

    def fewer_live() -> bool:
        nonlocal living
        before, deaths = living, client.deaths([proc for _, proc in living])
        living = tuple(place for place in living if place[1] not in deaths)
        return len(living) < len(before)

    async def finish(work: Awaitable[Any]) -> None:
        while True:
            try:
                await work
                return
            except SupervisionError:
                if not fewer_live():
                    raise
                work = attempt()

    while True:
        try:
            work = attempt()
            return finish(work) if inspect.isawaitable(work) else None
        except SupervisionError:
            if not fewer_live():
                raise
