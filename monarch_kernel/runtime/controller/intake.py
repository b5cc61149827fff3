"""What peers send to the controller: decodes it, asks whether the sender is admitted, and passes it on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from monarch_kernel.net.transport.base import Peer, Senders
from monarch_kernel.net.wire.codec import Frame, WireError, replace, salvage_ids, split
from monarch_kernel.net.wire.messages import ClockRead, Failed, HostHello, Message, Result
from monarch_kernel.runtime.controller.admission import Admission
from monarch_kernel.runtime.controller.clocks import note_clock, read_clock
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.local_actors import FOR_ACTORS, LocalActorServer
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.runtime.diagnostics.failures import describe

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

    @property
    def refused(self) -> int:
        """The number of messages from outside the session."""
        return self.n_bad + self.admission.refused

    def take(self, senders: Senders, parts: list[Frame]) -> None:
        """Handle a batch of messages, from one peer or, equal byte by byte, from each of several."""
        now = time.monotonic()
        try:
            if not isinstance(senders, tuple):
                self._take(senders, split(parts), now)
                return
            match tuple(split(parts)):
                case ((Result() | Failed() as message, frames),):
                    admitted = [peer for peer in senders if self.admission.admits(peer, message)]
                    self._perform(self._state.handle_answers(message, frames, admitted, now))
                case batch:
                    for peer in senders:
                        self._take(peer, batch, now)
        except WireError as error:
            self.n_bad += 1
            bad = Failed(0, describe(error))
            for id in salvage_ids(parts, Result, Failed):  # a call that waits must not wait forever
                for peer in senders if isinstance(senders, tuple) else (senders,):
                    if self.admission.has_admitted(peer):
                        self._perform(self._state.handle(replace(bad, id=id), (), peer, now))

    def _take(self, peer: Peer, batch: Iterable[tuple[Message, Sequence[Frame]]], now: float) -> None:
        admission = self.admission
        for message, frames in batch:
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
