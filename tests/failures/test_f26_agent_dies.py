"""F26: a host agent dies, stops, or continues too late; its ranks are lost, and the rest of the mesh continues."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from monarch_kernel.actor import Future, ProcMesh, SupervisionError, ValueMesh
from tests.failures.machines import LONG_S, CallLog, Machines, family, host_of, pairs_on, wait_until
from tests.support.processes import is_alive
from tests.support.timing import Bar

LOST_AFTER_S = 2.0
"""For tests that lose a host because it is silent. A killed host is lost as soon as its agent has ended."""

BringUp = Callable[..., ProcMesh]


@pytest.fixture
def bring_up(machines: Machines) -> BringUp:
    """Makes meshes with two ranks on each host."""
    return lambda count, lost_after_s=LONG_S: pairs_on(machines, count, lost_after_s)


@pytest.mark.slow
def test_ranks_of_different_hosts_have_different_agents(machines: Machines, bring_up: BringUp) -> None:
    mesh = bring_up(3)
    agents = [host_of(machines, mesh, host) for host in range(3)]
    assert len(set(agents)) == 3
    found = mesh.run("rank, local_rank, world_size").get(LONG_S).values()
    assert found == tuple((rank, rank % 2, 6) for rank in range(6))


def test_the_ranks_of_a_killed_agent_are_lost_and_others_continue(
    machines: Machines, bring_up: BringUp, bar: Bar
) -> None:
    mesh = bring_up(3)
    call_logs = mesh.spawn("call_logs", CallLog)
    assert call_logs.take.call(1).get(LONG_S).values() == (1,) * 6
    mesh.run("kept = rank * 7").get(LONG_S)
    agent = host_of(machines, mesh, 1)
    below = family(machines.pid(agent))
    future = mesh.run("import time\nif rank in (2, 3): time.sleep(600)\nrank")
    wait_until(lambda: sum(rank.state == "running" for rank in mesh.view().ranks) == 2, "the other ranks to finish")
    with bar.below(3.0, "the news of the death"):
        machines.signal(agent, signal.SIGKILL)
        error = future.exception(LONG_S)
    assert isinstance(error, SupervisionError)
    assert error.ranks == (2, 3)
    assert {point.rank: value for point, value in error.results.items()} == {0: 0, 1: 1, 4: 4, 5: 5}
    assert "host agent" in error.reports[mesh.extent.point(2)].message
    assert error.reports[mesh.extent.point(2)].host == os.uname().nodename
    wait_until(lambda: not any(map(is_alive, below)), "the ranks of the agent to end")
    # slices without the host work
    assert mesh.slice(hosts=slice(0, 3, 2)).run("kept").get(LONG_S).values() == (0, 7, 28, 35)
    assert call_logs.slice(hosts=0).take.call(2).get(LONG_S).values() == (2, 2)
    with pytest.raises(SupervisionError, match="not sent"):
        mesh.run("rank").get(LONG_S)
    # another host takes its place
    assert mesh.heal().get(LONG_S) == (2, 3)
    assert len(machines.agents) == 4
    assert mesh.run("rank").get(LONG_S).values() == tuple(range(6))
    assert mesh.slice(hosts=slice(0, 3, 2)).run("kept").get(LONG_S).values() == (0, 7, 28, 35)
    assert call_logs.all.call().get(LONG_S).values() == ([1, 2], [1, 2], [], [], [1], [1])


def test_all_hosts_may_be_lost_together(machines: Machines, bring_up: BringUp) -> None:
    mesh = bring_up(2)
    for agent in [host_of(machines, mesh, host) for host in range(2)]:
        machines.signal(agent, signal.SIGKILL)
    wait_until(lambda: len(mesh.deaths()) == 4, "all ranks to be lost")
    assert mesh.heal().get(LONG_S) == tuple(range(4))
    assert mesh.run("rank").get(LONG_S).values() == tuple(range(4))


def test_a_host_that_stops_for_a_moment_is_not_lost(machines: Machines, bring_up: BringUp) -> None:
    mesh = bring_up(2)
    agent = host_of(machines, mesh, 1)
    call_log = mesh.slice(hosts=1).spawn("call_log", CallLog)
    call_log.all.call().get(LONG_S)
    machines.signal(agent, signal.SIGSTOP)
    futures: list[Future[ValueMesh[int]]] = []
    try:
        for _ in range(50):
            futures.append(call_log.take.call(len(futures)))
            assert not futures[-1].wait(0.01)
    finally:
        machines.signal(agent, signal.SIGCONT)
    assert [future.get(LONG_S).values() for future in futures] == [(i, i) for i in range(len(futures))]
    assert call_log.all.call().get(LONG_S).values() == (list(range(len(futures))),) * 2
    assert not mesh.deaths()


@pytest.mark.slow
def test_a_host_that_stops_for_long_is_lost_and_ends_when_it_continues(
    machines: Machines, bring_up: BringUp, bar: Bar
) -> None:
    mesh = bring_up(2, LOST_AFTER_S)
    agent = host_of(machines, mesh, 1)
    below = family(machines.pid(agent))
    machines.signal(agent, signal.SIGSTOP)
    start = time.monotonic()
    try:
        wait_until(lambda: len(mesh.deaths()) == 2, "the ranks of the host to be lost")
        silent_s = time.monotonic() - start
        bar.check_above(silent_s, LOST_AFTER_S / 2, "the silence of a host that is lost")
        bar.check(silent_s, 2 * LOST_AFTER_S + 0.5, "the silence of a host that is lost")
        (message,) = {death.message for death in mesh.deaths().values()}
        assert "has sent nothing for" in message
        assert mesh.slice(hosts=0).run("rank").get(LONG_S).values() == (0, 1)
        time.sleep(LOST_AFTER_S / 2)  # nothing ends the host during this time
        assert all(map(is_alive, below))
    finally:
        machines.signal(agent, signal.SIGCONT)
    wait_until(lambda: not any(map(is_alive, below)), "the agent and its ranks to end")
    assert "exit code 0" in str(machines.agents[agent].poll())
    assert any("has given this host up" in line for line in machines.agents[agent].log_tail())
    assert mesh.heal().get(LONG_S) == (2, 3)
    assert mesh.run("rank").get(LONG_S).values() == tuple(range(4))


@pytest.mark.slow
@pytest.mark.parametrize("has_spare", [True, False])
def test_a_stopped_host_can_be_replaced_at_once(machines: Machines, bring_up: BringUp, has_spare: bool) -> None:
    machines.room = 2 + has_spare
    mesh = bring_up(2, LOST_AFTER_S)
    agent = host_of(machines, mesh, 1)
    below = family(machines.pid(agent))
    machines.signal(agent, signal.SIGSTOP)
    wait_until(lambda: len(mesh.deaths()) == 2, "the ranks of the host to be lost")
    assert mesh.heal().get(LONG_S) == (2, 3)
    assert mesh.run("rank").get(LONG_S).values() == tuple(range(4))
    wait_until(lambda: not any(map(is_alive, below)), "the engine to end the returned host")


@pytest.mark.slow
def test_heal_does_not_wait_for_a_slow_return_of_hosts(
    machines: Machines, bring_up: BringUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = bring_up(2)
    agent = host_of(machines, mesh, 1)
    is_asked_for, close = threading.Event(), machines.agents[agent].close
    taken_back: list[bool] = []

    def close_late(timeout_s: float) -> None:
        taken_back.append(is_asked_for.wait(LONG_S))
        close(timeout_s)

    monkeypatch.setattr(machines.agents[agent], "close", close_late)
    machines.signal(agent, signal.SIGKILL)
    try:
        wait_until(lambda: len(mesh.deaths()) == 2, "the ranks of the host to be lost")
        assert mesh.heal().get(LONG_S) == (2, 3)
        assert mesh.run("rank").get(LONG_S).values() == tuple(range(4))
        assert not taken_back
    finally:
        is_asked_for.set()


def test_ranks_call_each_other_across_hosts_before_and_after_one_is_replaced(
    machines: Machines, bring_up: BringUp
) -> None:
    mesh = bring_up(2)
    call_logs = mesh.spawn("call_logs", CallLog)
    near, far = call_logs.slice(hosts=0, gpus=0), call_logs.slice(hosts=1, gpus=0)
    assert near.ask.call_one(far, range(20)).get(LONG_S) == list(range(20))
    machines.signal(host_of(machines, mesh, 1), signal.SIGKILL)
    wait_until(lambda: len(mesh.deaths()) == 2, "the host to be lost")
    with pytest.raises(Exception, match="host agent|has sent nothing"):
        near.ask.call_one(far, [20]).get(LONG_S)
    mesh.heal().get(LONG_S)
    assert near.ask.call_one(far, range(20, 40)).get(LONG_S) == list(range(20, 40))
    assert far.all.call_one().get(LONG_S) == list(range(20, 40))
