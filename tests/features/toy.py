"""A feature in one file: the program asks ranks for a vote, and the controller counts the votes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch_kernel.actor import ProcMesh, shutdown_context, this_host
from monarch_kernel.net.transport.base import CONTROLLER
from monarch_kernel.net.wire.codec import Frame, add_messages, pack
from monarch_kernel.net.wire.messages import Message, Payload, Result
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.extensions import Core, Extension
from monarch_kernel.runtime.controller.extensions import register as register_controller
from monarch_kernel.runtime.controller.process_records import RankRecord
from monarch_kernel.runtime.worker.extensions import register as register_worker
from monarch_kernel.runtime.worker.rank import Rank
from tests.support.waiting import LONG_S, wait_until


class AskForVote(Message, frozen=True):
    """The program asks a rank to vote."""

    id: int
    text: str


class Vote(Message, frozen=True):
    """A rank votes, in its own name."""

    proc: int
    choice: str


add_messages(AskForVote, Vote)


# -- the controller's part


@register_controller
class Votes(Extension):
    """Counts votes, and records all its calls.

    Attributes:
        votes: process -> its vote.
        ended: processes that have answered a request.
        lost: processes that have ended.
        ticks: number of ticks.
        is_closed: whether the session has ended.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.votes: dict[int, str] = {}
        self.ended: list[int] = []
        self.lost: list[int] = []
        self.ticks = 0
        self.is_closed = False
        self.handlers = {Vote: self._voted}

    def may_send(self, proc: int, message: Message) -> bool:
        return isinstance(message, Vote) and message.proc == proc

    def request_ended(self, procs: Sequence[int], id: int) -> list[Effect]:
        self.ended += procs
        return []

    def process_lost(self, proc: int) -> list[Effect]:
        self.lost.append(proc)
        return []

    def tick(self, now: float) -> list[Effect]:
        self.ticks += 1
        return []

    def closed(self) -> None:
        self.is_closed = True

    def _voted(self, record: RankRecord, message: Vote, now: float) -> list[Effect]:
        self.votes[record.spec.rank] = message.choice
        return []


# -- the rank's part


@register_worker
class Voter:
    """Votes yes, and tries to vote in the name of another rank."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        rank.extend({AskForVote: self._asked})

    def _asked(self, message: AskForVote, frames: Sequence[Frame]) -> None:
        proc = self._rank.spec.proc
        for name, choice in ((proc, f"yes to {message.text}"), (proc + 1, "forged")):
            self._rank.driver.send(CONTROLLER, pack(Vote(name, choice)))
        self._rank.send_answer_now(message.id, pack(Result(message.id, Payload())))


# -- what the program calls


def vote(mesh: ProcMesh, text: str) -> dict[int, str]:
    """Ask all ranks to vote; returns their votes by rank."""
    runtime: Any = mesh.runtime
    runtime.ask(mesh.procs, lambda id: pack(AskForVote(id, text)), len).get(LONG_S)
    return dict(sorted(runtime.extension(Votes).votes.items()))


def main() -> None:
    """Vote on two ranks."""
    mesh = this_host().spawn_procs({"ranks": 2}, device="cpu", bootstrap=_import)
    runtime: Any = mesh.runtime
    votes = runtime.extension(Votes)
    try:
        mesh.initialized.get(LONG_S)
        print(vote(mesh, "lunch"))
        mesh.run("1").get(LONG_S)
        print(sorted(set(votes.ended)))
        mesh.stop(grace_s=0).get(LONG_S)
        wait_until(lambda: sorted(votes.lost) == [1, 2] and votes.ticks > 1, "both losses, and ticks")
    finally:
        shutdown_context().get(LONG_S)
    print(votes.is_closed)


def _import() -> None:
    """Import this module on a rank, before its first cell, so that it can vote."""
