"""Requests that one process sends to others, and what follows from each answer: no I/O, no threads, no clock.

Theory of operation
===================

The controller (`runtime.controller.state`) and each rank that calls others (`runtime.rpc.peer_requests`) have one table of
`Requests`. A request has an id and goes to some processes, its `Recipient`s. Each of them owes one answer: a value or a
failure. A request resolves once, when the last answer is in. If a recipient ends, the owner of the table answers for it; if the
caller cancels, the owner answers for all recipients. `Requests.answer` returns None for an answer that no request waits for.
So every future ends exactly once.

A recipient can be addressed before its process is up. Its messages wait in `Recipient.held`, in order.

When one process fails a request, the others may wait for it in a collective, forever. From `RELEASE_AFTER_S` on, and once a
second, the table asks those that have not answered to leave a collective that makes no progress (`Requests.release_waiting`). A
process that computes ignores this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import Peer
from monarch_kernel.net.wire.codec import Packed, pack
from monarch_kernel.net.wire.messages import Forget, Interrupt, Release
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.respawn_log import MakeSpawn, RespawnLog

__all__ = ["RELEASE_AFTER_S", "Pending", "Recipient", "Requests", "Resolve", "Send"]

RELEASE_AFTER_S = 1.0

_MODULUS = 1 << 64


class Send(NamedTuple):
    """Effect: send a message."""

    peer: Peer
    packed: Packed


class Resolve(NamedTuple):
    """Effect: a request is over.

    Attributes:
        id: The request.
        answers: In the order of its processes.
        in_step: False if the ranks left their process group unusable, after different numbers of collectives, or, where one of
            them failed, with messages that no rank has received, or with receives that no rank has sent a message for.
    """

    id: int
    answers: list[Answer]
    in_step: bool


@dataclass(slots=True, kw_only=True)
class Recipient:
    """A process that requests go to.

    Attributes:
        peer: Its name on the wire.
        up: Whether messages can be sent to it.
        death: How it ended; None while it lives.
        held: Messages that wait until it is up, in order.
        open_requests: The requests that it has yet to answer, with their notes, in order.
        busy_since: When the first of these was sent, or the last one answered.
    """

    peer: Peer = b""
    up: bool = False
    death: Failure | None = None
    held: list[Packed] = field(default_factory=list)
    open_requests: dict[int, str] = field(default_factory=dict)
    busy_since: float = 0.0

    def send(self, packed: Packed) -> list[Send]:
        """Send a message now, or when the process is up; drop it if the process has ended."""
        if self.death is not None:
            return []
        if self.up:
            return [Send(self.peer, packed)]
        self.held.append(packed)
        return []


class Pending:
    """A request that has not resolved.

    Attributes:
        waiting: The processes that owe an answer, with their places in ``answers``.
        answers: In the order of the processes; None where there is no answer yet.
        quiet: See `Requests.request`.
        is_cell: The same.
        keepers: Ranks that keep their answers until they receive `Forget`.
        failed_at: When the first process failed it, while others had yet to answer.
        released_at: When the others were last asked to leave a collective.
        unmatched: Sum of what they report about messages between two ranks, as in `Result`.
    """

    __slots__ = (
        "_collectives",
        "_is_in_step",
        "answers",
        "failed_at",
        "is_cell",
        "keepers",
        "quiet",
        "released_at",
        "unmatched",
        "waiting",
    )

    def __init__(
        self, procs: Sequence[int], *, quiet: bool = False, is_cell: bool = False, keepers: Sequence[int] = ()
    ) -> None:
        self.waiting = {proc: i for i, proc in enumerate(procs)}
        self.answers: list[Answer | None] = [None] * len(procs)
        self.quiet = quiet
        self.is_cell = is_cell
        self.keepers = keepers
        self.failed_at: float | None = None
        self.released_at = 0.0
        self._is_in_step = True
        self.unmatched = 0
        self._collectives: int | None = None

    def compare(self, procs: Sequence[int], collectives: int, unmatched: int) -> None:
        """Compare what processes report about their process group with what others have.

        Args:
            procs: Those that have answered already are ignored.
            collectives: How many they count; -2 if their process group is unusable.
            unmatched: As in `Result`.
        """
        if n_new := len(self.waiting.keys() & set(procs)):
            self.unmatched = (self.unmatched + n_new * unmatched) % _MODULUS
            if self._collectives is None:
                self._collectives = collectives
            self._is_in_step &= self._collectives == collectives != -2

    @property
    def in_step(self) -> bool:
        """Whether a later request can use the process group, when all have answered; see `Resolve`.

        Code that ends well may leave messages for a later request. After a failure nothing expects them.
        """
        is_left = self.unmatched != 0 and any(isinstance(answer, Failure) for answer in self.answers)
        return self._is_in_step and not is_left


class Requests:
    """The requests of one process that have not resolved.

    Args:
        recipients: By number of the process; owned and filled by the caller.

    Attributes:
        dead: The numbers of the recipients that have ended; the owner keeps it true.
        n_sent: The number of requests and messages that it has sent.
        respawn_log: The actors that this process has spawned.
    """

    def __init__(self, recipients: Mapping[int, Recipient]) -> None:
        self.dead: set[int] = set()
        self.n_sent = 0
        self.respawn_log = RespawnLog()
        self._recipients = recipients
        self._pending: dict[int, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[int]:
        return iter(self._pending)

    @property
    def has_failed(self) -> bool:
        """Whether a process has failed a request that others have yet to answer."""
        return any(pending.failed_at is not None for pending in self._pending.values())

    def get(self, id: int) -> Pending | None:
        """Return a request; None if it has resolved."""
        return self._pending.get(id)

    def answers(self, id: int) -> list[Answer | None]:
        """Return the answers to a request so far, in the order of its processes; empty if it has resolved."""
        pending = self._pending.get(id)
        return [] if pending is None else list(pending.answers)

    def waiting_for(self, id: int) -> list[int]:
        """Return the processes that have yet to answer a request."""
        pending = self._pending.get(id)
        return [] if pending is None else list(pending.waiting)

    def is_quiet(self, id: int) -> bool:
        """Whether a request that has not resolved is quiet."""
        pending = self._pending.get(id)
        return pending is not None and pending.quiet

    def is_cell(self, id: int) -> bool:
        """Whether a request that has not resolved is a cell."""
        pending = self._pending.get(id)
        return pending is not None and pending.is_cell

    # -- what the program wants

    def request(
        self,
        id: int,
        procs: Sequence[int],
        packed: Packed | Sequence[Packed],
        description: str,
        now: float,
        *,
        quiet: bool = False,
        is_cell: bool = False,
        keepers: Sequence[int] = (),
        spawned: tuple[int, MakeSpawn] | None = None,
    ) -> list[Send | Resolve]:
        """Ask processes for one answer each; send nothing if one of them has ended.

        Args:
            id: The request.
            procs: The processes to ask; each is a known recipient.
            packed: The message, or one for each process.
            description: What the processes do meanwhile, in the user's words.
            now: The time.
            quiet: Whether output that arrives meanwhile belongs to the request before it, and so does the last error.
            is_cell: Whether output that arrives meanwhile belongs to this request, whatever else the rank works on.
            keepers: Ranks that keep their answers until all are in.
            spawned: The actor that the request makes, and what makes the message for processes that replace these.
        """
        if self.dead and not self.dead.isdisjoint(procs):
            not_sent = Failure("stopped", "NotSent", "not sent, because another rank is dead")
            return [Resolve(id, [self._recipients[proc].death or not_sent for proc in procs], True)]
        if not procs:
            return [Resolve(id, [], True)]
        if spawned is not None:
            self.respawn_log.add(spawned[0], procs, description, spawned[1], id)
        self.n_sent += 1
        self._pending[id] = Pending(procs, quiet=quiet, is_cell=is_cell, keepers=keepers)
        effects: list[Send | Resolve] = []
        for proc, message in zip(procs, repeat(packed) if isinstance(packed, Packed) else packed):
            recipient = self._recipients[proc]
            if not recipient.open_requests:
                recipient.busy_since = now
            recipient.open_requests[id] = description
            if recipient.up:
                effects.append(Send(recipient.peer, message))
            else:
                recipient.held.append(message)
        return effects

    def add(self, id: int, pending: Pending) -> Pending:
        """Add a request that the caller sends itself, or that has been sent."""
        self._pending[id] = pending
        return pending

    def tell(self, procs: Sequence[int], packed: Packed) -> list[Send]:
        """Send processes a message that has no answer."""
        self.n_sent += 1
        return [effect for proc in procs for effect in self._recipients[proc].send(packed)]

    def tell_waiting(self, id: int, packed: Packed) -> list[Send]:
        """Send a message to the processes that have yet to answer a request."""
        return self.tell(self.waiting_for(id), packed)

    def interrupt(self, id: int, *, abort: bool = False) -> list[Send]:
        """Interrupt a request where it has not been answered; with ``abort``, at the cost of process groups."""
        return self.tell_waiting(id, pack(Interrupt(id, abort)))

    # -- what happens

    def answer(self, id: int, proc: int, answer: Answer, now: float) -> list[Send | Resolve] | None:
        """Take the answer of a process; return None if the request has resolved, or the process has answered it."""
        effects, n_late = self.answer_all(id, (proc,), answer, now)
        return None if n_late else effects

    def answer_all(self, id: int, procs: Sequence[int], answer: Answer, now: float) -> tuple[list[Send | Resolve], int]:
        """Take the answer that each of these processes has given.

        Returns:
            What follows, and of how many of them it came too late, because the request has resolved, or they have answered it.
        """
        pending = self._pending.get(id)
        if pending is None:
            return [], len(procs)
        waiting, answers, n_late = pending.waiting, pending.answers, 0
        for proc in procs:
            index = waiting.pop(proc, None)
            if index is None:
                n_late += 1
            else:
                answers[index] = answer
        if waiting:
            if isinstance(answer, Failure) and pending.failed_at is None and n_late < len(procs):
                pending.failed_at = now
            return [], n_late
        del self._pending[id]
        self.respawn_log.over(id)
        effects: list[Send | Resolve] = [Resolve(id, pending.answers, pending.in_step)]  # type: ignore[arg-type]
        if pending.keepers:
            forget = pack(Forget(id))
            keepers = [self._recipients[keeper] for keeper in pending.keepers]
            effects += [Send(keeper.peer, forget) for keeper in keepers if keeper.up and keeper.death is None]
        return effects, n_late

    def release_waiting(self, now: float) -> list[Send]:
        """Ask processes to leave their collectives where one has failed; call this a few times a second."""
        effects: list[Send] = []
        for id, pending in self._pending.items():
            if pending.failed_at is not None and now >= max(pending.failed_at, pending.released_at) + RELEASE_AFTER_S:
                pending.released_at = now
                effects += self.tell_waiting(id, pack(Release(id)))
        return effects
