"""F21: the network is slow and full of large values; no host is lost because of that, and other hosts do not wait."""

from __future__ import annotations

import time

import pytest

from monarch_kernel.actor import ProcMesh
from monarch_kernel.runtime.controller import host_tree as hosts_module
from tests.failures.machines import LONG_S, Machines, Stream, family, hosts_on
from tests.failures.test_f21_packets import Echo, pattern
from tests.support.timing import Bar

pytestmark = pytest.mark.slow

LOST_AFTER_S = 2.0
BYTES_PER_S = 1e6
BIG_NBYTES = 5_000_000  # takes more than twice the time that a host may be silent


def bring_up(machines: Machines, count: int) -> ProcMesh:
    hosts = hosts_on(machines, count, lost_after_s=LOST_AFTER_S, is_light=True)
    mesh = hosts.spawn_procs({"gpus": 1}, device="cpu")
    machines.await_up(mesh)
    return mesh


def test_a_host_whose_link_is_full_is_not_lost_and_others_do_not_wait(cabled: Machines, bar: Bar) -> None:
    mesh = bring_up(cabled, 2)
    echoes = mesh.spawn("echoes", Echo)
    echoes.echo.call(b"").get(LONG_S)
    slow = next(rank for rank in range(2) if is_on(cabled, mesh, rank, 0))
    cabled.hosts[0].suffer(bytes_per_s=BYTES_PER_S)
    value = pattern(BIG_NBYTES, 0)
    start = time.monotonic()
    answer = echoes.slice(hosts=slow).echo.call_one(value)
    meanwhile = 0
    while not answer.wait(0.01):
        with bar.below(0.5, "an answer of the other host"):
            assert echoes.slice(hosts=1 - slow).echo.call_one(b"small").get(LONG_S) == b"small"
        meanwhile += 1
    assert answer.get(LONG_S) == value
    bar.check_above(time.monotonic() - start, 2 * BIG_NBYTES / BYTES_PER_S, "the large value")
    assert meanwhile > 3
    assert not mesh.deaths()


def test_hosts_behind_a_full_link_are_not_lost(cabled: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module, "FAN_OUT", 1)  # messages to the second host pass through the first
    mesh = bring_up(cabled, 2)
    stream = Stream(mesh)
    echoes = mesh.spawn("echoes", Echo)
    echoes.echo.call(b"").get(LONG_S)
    for host in cabled.hosts:
        host.suffer(bytes_per_s=BYTES_PER_S)
    value = pattern(BIG_NBYTES, 1)
    answers = [echoes.slice(hosts=i).echo.call_one(value) for i in range(2)]
    stream.flow(0.5)
    for answer in answers:
        assert answer.get(LONG_S) == value
    stream.check(at_least=1)
    assert not mesh.deaths()


def is_on(machines: Machines, mesh: ProcMesh, rank: int, agent: int) -> bool:
    """Whether a rank is on the host of this agent."""
    return mesh.view().ranks[rank].pid in {each.pid for each in family(machines.pid(agent))}
