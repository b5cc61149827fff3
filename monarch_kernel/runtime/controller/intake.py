"""What peers send to the controller: decodes it, asks whether the sender is admitted, and passes it on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from monarch_kernel.net.transport.base import Peer
from monarch_kernel.net.wire.codec import Frame, WireError, split
from monarch_kernel.net.wire.messages import ClockRead, HostHello, Message
from monarch_kernel.runtime.controller.admission import Admission
from monarch_kernel.runtime.controller.clocks import note_clock, read_clock
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.local_actors import FOR_ACTORS, LocalActorServer
from monarch_kernel.runtime.controller.state import State

__all__ = ["Intake"]


class Intake:
    """Takes the messages of peers; used on the I/O thread.

    Args:
        state: Handles the messages that are not for actors.
        perform: Performs the effects that follow.

    Attributes:
        admission: Knows which peers are admitted; set before the first message arrives.
        actor_server: Handles the messages for actors of this process; set before the first message arrives.
        n_bad: The number of messages that could not be decoded.
    """

    admission: Admission
    actor_server: LocalActorServer

    def __init__(self, state: State, perform: Callable[[list[Effect]], None]) -> None:
        self.n_bad = 0
        self._state = state
        self._perform = perform
        self._read_last: list[Frame] = []  # what `_split` has read last, if it was small
        self._read: Sequence[tuple[Message, Sequence[Frame]]] = ()

    @property
    def refused(self) -> int:
        """The number of messages from outside the session."""
        return self.n_bad + self.admission.refused

    def take(self, peer: Peer, parts: list[Frame]) -> None:
        """Handle a batch of messages."""
        now = time.monotonic()
        admission = self.admission
        try:
            for message, frames in self._split(parts):
                if not admission.admits(peer, message):
                    return
                if type(message) in FOR_ACTORS:
                    if admission.admits_for_actors(peer, message):
                        self.actor_server.handle(message, frames, peer)
                elif type(message) is ClockRead:
                    note_clock(self._state.hosts.values(), peer, message, time.time())
                else:
                    self._perform(self._state.handle(message, frames, peer, now))
                    if type(message) is HostHello:
                        self._perform([*read_clock(self._state.hosts.get(message.host), time.time())])
        except WireError:
            self.n_bad += 1

    def _split(self, parts: list[Frame]) -> Iterable[tuple[Message, Sequence[Frame]]]:
        """Decode a batch. A batch that several ranks have sent (`Relay`) arrives once for each of them, and is decoded once."""
        if len(parts) != 1:
            return split(parts)
        if parts is not self._read_last:
            self._read = tuple(split(parts))
            self._read_last = parts
        return self._read
