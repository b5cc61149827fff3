"""Test beds: hosts have separate networks, and cables have the faults that a test sets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.bed.bed import Bed, BedHost
from tests.bed.namespace import Namespace
from tests.support.processes import wait_gone
from tests.support.timing import Bar
from tests.support.waiting import LONG_S

N = 400
WAIT_S = 0.3  # silence for this long means that nothing comes
LAST_S = 0.4  # delay of the last datagram, so that it comes after all others
SO_RCVBUFFORCE = 33  # from <asm/socket.h>: it may exceed the usual maximum


class Line:
    """Datagrams from the controller's machine to a host."""

    def __init__(self, host: BedHost) -> None:
        self.sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with host.namespace.entered():  # a socket belongs to the namespace in which it was made
            self.receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.receiver.bind((host.address, 0))
        self.receiver.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 23)
        self.receiver.settimeout(LONG_S)
        self.address = self.receiver.getsockname()
        self.host = host

    def send(self, count: int, *, nbytes: int = 0, **faults: Any) -> list[int]:
        """Send this many datagrams under faults; gives the numbers of those that arrive, in the order of arrival."""
        self.host.suffer(**faults)
        for number in range(count):
            self.sender.sendto(b"%d " % number + bytes(nbytes), self.address)
            time.sleep(0.0002 if nbytes == 0 else 0)  # no faster than a cable carries them
        self.host.suffer(delay_s=LAST_S)
        self.sender.sendto(b"last", self.address)
        received = iter(lambda: self.receiver.recv(1 << 16), b"last")
        return [int(datagram.split(b" ")[0]) for datagram in received]

    def close(self) -> None:
        self.host.suffer()
        self.sender.close()
        self.receiver.close()


@pytest.fixture(scope="module")
def host(bed: Bed) -> BedHost:
    return bed.add()


@pytest.fixture
def line(host: BedHost) -> Iterator[Line]:
    line = Line(host)
    line.send(1)  # resolves the addresses
    yield line
    line.close()


@pytest.fixture(scope="module")
def other(bed: Bed) -> BedHost:
    return bed.add()


def test_hosts_reach_each_other_and_are_invisible_outside(host: BedHost, other: BedHost) -> None:
    with host.namespace.entered():
        server = socket.create_server((host.address, 0))
    with server, other.namespace.entered(), socket.create_connection(server.getsockname(), 5) as client:
        assert client.getsockname()[0] == other.address
    names = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert names.count("\n") == 2, "this machine has a loopback and a cable"


def test_a_program_is_run_on_a_host(host: BedHost) -> None:
    source = f"import socket; print(socket.create_server(('{host.address}', 0)).getsockname()[0])"
    done = subprocess.run(host.command([sys.executable, "-c", source]), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == host.address


def test_without_faults_all_datagrams_arrive_in_order(line: Line) -> None:
    assert line.send(N) == list(range(N))


def test_loss_drops_some_datagrams(line: Line) -> None:
    found = line.send(N, loss=0.1)
    assert 0.8 * N < len(found) < 0.97 * N
    assert found == sorted(found)


def test_doubling_repeats_some_datagrams(line: Line) -> None:
    found = line.send(N, doubled=0.1)
    assert 1.03 * N < len(found) < 1.2 * N


def test_jitter_reorders_datagrams(line: Line) -> None:
    found = line.send(N, jitter_s=0.005)
    assert found != sorted(found) == list(range(N))


def test_a_delay_affects_all_datagrams(host: BedHost, line: Line, bar: Bar) -> None:
    host.suffer(delay_s=0.1)
    start = time.monotonic()
    line.sender.sendto(b"late", line.address)
    assert line.receiver.recv(10) == b"late"
    late_s = time.monotonic() - start
    bar.check_above(late_s, 0.1, "the datagram")
    bar.check(late_s, 0.2, "the datagram")


def test_limited_bandwidth_delays_and_drops_datagrams(host: BedHost, line: Line, bar: Bar) -> None:
    start = time.monotonic()
    found = line.send(100, nbytes=1000, bytes_per_s=1e6)
    bar.check(time.monotonic() - start - LAST_S, 0.4, "the hundred datagrams")
    assert found == list(range(100))
    found = line.send(2000, nbytes=1000, bytes_per_s=5e5)  # which would take 4 s
    assert 50 < len(found) < 1500, "frames that would wait for longer are dropped"
    assert found == sorted(found)


def test_a_cut_ends_no_connection(host: BedHost) -> None:
    with host.namespace.entered():
        server = socket.create_server((host.address, 0))
    with server, socket.create_connection(server.getsockname(), 5) as client:
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(WAIT_S)
            host.cut()
            client.sendall(b"on its way")
            with pytest.raises(TimeoutError):
                accepted.recv(10)
            host.restore()
            accepted.settimeout(LONG_S)
            assert accepted.recv(10) == b"on its way"


def test_a_bed_leaves_nothing_when_its_process_is_killed() -> None:
    source = (
        "import sys, time\n"
        "from tests.bed.bed import Bed\n"
        "bed = Bed()\n"
        "host = bed.add()\n"
        "print(bed.controller.namespace.pid, host.namespace.pid, host._wire._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(each) for each in process.stdout.readline().split()]
        assert len(pids) == 3
        os.kill(process.pid, signal.SIGKILL)
    wait_gone(*pids)


def test_a_thread_returns_to_its_namespace() -> None:
    before = os.readlink("/proc/self/ns/net")
    namespace = Namespace()
    with namespace.entered():
        assert os.readlink("/proc/thread-self/ns/net") != before
    assert os.readlink("/proc/thread-self/ns/net") == before
    namespace.close()
