"""A feature in one file: ranks vote, and the controller counts."""

from __future__ import annotations

from monarch_kernel.net.wire.codec import add_messages, pack
from monarch_kernel.net.wire.messages import Lost, Message, Ping
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.extensions import Core, Extension, register
from monarch_kernel.runtime.controller.records import RankRecord
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.testing import FakeAgent, FakeLauncher, FakeRank, MemoryHub, add_host, rank_spec
from tests.support.waiting import wait_until


class Vote(Message, frozen=True):
    """A rank votes."""

    proc: int
    choice: str


class Count(Message, frozen=True):
    """How many ranks have voted so far."""

    count: int


add_messages(Vote, Count)


@register
class Votes(Extension):
    """Counts votes, and tells each voter the count.

    Attributes:
        votes: by process.
        ended: requests that ranks have answered.
        lost: processes that have ended.
        ticks: how often time has passed.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.votes: dict[int, str] = {}
        self.ended: list[tuple[int, int]] = []
        self.lost: list[int] = []
        self.ticks = 0
        self.is_closed = False
        self.handlers = {Vote: self._voted}

    def may_send(self, proc: int, message: Message) -> bool:
        return isinstance(message, Vote) and message.proc == proc

    def request_ended(self, proc: int, id: int) -> list[Effect]:
        self.ended.append((proc, id))
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
        self.votes[record.spec.proc] = message.choice
        return self.core.to_rank(record.spec.proc, pack(Count(len(self.votes))))


def main() -> None:
    """Vote as two ranks, one of which then dies."""
    hub = MemoryHub()
    runtime = Runtime(hub.connect(), token="t")
    votes = runtime.extension(Votes)
    try:
        host = add_host(runtime, FakeLauncher())
        agent = FakeAgent(hub, host, token="t")
        agent.hello()
        runtime.start_ranks(host, [rank_spec(proc, rank=proc - 1, world_size=2) for proc in (1, 2)])
        ranks = [FakeRank(hub, proc, token="t") for proc in (1, 2)]
        for rank in ranks:
            rank.hello()
        ranks[0].send(Vote(2, "in the name of another rank"))
        for proc, rank in enumerate(ranks, 1):
            rank.send(Vote(proc, "yes"))
            told = [message for message in rank.receive_some() if isinstance(message, Count)]
            print("told", told)
        future = runtime.request([1], lambda id: pack(Ping(id)), "ping", len)
        ranks[0].receive_some()
        ranks[0].answer(future.id)
        future.get(10)
        agent.send(Lost(2, 0, 9, "", (), 0))
        wait_until(lambda: votes.lost == [2] and votes.ticks > 1, "the loss of a rank, and ticks")
        print("votes", votes.votes, "ended", votes.ended == [(1, future.id)])
    finally:
        runtime.close()
    print("lost", votes.lost, "closed", votes.is_closed)
