"""Ranks are replaced while their host agent ends, over an in-memory network: they go on to the next agent."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest

from monarch_kernel.errors import LaunchError
from monarch_kernel.net.transport.base import rank_peer
from monarch_kernel.net.wire.messages import Ping, StartRanks
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.testing import FakeAgent, FakeLauncher, FakePeer, FakeRank, MemoryHub, add_host, rank_spec
from tests.support.waiting import wait_until

TOKEN = "secret"


class Successor(FakeRank):
    """A process that replaces a rank."""

    def __init__(self, hub: MemoryHub, proc: int, incarnation: int) -> None:
        FakePeer.__init__(self, hub, rank_peer(proc, incarnation))
        self.proc = proc
        self._token = TOKEN


class Lab:
    """A runtime with two ranks of one host; `new_hosts` launches others.

    Attributes:
        agents: number of the host -> its agent, which has said hello.
    """

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.runtime = Runtime(self.hub.connect(), TOKEN)
        self.launcher = FakeLauncher()
        self.agents: dict[int, FakeAgent] = {}
        self.procs = self.runtime.new_procs(2)
        host = self.new_host()
        self.runtime.start_ranks(host, [rank_spec(proc, rank=i, world_size=2) for i, proc in enumerate(self.procs)])
        self.started(host)
        for proc in self.procs:
            FakeRank(self.hub, proc, TOKEN).hello()
        self.until(lambda: all(self.runtime._state.ranks[proc].up for proc in self.procs))

    def new_host(self) -> int:
        host = add_host(self.runtime, self.launcher)
        self.agents[host] = FakeAgent(self.hub, host, TOKEN)
        self.agents[host].hello()
        return host

    def new_hosts(self, gone: Collection[int]) -> Mapping[int, int]:
        return {host: self.new_host() for host in gone}

    def lose(self, *procs: int) -> None:
        """Let the agent report the end of ranks, and wait for it."""
        for proc in procs:
            next(iter(self.agents.values())).lost(proc, signal=15)
        self.until(lambda: all(self.runtime._state.processes.is_lost(proc) for proc in procs))

    def heal(self, new_hosts: Any = None) -> Future[Any]:
        """Replace ranks; the result has the numbers of those that were, and of those that failed."""
        return self.runtime.replacement.heal(
            self.procs,
            lambda healing: (healing.replaced, [proc for _, proc, _ in healing.failures]),
            new_hosts=new_hosts or self.new_hosts,
        )

    def started(self, host: int) -> dict[int, int]:
        """Wait until an agent is asked to start ranks; returns their incarnations."""
        self.until(lambda: host in self.agents)
        agent = self.agents[host]
        while not (starts := [each for each in agent.seen if isinstance(each, StartRanks)]):
            agent.receive_some()
        agent.seen.clear()
        return {spec.proc: spec.incarnation for spec in starts[-1].specs}

    def come_up(self, incarnations: Mapping[int, int]) -> None:
        """Let new processes say hello, and answer that they are up."""
        for proc, incarnation in incarnations.items():
            rank = Successor(self.hub, proc, incarnation)
            rank.hello()
            while not (pings := [each for each in rank.seen if isinstance(each, Ping)]):
                rank.receive_some()
            rank.answer(pings[-1].id)

    def until(self, condition: Any) -> None:
        wait_until(condition, "the loop")


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    lab.runtime.close()


def test_ranks_whose_agent_was_about_to_end_are_started_by_the_next_one(lab: Lab) -> None:
    """As after SIGTERM to an agent, which reports the end of its ranks before it ends."""
    lab.lose(*lab.procs)
    healed = lab.heal()
    assert lab.started(1) == dict.fromkeys(lab.procs, 1)  # it does not start them
    lab.launcher.hosts[1].end("exit code 0")
    again = lab.started(2)
    assert again == dict.fromkeys(lab.procs, 2)
    lab.come_up(again)
    assert healed.get(60) == (tuple(lab.procs), [])


def test_a_rank_that_lived_when_the_heal_began_is_replaced_with_its_agent(lab: Lab) -> None:
    first, second = lab.procs
    lab.lose(first)
    healed = lab.heal()
    lab.started(1)
    lab.launcher.hosts[1].end("exit code 0")
    again = lab.started(2)
    assert again == {first: 2, second: 1}
    lab.come_up(again)
    assert healed.get(60) == ((first, second), [])


def test_an_engine_without_another_host_ends_the_heal_with_its_error(lab: Lab) -> None:
    def refuse(gone: Collection[int]) -> Mapping[int, int]:
        raise LaunchError("there is no host left")

    lab.lose(*lab.procs)
    healed = lab.heal(refuse)
    lab.started(1)
    lab.launcher.hosts[1].end("exit code 0")
    with pytest.raises(LaunchError, match="there is no host left"):
        healed.get(60)


def test_an_agent_that_was_launched_for_the_heal_is_not_replaced_once_more(lab: Lab) -> None:
    lab.lose(*lab.procs)
    healed = lab.heal()
    lab.started(1)
    lab.launcher.hosts[1].end("exit code 0")
    lab.started(2)
    lab.launcher.hosts[2].end("exit code 1")
    assert healed.get(60) == (tuple(lab.procs), list(lab.procs))
    assert list(lab.agents) == [1, 2]
