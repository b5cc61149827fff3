"""F30: unauthorized clients flood all ports of a mesh; it works on, needs no more memory or descriptors, and counts them."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import zmq

from monarch_kernel.actor import ProcMesh
from monarch_kernel.net.hosts.handshakes import MAX_WAITING
from monarch_kernel.net.wire.config import LinkKeys
from monarch_kernel.notebook.view.text import mesh_text
from monarch_kernel.runtime.controller.session import current_session
from tests.failures.machines import LONG_S, CallLog, Machines, hosts_on, wait_until
from tests.failures.strangers import besieged, say
from tests.support.timing import Bar

pytestmark = pytest.mark.slow

MAX_GROWTH_NBYTES = 96 << 20


class Siege:
    """A mesh of two hosts with a rank each, which a separate thread calls all the time."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self.procs: ProcMesh = hosts_on(machines, 2, is_light=True).spawn_procs({"gpus": 1}, device="cpu")
        self.call_log = self.procs.spawn("call_log", CallLog)
        self.call_log.pid.call().get(LONG_S)
        self.pids = [psutil.Process().pid, *(agent.pid for agent in machines.agents)]
        self.port = current_session().runtime.run_on_io_thread(current_session()._transport.listen)
        self.agent_ports = [_listens(pid) for pid in self.pids[1:]]
        self.answers = 0
        self.wrong: list[object] = []
        self._is_over = threading.Event()
        self._caller = threading.Thread(target=self._call)
        self._before = self._memory()
        self._caller.start()

    @property
    def ports(self) -> list[int]:
        """Ports of the controller and of the agents."""
        return [self.port, *self.agent_ports]

    def _call(self) -> None:
        while not self._is_over.is_set():
            number = self.answers
            try:
                answer = self.call_log.take.call(number).get(LONG_S).values()
            except Exception as error:  # it fails the test in another thread
                self.wrong.append(error)
                return
            if answer != (number, number):
                self.wrong.append(answer)
            self.answers += 1

    def _memory(self) -> list[int]:
        return [psutil.Process(pid).memory_info().rss for pid in self.pids]

    def works_on(self, count: int = 20) -> None:
        """Wait for this many more answers, and check that all answers so far are correct."""
        seen = self.answers
        wait_until(lambda: self.answers >= seen + count or bool(self.wrong), "answers")
        assert self.wrong == []

    def growth_nbytes(self) -> int:
        """Memory growth of the process that has grown most."""
        return max(now - before for now, before in zip(self._memory(), self._before, strict=True))

    def refused(self) -> dict[str, int]:
        """The counts that users see, by port."""
        return dict(self.procs.view().refused_connections)

    def refused_everywhere(self) -> int:
        """The smallest count of refused connections of any port."""
        counts = list(self.refused().values())
        return min(counts) if len(counts) == 3 else 0

    def close(self) -> None:
        self._is_over.set()
        self._caller.join(LONG_S)
        assert not self._caller.is_alive()


def _listens(pid: int) -> int:
    (port,) = (each.laddr.port for each in _listeners(pid))
    return port


def _listeners(pid: int) -> Sequence[psutil._common.pconn]:
    return [each for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN]


@pytest.fixture
def siege(machines: Machines) -> Iterator[Siege]:
    siege = Siege(machines)
    yield siege
    siege.close()
    assert siege.wrong == []
    # Nothing was lost or doubled.
    for taken in siege.call_log.all.call().get(LONG_S).values():
        assert taken == list(range(siege.answers))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Its clients end with the test: a port to which they reconnect may be another program's by then."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.mark.parametrize("what", ["nothing", "long handshakes"])
def test_480_connections_without_a_complete_handshake_at_each_port(siege: Siege, what: str) -> None:
    before = [psutil.Process(pid).num_fds() for pid in siege.pids]
    with besieged(what, siege.ports, 480):
        siege.works_on(200)
        wait_until(
            lambda: siege.refused_everywhere() >= 480 - MAX_WAITING, "the connections beyond the limit to be refused"
        )
        for pid, fds in zip(siege.pids, before, strict=True):
            assert psutil.Process(pid).num_fds() <= fds + MAX_WAITING + 32
        others = siege.procs.spawn("another", CallLog)  # new actors work, too
        assert others.take.call(1).get(LONG_S).values() == (1, 1)
        wait_until(lambda: siege.refused_everywhere() >= 480, "all connections to be closed")
    assert siege.growth_nbytes() < MAX_GROWTH_NBYTES
    siege.works_on()


@pytest.mark.parametrize("what", ["garbage", "half greetings", "other mechanisms", "forged handshakes"])
def test_clients_that_do_not_speak_the_protocol(siege: Siege, what: str) -> None:
    with besieged(what, siege.ports, 60):
        siege.works_on()
        wait_until(lambda: siege.refused_everywhere() >= 60, "all connections to be refused")
    # A client that lost its server in another test may dial one of these ports, so a count may be larger than the siege.
    view = siege.procs.view()
    assert len(view.refused_connections) == 3
    total = sum(count for _, count in view.refused_connections)
    assert siege.growth_nbytes() < MAX_GROWTH_NBYTES
    assert f"refused {total} connections without the keys of this session:" in mesh_text(view)


