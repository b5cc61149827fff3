"""F30: unauthorized clients connect to our ports or send garbage; they are refused and counted, and nothing is unpickled."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import zmq

from monarch_kernel.actor import ProcMesh
from monarch_kernel.net.hosts.relay import Relay
from monarch_kernel.net.wire.codec import join, pack
from monarch_kernel.net.wire.config import LinkKeys
from monarch_kernel.net.wire.messages import Hello, HostHello
from monarch_kernel.runtime.controller.session import Session, current_session
from tests.failures.machines import LONG_S, Machines, hosts_on, wait_until
from tests.failures.strangers import say

ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"


@pytest.fixture(scope="module")
def procs(standing: Machines) -> ProcMesh:
    mesh = hosts_on(standing, 1, is_light=True).spawn_procs({"gpus": 1}, device="cpu")
    standing.await_up(mesh)
    return mesh


def port_of(session: Session) -> int:
    return session.runtime.run_on_io_thread(session._transport.listen)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def dealer(context: zmq.Context[zmq.Socket[bytes]], port: int, keys: LinkKeys | None, name: bytes) -> zmq.Socket[bytes]:
    end = context.socket(zmq.DEALER)
    end.setsockopt(zmq.ROUTING_ID, name)
    end.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        end.curve_serverkey = current_session()._keys.public.encode()
        end.curve_publickey, end.curve_secretkey = keys.public.encode(), keys.secret.encode()
    end.connect(f"tcp://127.0.0.1:{port}")
    return end


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@contextmanager
def refusal() -> Iterator[Callable[[], None]]:
    """Yield a function that waits until a connection is refused and counted."""
    runtime = current_session().runtime
    before = runtime.refused
    yield lambda: wait_until(lambda: runtime.refused > before, "the connection to be refused")


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(4096), ZMTP_GREETING + b"NULL" + bytes(48), bytes(100_000)],
    ids=["http", "noise", "zmtp", "zeros"],
)
def test_plain_tcp_is_refused(procs: ProcMesh, garbage: bytes) -> None:
    with refusal() as refused, socket.create_connection(("127.0.0.1", port_of(current_session())), 5) as stranger:
        with suppress(OSError):  # the server closes the connection
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
        refused()
    assert procs.run("rank").get(LONG_S).values() == (0,)


def test_zmtp_without_curve_is_refused(
    procs: ProcMesh, context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "opened"))
    with refusal() as refused, dealer(context, port_of(current_session()), None, b"H1/9") as end:
        say(end, [bomb, bomb])
        refused()
        assert not end.poll(100)
    assert not (tmp_path / "opened").exists()


def test_another_key_pair_is_refused(procs: ProcMesh, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    public, secret = zmq.curve_keypair()
    keys = LinkKeys(public.decode(), secret.decode())
    with refusal() as refused, dealer(context, port_of(current_session()), keys, b"H1/9") as end:
        say(end, [b"knock", b"1", b"0"])
        refused()
        assert not end.poll(100)


@pytest.mark.parametrize(("what", "number"), [("a host", 77), ("a rank", 78), ("garbage", 79)])
def test_the_right_keys_and_a_wrong_token_are_refused(
    procs: ProcMesh, context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, what: str, number: int
) -> None:
    """Such a client may be an agent of this session that had to end, or a process that has stolen only the keys."""
    session = current_session()
    said = {
        "a host": (b"H%d" % number, join([pack(HostHello("no token", number, "liar", 1, 1, 0))])),
        "a rank": (b"R1", join([pack(Hello("no token", procs.procs[0], 1, "cpu"))])),
        "garbage": (b"H%d" % number, [pickle.dumps(Bomb(tmp_path / "opened"))] * 2),
    }[what]
    relay = Relay(number, default=0)
    relay.send(said[0], b"C", 0, said[1])
    with refusal() as refused, dealer(context, port_of(session), session._keys, b"H%d/0" % number) as end:
        say(end, *(parts for _, parts in relay.flush()))
        refused()
    assert not (tmp_path / "opened").exists()
    assert procs.run("rank").get(LONG_S).values() == (0,)


def test_the_ports_of_agents_refuse_all_strangers(
    standing: Machines, procs: ProcMesh, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    agent = psutil.Process(standing.pid(0))
    ports = {each.laddr.port for each in agent.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    assert ports
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(1000))
        public, secret = zmq.curve_keypair()
        for keys in (None, LinkKeys(public.decode(), secret.decode())):
            with dealer(context, port, keys, b"H0/0") as end:
                say(end, [b"knock", b"0", b"1"])
                assert not end.poll(200)
    assert procs.run("rank").get(LONG_S).values() == (0,)
    assert standing.agents[0].poll() is None
