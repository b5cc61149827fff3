"""The controller's state in tests: a state with a few ranks, and the messages that it sends."""

from __future__ import annotations

from collections.abc import Iterable

from monarch_kernel.net.transport.base import Peer, host_peer, rank_peer
from monarch_kernel.net.wire.codec import join, split
from monarch_kernel.net.wire.messages import Hello, HostHello, Message
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.runtime.rpc.requests import Send
from monarch_kernel.testing import rank_spec

__all__ = ["sends", "state_of_three"]


def state_of_three(*up: int) -> State:
    """Ranks 1, 2 and 3 of the mesh ``t`` on host 1, of which these are up."""
    state = State()
    state.hosts.add(1, 0.0)
    state.handle(HostHello("token", 1, "vm", 100, 2, 0), (), host_peer(1), 0.0)
    state.processes.start(1, [rank_spec(proc, rank=proc - 1, world_size=3, mesh="t") for proc in (1, 2, 3)], 0.0)
    for proc in up:
        state.handle(Hello("token", proc, 1000 + proc, "cpu"), (), rank_peer(proc), 0.0)
    return state


def sends(effects: Iterable[Effect], kind: type[Message] = Message) -> list[tuple[Peer, Message]]:
    """List the messages of a kind that the effects send, each with its peer."""
    return [
        (effect.peer, message)
        for effect in effects
        if isinstance(effect, Send)
        for message, _ in split(join([effect.packed]))
        if isinstance(message, kind)
    ]
