"""Hosts that fall silent or are killed, and what they pass on for others; each test has a session of its own."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_kernel.actor import Actor, HostMesh, SupervisionError, endpoint, shutdown_context
from monarch_kernel.actor.hosts import allocate
from monarch_kernel.controller import hosts as hosts_module
from monarch_kernel.controller.session import current_session
from monarch_kernel.launch.local import LocalLauncher
from monarch_kernel.mesh import Extent, Region
from tests.waiting import undisturbed_s, wait_until

LONG_S = 60.0


class Counter(Actor):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    def note(self, value: int) -> int:
        self.seen.append(value)
        return len(self.seen)

    @endpoint
    def notes(self) -> list[int]:
        return self.seen


@pytest.fixture(autouse=True)
def own_session() -> Iterator[None]:
    yield
    shutdown_context().get()


def test_a_host_that_dies_takes_its_ranks_and_only_these() -> None:
    launcher = LocalLauncher()
    mesh = allocate(launcher, 2).spawn_procs({"gpus": 2}, device="cpu")
    counters: Any = mesh.spawn("counters", Counter)
    counters.note.call(1).get(LONG_S)
    agent = launcher._hosts[1].pid
    begun = undisturbed_s()
    os.kill(agent, signal.SIGSTOP)  # cut off: neither it nor its end is heard of
    try:
        with pytest.raises(SupervisionError) as caught:
            counters.note.call(2).get(LONG_S)
        assert undisturbed_s() - begun < 5
        assert "nothing was heard of" in str(caught.value)
        assert sorted(mesh.deaths()) == [2, 3]
        assert counters.slice(hosts=0).note.call(3).get(LONG_S).values() == (3, 3)
    finally:
        os.kill(agent, signal.SIGCONT)
    wait_until(lambda: launcher._hosts[1].poll() is not None, "the end of a host that comes back too late")
    assert mesh.heal().get(LONG_S) == (2, 3)
    assert counters.notes.call().get(LONG_S).values() == ([1, 2, 3], [1, 2, 3], [], [])
    assert len(launcher._hosts) == 3


@pytest.mark.parametrize("fan_out", [16, 1])
def test_a_program_that_holds_its_interpreter_for_longer_than_the_grace_loses_no_host(
    fan_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "FAN_OUT", fan_out)
    session = current_session()
    numbers = session.add_hosts(LocalLauncher(), 3, grace_s=2.0, lost_after_s=2.0, is_light=True)
    hosts = HostMesh(session.runtime, Region.whole(Extent({"hosts": 3})), numbers)
    procs = hosts.spawn_procs({"gpus": 1}, device="cpu")
    procs.run("x = 1").get(LONG_S)
    relay = session._transport._relay
    below = 2 if fan_out == 1 else 0  # each below the one before
    wait_until(lambda: sum(relay.way(host) != host for host in numbers) == below, "the ways to them")
    ctypes.PyDLL(None).sleep(8)  # with the GIL held, no thread of ours can say anything
    assert procs.run("x").get(LONG_S).values() == (1, 1, 1)
    assert sum(relay.way(host) != host for host in numbers) == below


def test_a_tree_of_agents_loses_nothing_when_one_that_passes_on_is_killed() -> None:
    launcher = LocalLauncher()
    session = current_session()
    count = 18
    numbers = session.add_hosts(launcher, count, lost_after_s=5.0, is_light=True)
    hosts = HostMesh(session.runtime, Region.whole(Extent({"hosts": count})), numbers)
    hosts.initialized.get(LONG_S)
    procs = hosts.spawn_procs({"gpus": 1}, device="cpu")
    counters: Any = procs.spawn("counters", Counter)
    counters.note.call(0).get(LONG_S)
    parents = {host: record.parent for host, record in session.runtime._state.hosts.items() if record.parent}
    assert len(parents) == 2
    child, parent = parents.popitem()
    relay = session._transport._relay
    wait_until(lambda: relay.way(child) == parent, "the way by its parent")
    follower = counters.slice(hosts=numbers.index(child), gpus=0)
    futures = [follower.note.call_one(i) for i in range(1, 200)]
    os.kill(launcher._hosts[numbers.index(parent)].pid, signal.SIGKILL)
    futures += [follower.note.call_one(i) for i in range(200, 400)]
    assert [future.get(LONG_S) for future in futures] == list(range(2, 401))
    assert relay.way(child) == child
    assert follower.notes.call_one().get(LONG_S) == list(range(400))
