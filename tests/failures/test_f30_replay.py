"""F30: recorded traffic is sent again, whole and in part, on a new and on the live connection; the receiver refuses it."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from itertools import product

import psutil
import pytest

from monarch_kernel.actor import ProcMesh
from monarch_kernel.runtime.controller.session import current_session
from tests.failures.machines import LONG_S, CallLog, Machines, hosts_on, wait_until
from tests.failures.proxy import Proxy

GREETING_NBYTES = 64
HELLO_NBYTES = 202
"""Sizes of a client's first two messages in ZMTP 3 with CURVE: its greeting, and its HELLO after the server's greeting."""


class Mesh:
    """A rank on each of two hosts, with calls already made, and the recorded traffic of the first agent and the controller."""

    def __init__(self, machines: Machines) -> None:
        self.procs: ProcMesh = hosts_on(machines, 2, is_light=True).spawn_procs({"gpus": 1}, device="cpu")
        self.call_logs = self.procs.spawn("call_logs", CallLog)
        self.count = 0
        self.machines = machines
        self.go_on()
        self.proxy: Proxy = machines.proxies[0]
        # After a reconnection, only the last connection counts.
        self.asked, self.answered = (bytes(said) for said in self.proxy.recorded[-1])
        assert len(self.asked) > 2000
        assert len(self.answered) > 2000
        self.port = current_session().runtime.run_on_io_thread(current_session()._transport.listen)

    def go_on(self, count: int = 20) -> None:
        for _ in range(count):
            assert self.call_logs.take.call(self.count).get(LONG_S).values() == (self.count, self.count)
            self.count += 1

    def check(self) -> None:
        """Check that no call was lost or doubled."""
        self.go_on()
        for taken in self.call_logs.all.call().get(LONG_S).values():
            assert taken == list(range(self.count))
        assert [agent.poll() for agent in self.machines.agents] == [None, None]

    def replay(self, part: str, *, up: bool) -> None:
        """Send a part of the traffic to the controller (``up``) or to the agent again, and check that it disconnects."""
        said = bytes(self.proxy.recorded[-1][0 if up else 1])
        text = {
            "the last message": last_message(said),
            "the handshake": said[: GREETING_NBYTES + HELLO_NBYTES],
            "all": said,
            "noise": random.Random(7).randbytes(3000),
        }[part]
        connections = self.proxy.connections
        self.proxy.inject(text, up=up)
        self.go_on()
        receiver = "the controller" if up else "the agent"
        wait_until(lambda: self.proxy.connections > connections, f"{receiver} to disconnect after {part}")
        self.go_on()

    def refused(self) -> int:
        """Number of connections that the controller and the agents have refused."""
        return sum(count for _, count in self.procs.view().refused_connections)


@pytest.fixture
def mesh(proxied: Machines) -> Iterator[Mesh]:
    mesh = Mesh(proxied)
    yield mesh
    mesh.check()


def say_all(mesh: Mesh, port: int, texts: Collection[bytes]) -> list[bytes]:
    """Send each text on its own connection; check that all are refused and that the mesh still works; give the answers."""
    before = mesh.refused()
    answers = []
    with ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in texts]
        for connection, text in zip(connections, texts, strict=True):
            with suppress(ConnectionError):  # the receiver has closed the connection
                connection.sendall(text)
        mesh.go_on()
        # Clients of other tests that have lost their servers may dial these ports, too.
        wait_until(lambda: mesh.refused() >= before + len(texts), "all connections to be refused")
        for connection in connections:
            answers.append(b"")
            with suppress(ConnectionError):
                while data := connection.recv(4096):
                    answers[-1] += data
    return answers


def parts(asked: bytes) -> dict[str, bytes]:
    """Parts of recorded traffic that an attacker may replay."""
    begins = GREETING_NBYTES + HELLO_NBYTES
    return {
        "whole": asked,
        "without its end": asked[:-7],
        "handshake": asked[: begins + 300],
        "greeting and the rest after the handshake": asked[:GREETING_NBYTES] + asked[begins + 300 :],
        "greeting and proof": asked[:GREETING_NBYTES] + asked[begins:],
        "the middle": asked[len(asked) // 2 :],
        "the end": asked[-500:],
    }


@pytest.mark.slow
def test_traffic_is_replayed_on_a_new_connection(mesh: Mesh) -> None:
    for answer in say_all(mesh, mesh.port, parts(mesh.asked).values()):
        assert len(answer) < 1000  # a greeting, and a new cookie, which no recorded proof matches


@pytest.mark.slow
def test_traffic_is_replayed_to_a_third_process(mesh: Mesh) -> None:
    (port,) = (
        each.laddr.port
        for each in psutil.Process(mesh.machines.pid(1)).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    )
    for answer in say_all(mesh, port, [*parts(mesh.asked).values(), *parts(mesh.answered).values()]):
        assert len(answer) < 1000


@pytest.mark.parametrize(
    "parts",
    [("the handshake", "all"), pytest.param(("the last message", "noise"), marks=pytest.mark.slow)],
    ids=" and ".join,
)
def test_traffic_is_replayed_on_the_same_connection(mesh: Mesh, parts: tuple[str, ...]) -> None:
    """CURVE uses each message number once: a receiver of a repeated one disconnects, and lost messages are sent again."""
    for part, up in product(parts, (True, False)):
        mesh.replay(part, up=up)


def last_message(said: bytes) -> bytes:
    """Give the last complete frame of ZMTP in recorded traffic, which may end in the middle of a frame."""
    at, last = GREETING_NBYTES, b""
    while at < len(said):
        flags = said[at]
        head = 9 if flags & 2 else 2
        end = at + head + int.from_bytes(said[at + 1 : at + head], "big")
        if end > len(said):
            break
        last, at = said[at:end], end
    assert last
    return last
