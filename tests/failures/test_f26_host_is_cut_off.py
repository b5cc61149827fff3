"""F26: a host is cut off, but no connection ends; the controller loses its ranks in time, and all others continue."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_kernel.actor import ProcMesh, SupervisionError
from tests.failures.machines import LONG_S, CallLog, Machines, family, host_of, pairs_on, wait_until
from tests.support.processes import is_alive
from tests.support.timing import Bar

pytestmark = pytest.mark.slow

LOST_AFTER_S = 1.5

BringUp = Callable[..., ProcMesh]


@pytest.fixture
def bring_up(cabled: Machines) -> BringUp:
    """Makes meshes with two ranks on each host."""
    return lambda count, lost_after_s=LOST_AFTER_S: pairs_on(cabled, count, lost_after_s)


def test_the_ranks_are_lost_in_time_and_all_others_continue(cabled: Machines, bring_up: BringUp, bar: Bar) -> None:
    mesh = bring_up(3)
    call_logs = mesh.spawn("call_logs", CallLog)
    assert call_logs.take.call(1).get(LONG_S).values() == (1,) * 6
    near, far = call_logs.slice(hosts=0, gpus=0), call_logs.slice(hosts=2, gpus=1)
    assert near.ask.call_one(far, [2]).get(LONG_S) == [2]
    pending = mesh.slice(hosts=1).run("import time; time.sleep(600)")
    cut = cabled.hosts[host_of(cabled, mesh, 1)]
    with bar.below(1.5 * LOST_AFTER_S, "the news of the loss"):
        cut.cut()
        error = pending.exception(LONG_S)
    assert "has sent nothing for" in str(error)
    assert set(mesh.deaths()) == {2, 3}
    # slices without the host work, and so do calls between actors of other hosts
    others = mesh.slice(hosts=slice(0, 3, 2))
    assert others.run("rank").get(LONG_S).values() == (0, 1, 4, 5)
    assert call_logs.slice(hosts=slice(0, 3, 2)).take.call(3).get(LONG_S).values() == (3,) * 4
    assert near.ask.call_one(far, range(4, 40)).get(LONG_S) == list(range(4, 40))
    with pytest.raises(SupervisionError, match="not sent"):
        mesh.run("rank").get(LONG_S)


def test_a_host_that_returns_late_learns_that_it_is_lost_and_ends(
    cabled: Machines, bring_up: BringUp, bar: Bar
) -> None:
    mesh = bring_up(2)
    agent = host_of(cabled, mesh, 1)
    below = family(cabled.pid(agent))
    cabled.hosts[agent].cut()
    wait_until(lambda: len(mesh.deaths()) == 2, "the ranks of the host to be lost")
    time.sleep(LOST_AFTER_S)  # nothing ends the host during this time
    assert all(map(is_alive, below)), "a host that is cut off can't learn that it is lost, so it waits"
    with bar.below(3.0, "the end of a host that learns that it is lost"):
        cabled.hosts[agent].restore()
        wait_until(lambda: not any(map(is_alive, below)), "the agent and its ranks to end")
    assert "exit code 0" in str(cabled.agents[agent].poll())
    assert mesh.heal().get(LONG_S) == (2, 3)
    assert mesh.run("rank").get(LONG_S).values() == tuple(range(4))


@pytest.mark.parametrize(("cut_s", "between_s"), [(0.1, 0.1), (0.6, 0.1), (1.2, 0.2)])
def test_short_cuts_lose_nothing(cabled: Machines, bring_up: BringUp, cut_s: float, between_s: float) -> None:
    mesh = bring_up(2, lost_after_s=4.0)
    call_logs = mesh.spawn("call_logs", CallLog)
    call_logs.all.call().get(LONG_S)
    cut = cabled.hosts[host_of(cabled, mesh, 1)]
    futures = []
    for _ in range(5):
        for is_cut in (True, False):
            (cut.cut if is_cut else cut.restore)()
            until = time.monotonic() + (cut_s if is_cut else between_s)
            while time.monotonic() < until:
                futures.append(call_logs.take.call(len(futures)))
                futures[-1].wait(0.005)
    assert [set(future.get(LONG_S).values()) for future in futures] == [{i} for i in range(len(futures))]
    assert call_logs.all.call().get(LONG_S).values() == (list(range(len(futures))),) * 4
    assert not mesh.deaths()


def test_other_agents_close_their_connections_to_it(cabled: Machines, bring_up: BringUp, bar: Bar) -> None:
    mesh = bring_up(2)
    call_logs = mesh.spawn("call_logs", CallLog)
    near, far = call_logs.slice(hosts=0, gpus=0), call_logs.slice(hosts=1, gpus=0)
    assert near.ask.call_one(far, [1]).get(LONG_S) == [1]
    asking, cut = (host_of(cabled, mesh, host) for host in range(2))
    wait_until(lambda: connections(cabled, asking, cut) > 0, "the two agents to be connected")
    cabled.hosts[cut].cut()
    wait_until(lambda: len(mesh.deaths()) == 2, "the host to be lost")
    with bar.below(1.5, "the end of the connection"):
        wait_until(lambda: connections(cabled, asking, cut) == 0, "the other agent to stop connecting")
    assert near.take.call_one(2).get(LONG_S) == 2


def connections(machines: Machines, host: int, other: int) -> int:
    """Count the connections between two hosts, including attempts."""
    address = machines.hosts[other].address
    theirs = socket.inet_aton(address)[::-1].hex().upper()
    lines = Path(f"/proc/{machines.hosts[host].namespace.pid}/net/tcp").read_text().splitlines()[1:]
    lines += Path(f"/proc/{machines.hosts[host].namespace.pid}/net/tcp6").read_text().splitlines()[1:]
    live = {"01", "02", "03"}  # established, and both halves of a handshake
    return sum(each[2].partition(":")[0].endswith(theirs) and each[3] in live for each in map(str.split, lines))
