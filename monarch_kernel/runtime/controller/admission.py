"""Which peers the controller listens to: those that have presented the session's token under their own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch_kernel.net.transport.base import (
    CONTROLLER,
    HostTransport,
    Peer,
    host_peer,
    incarnation_of,
    is_rank,
    rank_peer,
)
from monarch_kernel.net.wire.messages import Hello, HostHello
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC, origin_of
from monarch_kernel.runtime.rpc.ownership import Process

__all__ = ["Admission"]


class Admission:
    """Admits peers; used on the I/O thread.

    Args:
        state: Knows which peers are expected.
        transport: The controller's end.
        token: What ranks and agents must present.
        catch_up: Handles what was submitted before, such as the start of the peer.
        up: Called with each process that is admitted.

    Attributes:
        refused: Counts refused messages.
    """

    def __init__(
        self,
        state: State,
        transport: HostTransport,
        token: str,
        catch_up: Callable[[], object],
        up: Callable[[Process], None],
    ) -> None:
        self.refused = 0
        self._state = state
        self._transport = transport
        self._token = token
        self._catch_up = catch_up
        self._up = up
        self._known: set[Peer] = {CONTROLLER}

    def admits(self, peer: Peer, message: object) -> bool:
        """Whether to handle a message of a peer; its first one must present the token. A refused message is counted."""
        if peer in self._known or self._admit(peer, message):
            return True
        self.refused += 1
        return False

    def has_admitted(self, peer: Peer) -> bool:
        """Whether a peer has presented the token before."""
        return peer in self._known

    def admits_for_actors(self, peer: Peer, message: Any) -> bool:
        """Whether a message about an actor comes from a process with actors, which made an actor of this session."""
        maker = origin_of(getattr(message, "actor", CONTROLLER_PROC))
        if (peer == CONTROLLER or is_rank(peer)) and (maker == CONTROLLER_PROC or maker in self._state.ranks):
            return True
        self.refused += 1
        return False

    def _admit(self, peer: Peer, message: object) -> bool:
        self._catch_up()
        if isinstance(message, Hello):
            good = message.proc in self._state.ranks and peer == self._state.ranks[message.proc].peer
        elif isinstance(message, HostHello):
            good = message.host in self._state.hosts and peer == host_peer(message.host)
        else:
            return False
        if not good or message.token != self._token:
            return False
        self._known.add(peer)
        if isinstance(message, Hello):
            if message.shares:
                self._transport.share(peer)
            incarnation = incarnation_of(peer)
            self._known.difference_update(rank_peer(message.proc, former) for former in range(incarnation))
            self._up(Process(message.proc, incarnation))
        return True