def test_unfinished_handshakes_of_half_a_megabyte(siege: Siege) -> None:
    with besieged("large handshakes", siege.ports, 480):
        wait_until(lambda: siege.refused_everywhere() >= 480, "all connections to be closed")
        siege.works_on()
    assert siege.growth_nbytes() < MAX_GROWTH_NBYTES


def test_handshakes_of_one_byte_at_a_time(siege: Siege) -> None:
    with besieged("drip", siege.ports, 50):
        wait_until(lambda: siege.refused_everywhere() >= 100, "all connections to be closed twice")
        siege.works_on()
    assert siege.growth_nbytes() < MAX_GROWTH_NBYTES


def test_frames_of_a_gigabyte(siege: Siege) -> None:
    with besieged("flood", siege.ports, 20):
        wait_until(lambda: siege.refused_everywhere() >= 200, "all connections to be refused")
        siege.works_on()
        assert siege.growth_nbytes() < MAX_GROWTH_NBYTES
    siege.works_on()


def test_frames_of_a_quarter_of_a_gigabyte_from_a_host_with_the_keys(
    siege: Siege, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """The size of frames is also limited after the handshake."""
    frame = bytes(1 << 28)  # CURVE makes another copy of it before it sends it
    for port in siege.ports:
        end = _client(context, port, current_session()._keys)
        tells = end.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        end.send(frame, copy=False)
        assert tells.poll(1000 * LONG_S), "the host does not close the connection"
        end.disable_monitor()
        tells.close(linger=0)
        end.close(linger=0)
    siege.works_on()
    agents = [psutil.Process(pid).memory_info().rss for pid in siege.pids[1:]]
    assert max(agents) < 200 << 20


def test_clients_without_keys_and_with_keys_of_another_session(
    siege: Siege, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    public, secret = zmq.curve_keypair()
    others = LinkKeys(public.decode(), secret.decode())
    ours = current_session()._keys
    with ExitStack() as stack:
        for port in siege.ports:
            for keys, of_server in ((None, None), (others, others), (others, ours)):
                end = stack.enter_context(_client(context, port, keys, of_server))
                say(end, [b"knock", b"0", b"1"])
        wait_until(lambda: siege.refused_everywhere() >= 3, "all connections to be refused")
        siege.works_on()
    assert siege.growth_nbytes() < MAX_GROWTH_NBYTES


def test_a_scan_of_ports(siege: Siege) -> None:
    """The scan leaves out other ports that the system chooses: at these, other tests form process groups meanwhile."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = {each.laddr.port for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    ours = {each.laddr.port for pid in siege.pids for each in _listeners(pid)}
    with ExitStack() as stack:
        for port in sorted({*range(1, first), *range(last + 1, 65536)} - others | ours):
            connection = socket.socket()
            connection.settimeout(20 if port in ours else 0.5)  # others may have opened ports since, and accept nothing
            try:
                connection.connect(("127.0.0.1", port))
            except OSError:
                connection.close()
                continue
            stack.enter_context(connection)
            with suppress(OSError):
                connection.sendall(b"\x16\x03\x01\x00\xa5\x01\x00\x00" + b"HELP\r\n" * 20)
        siege.works_on()
        wait_until(lambda: siege.refused_everywhere() >= 1, "the scan to be refused at each port")
    assert siege.growth_nbytes() < MAX_GROWTH_NBYTES


def test_an_agent_at_the_limit_of_its_descriptors(siege: Siege, machines: Machines, bar: Bar) -> None:
    agent = psutil.Process(machines.pid(0))
    _, hard = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
    with besieged("nothing", [siege.agent_ports[0]], 480, waits=True) as besieger:
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (agent.num_fds() + 12, hard))
        besieger.begin()
        wait_until(lambda: max(siege.refused().values(), default=0) >= 480, "all connections to be closed")
        siege.works_on()
        used_s = sum(agent.cpu_times()[:2])
        seen = siege.answers
        siege.works_on(200)
        per_call_s = (sum(agent.cpu_times()[:2]) - used_s) / (siege.answers - seen)
        bar.check(
            per_call_s, 0.005, "a call, of the agent's processor time,"
        )  # libzmq must not retry accept() in a busy loop
    assert agent.is_running()
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (hard, hard))
    siege.works_on()


def _client(
    context: zmq.Context[zmq.Socket[bytes]], port: int, keys: LinkKeys | None, of_server: LinkKeys | None = None
) -> zmq.Socket[bytes]:
    end = context.socket(zmq.DEALER)
    end.setsockopt(zmq.ROUTING_ID, b"H77/stranger")
    end.linger = 0
    if keys is not None:
        end.curve_serverkey = (of_server or keys).public.encode()
        end.curve_publickey, end.curve_secretkey = keys.public.encode(), keys.secret.encode()
    end.connect(f"tcp://127.0.0.1:{port}")
    return end
