"""Workers that a user brings, and programs that attach to them, have nothing to do with other users of the machine."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from monarch_kernel.base.peer_users import is_trusted, user_of_peer
from monarch_kernel.integrations.monarch.workers import WorkerHost
from monarch_kernel.net.wire.config import AgentConfig
from tests.support.ports import free_ports
from tests.support.stranger import NOBODY, run_as_nobody, started_as_nobody
from tests.support.waiting import LONG_S, wait_until

CONNECT = """
def place(address):
    kind, _, rest = address.partition("://")
    if kind == "ipc":
        return socket.AF_UNIX, "\\0" + rest[1:]
    return socket.AF_INET, ("127.0.0.1", int(rest.rpartition(":")[2]))
family, where = place(sys.argv[1])
"""
# Sends a configuration, and prints what the worker answers.
ATTACH = (
    CONNECT
    + """
connection = socket.socket(family)
connection.settimeout(20)
connection.connect(where)
config = sys.argv[2].encode()
try:
    connection.sendall(os.getpid().to_bytes(4, "big") + len(config).to_bytes(4, "big") + config)
    print(connection.recv(100))
except ConnectionError:
    print(b"")
"""
)
# Listens in place of a worker, and prints what a program sends.
PRETEND = (
    CONNECT
    + """
listener = socket.socket(family)
listener.bind(where)
listener.listen()
print("listens", flush=True)
connection = listener.accept()[0]
print(connection.recv(100), flush=True)
"""
)
CONFIG = AgentConfig(host=0, token="token", addresses=("tcp://127.0.0.1:1",))


@pytest.fixture(params=["tcp", "ipc"])
def address(request: pytest.FixtureRequest) -> str:
    """An address that all users of the machine can reach."""
    return f"tcp://127.0.0.1:{free_ports(1)[0]}" if request.param == "tcp" else f"ipc://@monarch-{secrets.token_hex(8)}"


@pytest.fixture
def worker(address: str) -> Iterator[subprocess.Popen[str]]:
    code = f"from monarch_kernel.integrations.monarch.workers import *; run_worker_loop_forever({address!r})"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as worker:
        try:
            yield worker
        finally:
            worker.kill()


def test_a_worker_takes_nothing_from_another_user(address: str, worker: subprocess.Popen[str]) -> None:
    wait_until(lambda: listens(address), "the worker to listen")
    assert run_as_nobody(ATTACH, address, CONFIG.encode().decode()) == "b''\n"
    assert worker.stderr
    refused = f"worker {address} refused a program: it belongs to another user (uid {NOBODY})\n"
    assert refused in iter(worker.stderr.readline, "")
    assert psutil.Process(worker.pid).children() == []


def test_a_worker_goes_on_after_noise(address: str, worker: subprocess.Popen[str]) -> None:
    wait_until(lambda: listens(address), "the worker to listen")
    for data in (b"\xff" * 8, b"\0\0\0\1\0\0\0\2{}", b""):
        with connected(address) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
    assert worker.poll() is None
    assert psutil.Process(worker.pid).children() == []


def test_a_worker_that_does_not_listen_in_time_is_lost(address: str) -> None:
    host = WorkerHost(address, CONFIG, 0.01)
    wait_until(lambda: host.poll() is not None, "the program to give up")
    assert str(host.poll()).startswith(f"worker {address}: it could not be reached within 0.01 s (")
    assert not host.is_waiting
    host.close(LONG_S)


def test_a_program_sends_nothing_to_another_user(address: str) -> None:
    with started_as_nobody(PRETEND, address) as stranger:
        assert stranger.stdout
        assert stranger.stdout.readline() == "listens\n"
        host = WorkerHost(address, CONFIG, LONG_S)
        assert stranger.stdout.readline() == "b''\n"
        wait_until(lambda: host.poll() is not None, "the program to refuse the worker")
        assert host.poll() == f"worker {address}: it belongs to another user (uid {NOBODY}), and was sent nothing"
        host.close(LONG_S)


def test_the_user_of_a_connection_is_known_while_both_ends_are_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as theirs:
        assert user_of_peer(theirs) is None  # nothing has accepted it
        ours = listener.accept()[0]
        me = psutil.Process().uids().effective
        assert user_of_peer(theirs) == user_of_peer(ours) == me
        assert is_trusted(me)
        assert not is_trusted(NOBODY)
        ours.close()
        assert user_of_peer(theirs) is None


def test_the_user_of_a_socket_for_ipv6_is_known() -> None:
    """ZeroMQ connects with such sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET6) as theirs:
        theirs.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        with listener.accept()[0] as ours:
            assert user_of_peer(ours) == psutil.Process().uids().effective


def connected(address: str) -> socket.socket:
    kind, _, rest = address.partition("://")
    connection = socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET)
    connection.settimeout(LONG_S)
    try:
        connection.connect(f"\0{rest[1:]}" if kind == "ipc" else ("127.0.0.1", int(rest.rpartition(":")[2])))
    except OSError:
        connection.close()
        raise
    return connection


def listens(address: str) -> bool:
    try:
        connected(address).close()
    except OSError:
        return False
    return True
