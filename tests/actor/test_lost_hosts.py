"""Hosts that fall silent or die, and the messages that they forward for other hosts."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from monarch_kernel.actor import Actor, SupervisionError, endpoint
from monarch_kernel.launch.local import LocalHost, LocalLauncher
from monarch_kernel.net.wire.config import AgentConfig
from monarch_kernel.runtime.controller import host_tree as hosts_module
from monarch_kernel.runtime.controller.session import current_session
from tests.support.ranks import light_hosts
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until


class Noting(Actor):
    """Records values."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    def note(self, value: int) -> int:
        self.seen.append(value)
        return len(self.seen)

    @endpoint
    def notes(self) -> list[int]:
        return self.seen


class RecordingLauncher(LocalLauncher):
    """Records the hosts that it has launched."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[LocalHost] = []

    def launch(self, configs: Sequence[AgentConfig]) -> list[LocalHost]:
        hosts = super().launch(configs)
        self.launched += hosts
        return hosts


@pytest.fixture(scope="module", autouse=True)
def listening(session: None, by_value: None) -> None:
    """Open the port for hosts, which the program opens with the first hosts and keeps until the session ends."""
    hosts = light_hosts(LocalLauncher(), 1)
    hosts.initialized.get(LONG_S)
    hosts.shutdown().get(LONG_S)


@pytest.mark.slow
def test_the_death_of_a_host_ends_its_ranks_only(bar: Bar) -> None:
    launcher = RecordingLauncher()
    hosts = light_hosts(launcher, 2, lost_after_s=2.5)  # on a busy machine, the other host may be silent for a second
    mesh = hosts.spawn_procs({"gpus": 2}, device="cpu")
    counters: Any = mesh.spawn("counters", Noting)
    counters.note.call(1).get(LONG_S)
    agent = launcher.launched[1].pid
    os.kill(agent, signal.SIGSTOP)  # cut off: neither a message nor the report of its end arrives
    try:
        with bar.below(5, "the error"), pytest.raises(SupervisionError) as caught:
            counters.note.call(2).get(LONG_S)
        assert "has sent nothing for" in str(caught.value)
        assert sorted(mesh.deaths()) == [2, 3]
        assert counters.slice(hosts=0).note.call(3).get(LONG_S).values() == (3, 3)
    finally:
        os.kill(agent, signal.SIGCONT)
    wait_until(lambda: launcher.launched[1].poll() is not None, "the end of a host that comes back too late")
    assert mesh.heal().get(LONG_S) == (2, 3)
    assert counters.notes.call().get(LONG_S).values() == ([1, 2, 3], [1, 2, 3], [], [])
    assert len(launcher.launched) == 3
    hosts.shutdown().get(LONG_S)


@pytest.mark.slow
@pytest.mark.parametrize("fan_out", [16, 1])
def test_a_program_that_holds_the_gil_longer_than_the_grace_loses_no_host(
    fan_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "FAN_OUT", fan_out)
    hosts = light_hosts(LocalLauncher(), 3, grace_s=2.0, lost_after_s=2.0)
    numbers = [host.number for host in hosts.view().hosts]
    procs = hosts.spawn_procs({"gpus": 1}, device="cpu")
    procs.run("x = 1").get(LONG_S)
    relay = current_session()._transport._relay
    below = 2 if fan_out == 1 else 0  # each below the previous one
    wait_until(lambda: sum(relay.way(host) != host for host in numbers) == below, "the ways to them")
    ctypes.PyDLL(None).sleep(8)  # this holds the GIL, so no thread of the program can send anything
    assert procs.run("x").get(LONG_S).values() == (1, 1, 1)
    assert sum(relay.way(host) != host for host in numbers) == below
    hosts.shutdown().get(LONG_S)


@pytest.mark.slow
def test_a_tree_of_agents_loses_no_message_when_a_forwarding_agent_is_killed() -> None:
    launcher = RecordingLauncher()
    hosts = light_hosts(launcher, 18, lost_after_s=5.0)
    numbers = [host.number for host in hosts.view().hosts]
    hosts.initialized.get(LONG_S)
    procs = hosts.spawn_procs({"gpus": 1}, device="cpu")
    counters: Any = procs.spawn("counters", Noting)
    counters.note.call(0).get(LONG_S)
    parents = {
        host: record.parent
        for host, record in current_session().runtime._state.hosts.items()
        if host in numbers and record.parent
    }
    assert len(parents) == 2
    child, parent = parents.popitem()
    relay = current_session()._transport._relay
    wait_until(lambda: relay.way(child) == parent, "the way by its parent")
    follower = counters.slice(hosts=numbers.index(child), gpus=0)
    futures = [follower.note.call_one(i) for i in range(1, 200)]
    os.kill(launcher.launched[numbers.index(parent)].pid, signal.SIGKILL)
    futures += [follower.note.call_one(i) for i in range(200, 400)]
    assert [future.get(LONG_S) for future in futures] == list(range(2, 401))
    assert relay.way(child) == child
    assert follower.notes.call_one().get(LONG_S) == list(range(400))
    hosts.shutdown().get(LONG_S)
