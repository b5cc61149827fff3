"""Connections between hosts: the best address that answers is used, strangers are refused and counted, breaks are repaired."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest
import zmq

from monarch_kernel.net.hosts import links as links_module
from monarch_kernel.net.hosts.flow_control import PIECE_NBYTES
from monarch_kernel.net.hosts.links import Links, new_keys
from monarch_kernel.net.wire.config import EVERYWHERE, LOOPBACK, LinkKeys
from tests.failures.strangers import besieged, say
from tests.net.transport.pump import pump_until
from tests.support.ports import free_ports
from tests.support.timing import Bar


class End:
    """One host's connections, which the test polls."""

    def __init__(self, host: int, keys: LinkKeys) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.poller = zmq.Poller()
        self.links = Links(self.context, host, keys, self._watch)
        self.got: list[tuple[int, list[bytes]]] = []

    def _watch(self, sock: zmq.Socket[bytes], is_open: bool) -> None:
        if is_open:
            self.poller.register(sock, zmq.POLLIN)
        else:
            self.poller.unregister(sock)

    def turn(self) -> None:
        self.poller.poll(5)
        self.links.tend()
        while (received := self.links.recv()) is not None:
            self.got.append((received[0], [bytes(part) for part in received[1]]))

    def close(self) -> None:
        self.links.close()
        self.context.destroy(linger=0)


@pytest.fixture
def keys() -> LinkKeys:
    return new_keys()


@pytest.fixture
def ends(keys: LinkKeys) -> Iterator[Callable[..., End]]:
    made: list[End] = []

    def make(host: int, of: LinkKeys = keys) -> End:
        made.append(End(host, of))
        return made[-1]

    yield make
    for end in made:
        end.close()


def turn_until(condition: Callable[[], object], *ends: End) -> None:
    def turn() -> None:
        for end in ends:
            end.turn()

    pump_until(condition, turn, "the links")


def test_a_host_that_dials_is_known_by_its_number_and_answered(ends: Callable[..., End]) -> None:
    controller, agent = ends(0), ends(3)
    port = controller.links.listen(*free_ports(1))  # others may dial a port that the system chooses
    agent.links.dial(0, [f"tcp://127.0.0.1:{port}"])
    assert agent.links.send(0, [b"early", b"x" * 100_000])
    turn_until(lambda: controller.got, controller, agent)
    assert controller.got == [(3, [b"early", b"x" * 100_000])]
    assert controller.links.send(3, [b"answer"])
    turn_until(lambda: agent.got, controller, agent)
    assert agent.got == [(0, [b"answer"])]
    assert controller.links.refused == 0
    assert not controller.links.send(4, [b"nobody"])


def test_a_host_that_listens_for_this_machine_gets_another_port_for_the_others(ends: Callable[..., End]) -> None:
    controller, near, far = ends(0), ends(1), ends(2)
    here = controller.links.listen(at=LOOPBACK)
    assert controller.links.listen(at=LOOPBACK) == here
    everywhere = controller.links.listen()
    assert {here, everywhere} == {controller.links.listen(at=at) for at in (LOOPBACK, EVERYWHERE)}
    assert here != everywhere
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", here))  # another address of the loopback interface
    near.links.dial(0, [f"tcp://127.0.0.1:{here}"])
    far.links.dial(0, [f"tcp://127.0.0.2:{everywhere}"])
    for end in (near, far):
        end.links.send(0, [b"hello"])
    turn_until(lambda: len(controller.got) == 2, controller, near, far)
    for port in (here, everywhere):  # the guard watches both ports
        before = controller.links.refused
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"nonsense" * 2000)
            turn_until(lambda before=before: controller.links.refused > before, controller)  # type: ignore[misc]


def test_the_first_address_that_answers_is_used_though_others_lead_nowhere(ends: Callable[..., End]) -> None:
    controller, agent = ends(0), ends(1)
    port = controller.links.listen()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        agent.links.dial(
            0,
            [
                f"tcp://127.0.0.1:{mute.getsockname()[1]}",
                f"tcp://127.0.0.1:{free_ports(1)[0]}",
                "tcp://no-such-host.invalid:1",
                "nonsense",
                f"tcp://127.0.0.1:{port}",
            ],
        )
        agent.links.send(0, [b"hello"])
        turn_until(lambda: controller.got, controller, agent)
    assert controller.got == [(1, [b"hello"])]
    assert agent.links.new_connections() == [0]
    assert agent.links.new_connections() == []


def test_a_better_address_is_preferred_to_a_quicker_one(ends: Callable[..., End]) -> None:
    controller, agent = ends(0), ends(1)
    port = controller.links.listen()
    agent.links.dial(0, [f"tcp://localhost:{port}", f"tcp://127.0.0.1:{port}"])
    turn_until(lambda: not agent.links.is_dialling, controller, agent)
    (taken,) = agent.links._taken.values()
    assert b"localhost" in taken.socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[operator]


def test_another_host_at_the_address_is_not_mistaken_for_the_dialled_one(ends: Callable[..., End]) -> None:
    wrong, right, agent = ends(7), ends(8), ends(1)
    addresses = [f"tcp://127.0.0.1:{end.links.listen()}" for end in (wrong, right)]
    agent.links.dial(8, addresses)
    agent.links.send(8, [b"for 8"])
    turn_until(lambda: right.got, wrong, right, agent)
    assert wrong.got == []


def raw(kind: int, context: zmq.Context[zmq.Socket[bytes]], port: int, **curve: bytes) -> zmq.Socket[bytes]:
    sock: zmq.Socket[bytes] = context.socket(kind)
    sock.linger = 0
    sock.setsockopt(zmq.ROUTING_ID, b"H1/0")
    for name, value in curve.items():
        setattr(sock, name, value)
    sock.connect(f"tcp://127.0.0.1:{port}")
    say(sock, [b"let me in"])
    return sock


