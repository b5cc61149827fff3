"""F21: the connection between an agent and its controller breaks, stalls, or ends in the middle of a message.

Short breaks lose nothing and keep the order. After a long break, both ends act alike: the host is lost, and its agent ends.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from monarch_kernel.actor import ProcMesh
from tests.failures.machines import LONG_S, Machines, Stream, family, hosts_on, wait_until
from tests.failures.proxy import Proxy
from tests.support.processes import is_alive
from tests.support.timing import Bar

LOST_AFTER_S = 2.0
"""For tests that lose a host."""
NOT_LOST_S = 30.0
"""For tests that lose no host: much longer than any break here, even on a busy machine."""
SHORT_S = 0.3


@pytest.fixture
def procs(proxied: Machines) -> ProcMesh:
    """A rank on each of two hosts."""
    return bring_up(proxied, NOT_LOST_S)


def bring_up(machines: Machines, lost_after_s: float) -> ProcMesh:
    mesh = hosts_on(machines, 2, lost_after_s=lost_after_s, is_light=True).spawn_procs({"gpus": 1}, device="cpu")
    machines.await_up(mesh)
    return mesh


Harm = Callable[[Proxy, Stream], None]


def reset(proxy: Proxy, stream: Stream) -> None:
    proxy.reset()


def half(proxy: Proxy, stream: Stream) -> None:
    proxy.lose_half()


def short_cut(proxy: Proxy, stream: Stream) -> None:
    proxy.cut()
    stream.flow(SHORT_S)
    proxy.restore()


def cut_and_reset(proxy: Proxy, stream: Stream) -> None:
    proxy.cut()
    stream.flow(SHORT_S)
    proxy.reset()
    proxy.restore()


def delay(proxy: Proxy, stream: Stream) -> None:
    proxy.delay(0.02)
    stream.flow(0.3)
    proxy.delay(0.0)


@pytest.mark.parametrize(
    "harms",
    [
        pytest.param((half, cut_and_reset), id="worst"),  # the second contains a reset and a short cut
        pytest.param((reset, short_cut, delay), id="others", marks=pytest.mark.slow),
    ],
)
def test_no_call_is_lost_doubled_or_reordered(proxied: Machines, procs: ProcMesh, harms: tuple[Harm, ...]) -> None:
    for harm in harms:
        stream = Stream(procs)
        for proxy in proxied.proxies:
            stream.flow(0.1)
            harm(proxy, stream)
            stream.flow(0.1)
        stream.check(at_least=99)
        assert not procs.deaths()


def test_repeated_breaks_of_a_connection_lose_nothing(proxied: Machines, procs: ProcMesh) -> None:
    stream = Stream(procs)
    before = proxied.proxies[0].connections
    for _ in range(5):
        stream.flow(0.1)
        proxied.proxies[0].reset()
        stream.flow(0.1)
        proxied.proxies[0].lose_half()
    stream.check()
    assert proxied.proxies[0].connections >= before + 5
    assert not procs.deaths()


def test_output_and_large_values_survive_a_break(proxied: Machines, procs: ProcMesh) -> None:
    procs["big"] = bytes(3_000_000)
    future = procs.run(
        "import time\nfor i in range(40):\n    print('line', i)\n    time.sleep(0.01)\nlen(big), big * 2"
    )
    proxied.proxies[0].lose_half()
    proxied.proxies[1].reset()
    found = future.get(LONG_S).values()
    assert [(length, len(value)) for length, value in found] == [(3_000_000, 6_000_000)] * 2


@pytest.mark.slow
def test_a_host_that_is_cut_off_for_long_is_lost_and_ends_and_can_be_replaced(proxied: Machines, bar: Bar) -> None:
    procs = bring_up(proxied, LOST_AFTER_S)
    below = family(proxied.pid(1))
    start = time.monotonic()
    proxied.proxies[1].cut()
    wait_until(lambda: len(procs.deaths()) == 1, "the host to be lost")
    silent_s = time.monotonic() - start
    bar.check_above(silent_s, LOST_AFTER_S / 2, "the silence of a host that is lost")
    bar.check(silent_s, 2 * LOST_AFTER_S + 0.5, "the silence of a host that is lost")
    assert "has sent nothing for" in procs.deaths()[1].message
    assert procs.slice(hosts=0).run("rank").get(LONG_S).values() == (0,)
    assert procs.heal().get(LONG_S) == (1,)
    assert procs.run("rank").get(LONG_S).values() == (0, 1)
    proxied.proxies[1].restore()
    wait_until(lambda: not any(map(is_alive, below)), "the processes of the lost host to end")
    assert procs.run("rank").get(LONG_S).values() == (0, 1)


@pytest.mark.slow
def test_an_agent_waits_for_the_controller_as_long_as_the_controller_waits_for_it(proxied: Machines) -> None:
    grace_s = 0.5
    mesh = hosts_on(proxied, 1, lost_after_s=LONG_S, grace_s=grace_s, is_light=True).spawn_procs(device="cpu")
    proxied.await_up(mesh)
    below = family(proxied.pid(0))
    proxied.proxies[0].cut()
    until = time.monotonic() + 5 * grace_s
    while time.monotonic() < until:
        assert all(map(is_alive, below))
        time.sleep(0.01)
    proxied.proxies[0].restore()
    assert mesh.run("rank").get(LONG_S).values() == (0,)


@pytest.mark.slow
def test_an_agent_that_gives_up_the_controller_logs_the_reason(proxied: Machines) -> None:
    mesh = hosts_on(proxied, 1, lost_after_s=LOST_AFTER_S, grace_s=0.0, is_light=True).spawn_procs(device="cpu")
    proxied.await_up(mesh)
    proxied.proxies[0].cut()
    wait_until(lambda: proxied.agents[0].poll() is not None, "the agent to end")
    assert re.search(
        r"received nothing from the controller for \d+\.\d s: it counts as dead",
        "\n".join(proxied.agents[0].log_tail()),
    )
