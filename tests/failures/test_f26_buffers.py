"""F26: a host with buffers is cut off or refuses connections; transfers raise `BufferGoneError` or take another data path."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch_kernel.actor import Actor, endpoint, shutdown_context
from monarch_kernel.actor.channels import client_here
from monarch_kernel.errors import BufferGoneError
from monarch_kernel.rdma import Buffer
from tests.bed.bed import Bed, why_not
from tests.failures.machines import APART, LONG_S, Machines, can_be_apart, hosts_on, wait_until

pytestmark = pytest.mark.slow

LARGE = 4 << 20
"""In bytes; small, since cables of a bed are slow."""

PORTS = "61000", "61050"


class Lends(Actor):
    """Exports memory."""

    @endpoint
    def lend(self) -> Buffer:
        self.kept = np.full(LARGE, 7, "u1")
        return Buffer(self.kept)

    @endpoint
    def read(self, buffer: Buffer) -> str:
        into = np.zeros(LARGE, "u1")
        path = buffer.read_into(into).get().path
        assert (into == 7).all()
        return path


@pytest.fixture
def lent(tmp_path: Path) -> Iterator[tuple[Machines, Any]]:
    """An actor on a separate host each, with memory that only the network reaches; the test is on the controller's host."""
    if why := why_not() or ("" if can_be_apart() else "no process namespaces can be made here"):
        pytest.skip(why)
    shutdown_context().get()  # the session of earlier tests has its sockets in another network
    bed = Bed()
    with bed.entered():
        machines = Machines(tmp_path, bed=bed, within=APART)
        try:
            procs = hosts_on(machines, 2, is_light=True).spawn_procs({"gpus": 1}, device="cpu")
            machines.await_up(procs)
            yield machines, procs.spawn("lends", Lends)
        finally:
            shutdown_context().get()
            machines.close(5.0)
            bed.close()


def test_a_host_that_refuses_connections_is_reached_by_messages(lent: tuple[Machines, Any]) -> None:
    machines, lends = lent
    for host in machines.hosts:  # new listeners use one of these ports, and no packet reaches them
        host.namespace.run("sh", "-c", f"echo {' '.join(PORTS)} > /proc/sys/net/ipv4/ip_local_port_range")
    router = machines.bed.router
    router.ip("rule", "add", "priority", "1", "ipproto", "tcp", "dport", "-".join(PORTS), "blackhole")
    first, second = lends.slice(hosts=0), lends.slice(hosts=1)
    buffer = first.lend.call_one().get(LONG_S)
    into = np.zeros(LARGE, "u1")
    assert buffer.read_into(into).get(LONG_S).path == "messages"
    assert (into == 7).all()
    assert not client_here().paths["network"].leads_to(buffer._handle)  # the path remembers the failure
    assert second.read.call_one(buffer).get(LONG_S) == "messages"  # also between ranks
    router.ip("rule", "del", "priority", "1")
    other = lends.slice(hosts=1).lend.call_one().get(LONG_S)
    assert other.read_into(into).get(LONG_S).path == "network"
    client_here().paths.close()


def test_a_host_that_is_cut_off_during_a_transfer_is_gone(lent: tuple[Machines, Any]) -> None:
    machines, lends = lent
    buffer = lends.slice(hosts=1).lend.call_one().get(LONG_S)
    paths: list[str] = []
    errors: list[BaseException] = []

    def carry() -> None:
        into = np.zeros(LARGE, "u1")
        try:
            while True:
                paths.append(buffer.read_into(into).get(LONG_S).path)
                assert (into == 7).all()
                into[:] = 0
        except BaseException as error:
            errors.append(error)

    carrier = threading.Thread(target=carry)
    carrier.start()
    wait_until(lambda: len(paths) > 2, "three transfers")
    machines.hosts[1].cut()
    carrier.join(LONG_S)
    assert not carrier.is_alive()
    assert set(paths) == {"network"}
    with pytest.raises(BufferGoneError, match=r"its owner has ended .*has sent nothing for"):
        raise errors[0]
    machines.hosts[1].restore()
    wait_until(lambda: machines.agents[1].poll() is not None, "the lost host to end")