def strangers(kind: str, context: zmq.Context[zmq.Socket[bytes]], port: int, keys: LinkKeys) -> object:
    own_public, own_secret = zmq.curve_keypair()
    if kind == "garbage":
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(b"GET / HTTP/1.1\r\nHost: monarch\r\n\r\n" * 20)
        return sock
    if kind == "no CURVE":
        return raw(zmq.DEALER, context, port)
    server = keys.public.encode() if kind == "its own keys" else zmq.curve_keypair()[0]
    return raw(
        zmq.DEALER, context, port, curve_serverkey=server, curve_publickey=own_public, curve_secretkey=own_secret
    )


@pytest.mark.parametrize("kind", ["garbage", "no CURVE", "its own keys", "another's keys"])
def test_a_stranger_is_refused_and_counted_and_its_messages_are_dropped(
    kind: str, ends: Callable[..., End], keys: LinkKeys
) -> None:
    controller, agent = ends(0), ends(2)
    port = controller.links.listen()
    agent.links.dial(0, [f"tcp://127.0.0.1:{port}"])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = strangers(kind, context, port, keys)
    try:
        turn_until(lambda: controller.links.refused, controller, agent)
        agent.links.send(0, [b"one of us"])
        turn_until(lambda: controller.got, controller, agent)
        assert controller.got == [(2, [b"one of us"])]
    finally:
        stranger.close()  # type: ignore[attr-defined]
        context.destroy(linger=0)


def test_announcing_a_frame_of_a_gigabyte_takes_no_memory(ends: Callable[..., End]) -> None:
    controller, agent = ends(0), ends(2)
    port = controller.links.listen()
    before = psutil.Process().memory_info().rss
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(
            b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
        )  # ZMTP's greeting
        stranger.sendall(b"\x06" + (1 << 30).to_bytes(8, "big"))  # a long command of a gigabyte
        stranger.settimeout(0.1)
        try:
            for _ in range(1024):
                stranger.sendall(bytes(1 << 20))
        except OSError:
            pass  # it was disconnected, or is not read from
        turn_until(lambda: controller.links.refused, controller)
        assert psutil.Process().memory_info().rss - before < 64 << 20
    agent.links.dial(0, [f"tcp://127.0.0.1:{port}"])
    agent.links.send(0, [b"x" * 2 * PIECE_NBYTES])
    turn_until(lambda: controller.got, controller, agent)


def test_a_host_with_a_proof_is_admitted_after_a_busy_time(ends: Callable[..., End]) -> None:
    """This host has to check the proof, and may be busy while strangers connect."""
    controller, agent = ends(0), ends(2)
    port = controller.links.listen(*free_ports(1))  # others may dial a port that the system chooses
    with besieged("nothing", [port], 400, waits=True) as besieger:
        agent.links.dial(0, [f"tcp://127.0.0.1:{port}"])
        besieger.begin()
        turn_until(lambda: not agent.links.is_dialling, controller, agent)
    turn_until(lambda: controller.links.refused >= 400, controller)
    agent.links.send(0, [b"one of us"])
    turn_until(lambda: controller.got, controller, agent)
    assert controller.links.refused == 400


def test_a_reconnected_host_is_recognised(ends: Callable[..., End]) -> None:
    controller, agent = ends(0), ends(2)
    port = controller.links.listen(*free_ports(1))  # others may dial a port that the system chooses
    for i in range(3):
        agent.links.dial(0, [f"tcp://127.0.0.1:{port}"])
        turn_until(lambda: not agent.links.is_dialling, controller, agent)  # otherwise the former one may carry it
        agent.links.send(0, [b"%d" % i])
        turn_until(lambda i=i: len(controller.got) > i, controller, agent)  # type: ignore[misc]
        controller.links.send(2, [b"%d" % i])
        turn_until(lambda i=i: len(agent.got) > i, controller, agent)  # type: ignore[misc]
    assert controller.got == [(2, [b"%d" % i]) for i in range(3)]
    assert controller.links.refused == 0


@pytest.mark.slow
def test_a_lost_peer_is_dialled_often_then_seldom_and_found_when_it_returns(
    ends: Callable[..., End], monkeypatch: pytest.MonkeyPatch, bar: Bar
) -> None:
    often_s = 1.0
    monkeypatch.setattr(links_module, "_KNOCKS_S", often_s)
    controller, agent = ends(0), ends(2)
    port = controller.links.listen()
    agent.links.dial(0, [f"tcp://127.0.0.1:{port}"])
    agent.links.send(0, [b"first"])
    turn_until(lambda: controller.got, controller, agent)
    controller.close()
    tries: list[float] = []
    begin = time.monotonic()

    def turn() -> None:
        with suppress(BlockingIOError):
            server.accept()[0].close()
            tries.append(time.monotonic() - begin)
        agent.turn()
        agent.links.revive(time.monotonic())

    with socket.create_server(("127.0.0.1", port)) as server:
        server.setblocking(False)
        pump_until(lambda: tries and tries[-1] > 4 * often_s, turn, "tries")
    bar.check_above(sum(at < often_s for at in tries), 15, "the number of tries at first")
    bar.check(sum(at > 3 * often_s for at in tries), 15, "the number of tries later")  # about ten a second
    again = ends(0)
    again.links.listen(port)
    agent.links.send(0, [b"second"])
    turn_until(lambda: again.got, again, agent)
    assert again.got[-1] == (2, [b"second"])
