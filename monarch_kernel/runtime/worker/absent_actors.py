"""Messages for actors that are not in this process: kept until the actor is made, or answered if it never will be."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

from monarch_kernel.errors import Failure
from monarch_kernel.net.wire.codec import Frame, Packed, pack
from monarch_kernel.net.wire.messages import Barrier, Call, Failed, Payload, Result, StopActor
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.ids import origin_of

__all__ = ["AbsentActors"]

_MAX_STOPPED = 1 << 16


class AbsentActors:
    """The actors that have been here, and those that may still come; used on the I/O thread.

    A call or a stop may arrive before the `Spawn` of its actor, if another process sends the `Spawn`. The message is then kept,
    and a `Barrier` goes to the process that made the actor's number. When the answer comes, everything that this process had
    sent before has arrived, and a missing `Spawn` never will.

    Args:
        proc: The number of this process.
        client: Sends the barriers.
        send_answer: Sends an answer to the process that made the request.
    """

    def __init__(self, proc: int, client: Client, send_answer: Callable[[int, Packed], None]) -> None:
        self._proc = proc
        self._client = client
        self._send_answer = send_answer
        self._stopped: dict[int, str | Failure] = {}
        self._early: dict[int, list[tuple[Call | StopActor, Sequence[Frame]]]] = {}

    def note_stopped(self, actor: int, reason: str | Failure) -> None:
        """Note that an actor is not here any more, and why."""
        self._stopped[actor] = reason
        while len(self._stopped) > _MAX_STOPPED:
            del self._stopped[next(iter(self._stopped))]

    def handle(self, message: Call | StopActor, frames: Sequence[Frame]) -> None:
        """Keep a message for an actor until the actor exists, or can no longer appear."""
        maker = origin_of(message.actor)
        if message.actor in self._stopped or maker == self._proc:
            self._answer(message)
            return
        early = self._early.get(message.actor)
        if early is not None:
            early.append((message, frames))
            return
        self._early[message.actor] = [(message, frames)]

        def over(answers: object) -> None:
            pass

        barrier = self._client.request((maker,), lambda id: pack(Barrier(id)), "", over, quiet=True)
        barrier.add_done_callback(lambda: self._give_up(message.actor))

    def take(self, actor: int) -> Sequence[tuple[Call | StopActor, Sequence[Frame]]]:
        """Return the messages that were kept for an actor that is here now."""
        return self._early.pop(actor, ())

    def refuse(self, id: int, why: str | Failure) -> None:
        """Answer a call because the actor is not here."""
        if id:
            if isinstance(why, str):
                why = Failure("stopped", "ActorStopped", why, host=socket.gethostname(), pid=os.getpid())
            self._send_answer(id, pack(Failed(id, why)))

    def _give_up(self, actor: int) -> None:
        """Answer the kept messages for an actor: everything that its maker has sent has arrived, without its `Spawn`."""
        for early, _ in self._early.pop(actor, ()):
            self._answer(early)

    def _answer(self, message: Call | StopActor) -> None:
        if isinstance(message, Call):
            self.refuse(message.id, self._stopped.get(message.actor, "the actor is not on this rank"))
            return
        self.note_stopped(message.actor, message.reason)
        if message.id:
            self._send_answer(message.id, pack(Result(message.id, Payload())))
