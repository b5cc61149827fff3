"""F30: a host with the right keys sends impossible messages; the receiver drops and counts them, and no process is harmed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import psutil
import pytest
import zmq

from monarch_kernel.actor import ProcMesh
from monarch_kernel.net.hosts.relay import Relay
from monarch_kernel.net.wire.codec import Frame, join, pack
from monarch_kernel.net.wire.envelope import Beat, Entry, Envelope, Hop, seal
from monarch_kernel.net.wire.messages import Goodbye, HostHello, KillRanks, Lost, Readings
from monarch_kernel.runtime.controller.session import current_session
from tests.failures.machines import LONG_S, CallLog, Machines, hosts_on, wait_until

C = b"C"


class Mesh:
    """A rank on each of two hosts, and the ports of the controller and the first agent."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.procs: ProcMesh = hosts_on(machines, 2, is_light=True).spawn_procs({"gpus": 1}, device="cpu")
        self.call_logs = self.procs.spawn("call_logs", CallLog)
        self.count = 0
        self.check()
        self.hosts = [int(name) for name in machines.meshes[-1]._hosts]
        self.port = current_session().runtime.run_on_io_thread(current_session()._transport.listen)
        self.agent_port = next(
            each.laddr.port
            for each in psutil.Process(machines.pid(0)).net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        )

    def check(self) -> None:
        """Check that all ranks answer, and that no call was lost or doubled."""
        for _ in range(20):
            assert self.call_logs.take.call(self.count).get(LONG_S).values() == (self.count, self.count)
            self.count += 1
        for taken in self.call_logs.all.call().get(LONG_S).values():
            assert taken == list(range(self.count))
        assert [agent.poll() for agent in self.machines.agents] == [None, None]


@pytest.fixture(scope="module")
def mesh(standing: Machines) -> Mesh:
    return Mesh(standing)


class Forger:
    """Has the keys of the session, and claims to be a host that does not exist."""

    def __init__(self, port: int, name: bytes) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._end = self._context.socket(zmq.DEALER)
        self._end.linger = 5000
        self._end.setsockopt(zmq.ROUTING_ID, name)
        keys = current_session()._keys
        self._end.curve_serverkey = self._end.curve_publickey = keys.public.encode()
        self._end.curve_secretkey = keys.secret.encode()
        self._end.connect(f"tcp://127.0.0.1:{port}")

    def say(self, *messages: Sequence[Frame]) -> None:
        for parts in messages:
            self._end.send_multipart(list(parts))

    def has_arrived(self, host: int) -> None:
        """Wait until all messages were handled: the answer to a knock comes after them."""
        self._end.send_multipart([b"knock", b"77", b"%d" % host])
        assert self._end.poll(1000 * LONG_S)
        while self._end.recv_multipart() != [b"here"]:
            assert self._end.poll(1000 * LONG_S)

    def close(self) -> None:
        self._end.close()
        self._context.term()


@pytest.fixture
def forgers() -> Iterator[list[Forger]]:
    made: list[Forger] = []
    yield made
    for forger in made:
        forger.close()


def envelope(*, entries: Sequence[Entry] = (), beats: Sequence[Beat] = (), frames: Sequence[Frame] = ()) -> list[Frame]:
    return seal(Envelope(list(entries), list(beats)), frames)


