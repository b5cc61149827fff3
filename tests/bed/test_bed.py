"""The test bed itself: hosts have networks of their own, and cables do what they are told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.bed import Bed, BedHost
from tests.bed.namespace import Namespace
from tests.waiting import undisturbed_s

N = 400
WAIT_S = 0.3
SO_RCVBUFFORCE = 33  # of <asm/socket.h>: also above what is usual


class Line:
    """Datagrams from the controller's machine to a host."""

    def __init__(self, host: BedHost) -> None:
        self.sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with host.namespace.entered():  # a socket is where it was made
            self.receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.receiver.bind((host.address, 0))
        self.receiver.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 23)
        self.receiver.settimeout(WAIT_S)
        self.address = self.receiver.getsockname()
        self.host = host

    def send(self, count: int, *, nbytes: int = 0) -> list[int]:
        """Send that many; gives the numbers of those that came, in the order in which they did."""
        for number in range(count):
            self.sender.sendto(b"%d " % number + bytes(nbytes), self.address)
            time.sleep(0.0002 if nbytes == 0 else 0)
        found = []
        try:
            while True:
                found.append(int(self.receiver.recv(1 << 16).split(b" ")[0]))
        except TimeoutError:
            return found

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
    line.send(1)  # who has which address is found out
    yield line
    line.close()


@pytest.fixture(scope="module")
def other(bed: Bed) -> BedHost:
    return bed.add()


def test_hosts_reach_each_other_and_nobody_sees_them(host: BedHost, other: BedHost) -> None:
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


def test_without_faults_all_comes_in_order(line: Line) -> None:
    assert line.send(N) == list(range(N))


def test_some_are_lost(host: BedHost, line: Line) -> None:
    host.suffer(loss=0.1)
    found = line.send(N)
    assert 0.8 * N < len(found) < 0.97 * N
    assert found == sorted(found)


def test_some_come_twice(host: BedHost, line: Line) -> None:
    host.suffer(doubled=0.1)
    found = line.send(N)
    assert 1.03 * N < len(found) < 1.2 * N


def test_some_overtake_others(host: BedHost, line: Line) -> None:
    host.suffer(jitter_s=0.005)
    found = line.send(N)
    assert found != sorted(found) == list(range(N))


def test_all_are_late(host: BedHost, line: Line) -> None:
    host.suffer(delay_s=0.1)
    begin, begin_undisturbed = time.monotonic(), undisturbed_s()
    line.sender.sendto(b"late", line.address)
    assert line.receiver.recv(10) == b"late"
    assert time.monotonic() - begin >= 0.1
    assert undisturbed_s() - begin_undisturbed < 0.2


def test_there_is_only_so_much_room(host: BedHost, line: Line) -> None:
    host.suffer(bytes_per_s=1e6)
    begin, begin_undisturbed = time.monotonic(), undisturbed_s()
    found = line.send(100, nbytes=1000)
    assert time.monotonic() - begin - WAIT_S >= 0.1
    assert undisturbed_s() - begin_undisturbed - WAIT_S < 0.3
    assert found == list(range(100))
    assert 200 < len(line.send(1000, nbytes=1000)) < 600, "what would wait for longer is dropped"


def test_a_cut_tells_nobody_and_ends_no_connection(host: BedHost) -> None:
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
            host.mend()
            accepted.settimeout(10)
            assert accepted.recv(10) == b"on its way"


def test_nothing_is_left_when_its_process_is_killed() -> None:
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
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_namespace_is_left_where_it_was_entered() -> None:
    before = os.readlink("/proc/self/ns/net")
    namespace = Namespace()
    with namespace.entered():
        assert os.readlink("/proc/thread-self/ns/net") != before
    assert os.readlink("/proc/thread-self/ns/net") == before
    namespace.close()