def forged(of: int, to: int, other: int) -> dict[str, list[list[Frame]]]:
    """Messages that host ``of`` sends to host ``to``, by kind of forgery."""
    word = join([pack(Goodbye())])
    return {
        "no envelope": [[b"garbage"], [os.urandom(500)], [b"\xff" * 5000, b"x"], [b"", b"", b""]],
        "impossible numbers": [
            envelope(entries=[Entry([Hop(of, to, number, 0, [b"R9"], [C])], 1)], frames=[b"x"])
            for number in (0, -1, 2**63, 2**64 - 1, 10**9)
        ],
        "pieces without the rest": [
            envelope(entries=[Entry([Hop(of, to, 1, 0, [b"R9"], [C])], 1, goes_on, is_cut)], frames=[b"x"])
            for goes_on, is_cut in ((False, True), (True, True), (True, False))
        ],
        "missing frames": [
            envelope(entries=[Entry([Hop(of, to, 1, 0, [b"R9"], [C])], n)], frames=[b"x"]) for n in (0, 2, 9)
        ],
        "from unknown hosts": [
            envelope(entries=[Entry([Hop(9000 + i, to, 1, 0, [b"R9"], [C])], 1)], frames=[b"x"]) for i in range(200)
        ],
        "for unknown hosts": [
            envelope(entries=[Entry([Hop(of, 9000 + i, 1, 0, [b"R9"], [C])], 1)], frames=[b"x"]) for i in range(200)
        ],
        "acknowledgements of unsent messages": [envelope(beats=[Beat(each, to, 0, 0, 2**40)]) for each in (of, other)],
        "too high a count of sent messages": [envelope(beats=[Beat(of, to, 0, 2**40, 0)])],
        "all again": [envelope(beats=[Beat(of, to, 0, 0, 0, again=True)])] * 50,
        "in the name of the controller": [
            envelope(beats=[Beat(0, to, 0, 0, 0, over=True)]),
            envelope(beats=[Beat(0, to, 99, 0, 0)]),
            envelope(entries=[Entry([Hop(0, to, 1, 99, [C], [b"H%d" % to])], len(word))], frames=word),
        ],
        "in the name of a process of another host": [
            envelope(entries=[Entry([Hop(of, to, 1, 0, [C], [b"H%d" % to])], len(word))], frames=word),
            envelope(entries=[Entry([Hop(of, to, 2, 0, [b"H%d" % other], [C])], len(word))], frames=word),
            envelope(entries=[Entry([Hop(of, to, 3, 0, [b"R1", b"R2"], [b"R1", b"R2", b"R3"])], 1)], frames=[b"x"]),
        ],
    }


WHAT = list(forged(1, 2, 3))


@pytest.mark.parametrize("name", [b"H77/forged", b"H0/forged", b"R1", b"H", b"H99999999999999999999/x"])
@pytest.mark.parametrize("what", WHAT)
def test_the_controller_drops_forgeries(mesh: Mesh, forgers: list[Forger], what: str, name: bytes) -> None:
    forgers.append(forger := Forger(mesh.port, name))
    forger.say(*forged(77, 0, mesh.hosts[0])[what])
    forger.has_arrived(0)
    mesh.check()


@pytest.mark.parametrize("name", [b"H77/forged", b"R1"])
@pytest.mark.parametrize("what", WHAT)
def test_an_agent_drops_forgeries(mesh: Mesh, forgers: list[Forger], what: str, name: bytes) -> None:
    first, second = mesh.hosts
    forgers.append(forger := Forger(mesh.agent_port, name))
    forger.say(*forged(77, first, second)[what])
    forger.has_arrived(first)
    mesh.check()


def test_dropped_messages_are_counted(mesh: Mesh, forgers: list[Forger]) -> None:
    runtime = current_session().runtime
    before = runtime.refused
    forgers.append(forger := Forger(mesh.port, b"H77/forged"))
    said = [parts for what in WHAT if what != "all again" for parts in forged(77, 0, mesh.hosts[0])[what]]
    forger.say(*said)
    wait_until(lambda: runtime.refused >= before + len(said) - 20, "the messages to be counted")
    mesh.check()


def test_a_host_can_send_only_messages_about_its_own_ranks(mesh: Mesh, forgers: list[Forger]) -> None:
    """Even valid messages with the token are dropped when they are about ranks of another host."""
    session = current_session()
    first, _ = mesh.hosts
    relay = Relay(77, default=0)
    for message in (
        HostHello(session.token, first, "liar", 1, 1, 0),
        Lost(mesh.procs.procs[0], 1, 0, "killed", (), 0),
        KillRanks(tuple(mesh.procs.procs), 0.0),
        Readings((), 10**6),
    ):
        for sender in (b"H77", b"H%d" % first, b"R1", C):
            relay.send(sender, C, 0, join([pack(message)]))
    forgers.append(forger := Forger(mesh.port, b"H77/forged"))
    before = session.runtime.refused
    forger.say(*(parts for _, parts in relay.flush()))
    wait_until(lambda: session.runtime.refused > before, "a message to be counted")
    mesh.check()
    assert all(count < 10**6 for _, count in mesh.procs.view().refused_connections)
