"""The controller's transport: descriptors signal each message only once, and no message is missed."""

from __future__ import annotations

import random
import select
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from monarch_kernel.net.hosts import rank_lines
from monarch_kernel.net.hosts import zmq as zmq_module
from monarch_kernel.net.hosts.links import Links, new_keys
from monarch_kernel.net.hosts.relay import CONTROLLER_HOST, Relay
from monarch_kernel.net.hosts.zmq import ZmqRank, ZmqRouter
from monarch_kernel.net.transport import zmq_utils as sockets_module
from monarch_kernel.net.transport.base import CONTROLLER, host_peer, rank_peer
from monarch_kernel.net.transport.unix_packets import Packets, packets_of
from monarch_kernel.net.transport.zmq_utils import has_message
from monarch_kernel.net.wire.codec import Frame
from tests.net.transport.pump import pump_until
from tests.net.transport.test_conformance import receive, wait_for_an_event
from tests.support.timing import Bar
from tests.support.waiting import LONG_S

HOST = 3


class Agent:
    """A host that sends a message when the test says so."""

    def __init__(self, router: ZmqRouter, links: Links) -> None:
        self.relay = Relay(HOST, default=CONTROLLER_HOST)
        self.links = links
        links.dial(CONTROLLER_HOST, [f"tcp://127.0.0.1:{router.listen()}"])
        router.route(host_peer(HOST), HOST)
        self.say(b"hello")
        pump_until(router.recv, links.recv, "the host's greeting")

    def say(self, text: bytes) -> None:
        self.relay.send(host_peer(HOST), CONTROLLER, CONTROLLER_HOST, [text])
        for neighbour, parts in self.relay.flush():
            assert self.links.send(neighbour, parts)


@pytest.fixture
def router(tmp_path: Path) -> Iterator[ZmqRouter]:
    router = ZmqRouter(f"ipc://{tmp_path}/c", new_keys())
    yield router
    router.close()


@pytest.fixture
def agent(router: ZmqRouter) -> Iterator[Agent]:
    assert router._links is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = Links(context, HOST, new_keys(), lambda sock, is_open: None)
    links._public, links._secret = router._links._public, router._links._secret
    yield Agent(router, links)
    links.close()
    context.destroy(linger=0)


@pytest.mark.parametrize("after", range(6))
def test_a_message_of_another_machine_during_a_check_is_not_missed(
    router: ZmqRouter, agent: Agent, after: int, monkeypatch: pytest.MonkeyPatch, bar: Bar
) -> None:
    """The number of checks before does not matter, although any check clears the signal."""
    looks, said_at = 0, 0.0

    def look(socket: zmq.Socket[bytes]) -> bool:
        nonlocal looks, said_at
        assert router._links is not None
        if socket is router._links._listener:
            looks += 1
            if looks == 1 + after:
                agent.say(b"just now")
                poller = select.poll()
                poller.register(int(socket.getsockopt(zmq.FD)), select.POLLIN)
                poller.poll(300)  # times out if the last check found something: then there is no signal
                said_at = time.monotonic()
        return has_message(socket)

    for module in (zmq_module, sockets_module):
        monkeypatch.setattr(module, "has_message", look)
    router._beat_at = time.monotonic() + 2 * LONG_S  # a beat would end the wait
    while looks <= after:  # the number of checks for one message depends on when it arrives
        agent.say(b"before")
        assert receive(router) == (host_peer(HOST), [b"before"])
    assert receive(router) == (host_peer(HOST), [b"just now"])
    bar.check(time.monotonic() - said_at, 2.5, "a message from another machine")


@pytest.mark.parametrize("has_line", [False, True])
def test_messages_of_this_and_of_other_machines_take_turns(
    router: ZmqRouter, agent: Agent, tmp_path: Path, has_line: bool
) -> None:
    rank = ZmqRank(f"ipc://{tmp_path}/c", rank_peer(1), f"ipc://{tmp_path}/R1", has_line=has_line)
    try:
        for i in range(1000):
            rank.send(CONTROLLER, [b"%d" % i])
        assert receive(router) == (rank_peer(1), [b"0"])
        agent.say(b"one")
        for i in range(1, 50_000):
            rank.send(CONTROLLER, [b"%d" % (1000 + i)])
            if receive(router) == (host_peer(HOST), [b"one"]):
                break
        else:
            pytest.fail("it has not arrived after 50,000 messages of another")
    finally:
        rank.close()


@pytest.mark.parametrize("has_line", [False, True])
def test_interrupts_lose_no_message(router: ZmqRouter, agent: Agent, tmp_path: Path, has_line: bool) -> None:
    """A wait, which may be interrupted, leaves all messages in place."""
    rank = ZmqRank(f"ipc://{tmp_path}/c", rank_peer(1), f"ipc://{tmp_path}/R1", has_line=has_line)
    try:
        rank.send(CONTROLLER, [b"from here"])
        agent.say(b"from elsewhere")
        for _ in range(3):
            wait_for_an_event(router)
            assert not router._arrived
        came = {receive(router)[0], receive(router)[0]}
        assert came == {rank_peer(1), host_peer(HOST)}
    finally:
        rank.close()


def test_the_limits_for_strangers_are_updated_while_there_are_hosts(router: ZmqRouter, agent: Agent) -> None:
    """Otherwise nothing would notice when few descriptors are left."""
    assert router._links is not None
    guard = router._links._guard
    assert guard is not None
    before = guard._tended

    def turn() -> None:
        router.wait(0.1)
        router.recv()

    pump_until(lambda: guard._tended >= before + 3, turn, "the limits to be updated")


# -- ranks that connect without ZeroMQ


@pytest.fixture
def rank(router: ZmqRouter, tmp_path: Path) -> Iterator[ZmqRank]:
    rank = ZmqRank(f"ipc://{tmp_path}/c", rank_peer(1), f"ipc://{tmp_path}/R1", has_line=True)
    rank.send(CONTROLLER, [b"hello"])
    assert receive(router) == (rank_peer(1), [b"hello"])
    yield rank
    rank.close()


def test_a_call_wakes_no_thread_of_zeromq(router: ZmqRouter, rank: ZmqRank) -> None:
    before = switches_of_zeromq()
    for i in range(200):
        assert router.send(rank_peer(1), [b"%d" % i])
        assert receive(rank) == (CONTROLLER, [b"%d" % i])
        assert rank.send(CONTROLLER, [b"done"])
        assert receive(router) == (rank_peer(1), [b"done"])
    assert switches_of_zeromq() - before < 20  # two for each message, if each passed these threads


def switches_of_zeromq() -> int:
    """Count how often the threads of ZeroMQ in this process have gone to sleep."""
    texts = [
        (thread / "status").read_text()
        for thread in Path("/proc/self/task").iterdir()
        if (thread / "comm").read_text().startswith("ZMQ")
    ]
    assert texts
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)


def test_a_message_for_several_ranks_is_encoded_once(
    router: ZmqRouter, rank: ZmqRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ZmqRank(f"ipc://{tmp_path}/c", rank_peer(2), f"ipc://{tmp_path}/R2", has_line=True)
    other.send(CONTROLLER, [b"hello"])
    receive(router)
    encoded = []

    def encode(parts: Sequence[Frame]) -> Packets:
        encoded.append(parts)
        return packets_of(parts)

    monkeypatch.setattr(rank_lines, "packets_of", encode)
    parts = [b"for all"]
    for peer in (rank_peer(1), rank_peer(2)):
        assert router.send(peer, parts)
    router.flush()
    assert receive(rank) == receive(other) == (CONTROLLER, [b"for all"])
    assert len(encoded) == 1
    other.close()


def test_a_name_belongs_to_one_connection(router: ZmqRouter, rank: ZmqRank, tmp_path: Path) -> None:
    """Otherwise a process without the token could speak for a rank that has presented it."""
    address = f"ipc://{tmp_path}/c"
    strangers = [
        ZmqRank(address, rank_peer(1), f"ipc://{tmp_path}/S1"),
        ZmqRank(address, rank_peer(1), f"ipc://{tmp_path}/S2", has_line=True),
        ZmqRank(address, host_peer(0), f"ipc://{tmp_path}/S3", has_line=True),
    ]
    by_zmq = ZmqRank(address, rank_peer(2), f"ipc://{tmp_path}/R2")
    by_zmq.send(CONTROLLER, [b"hello"])
    assert receive(router) == (rank_peer(2), [b"hello"])
    strangers.append(ZmqRank(address, rank_peer(2), f"ipc://{tmp_path}/S4", has_line=True))
    for stranger in strangers:
        stranger.send(CONTROLLER, [b"forged"])
    pump_until(lambda: router.refused >= len(strangers), lambda: take_nothing(router), "the strangers to be refused")
    for peer, end in ((rank_peer(1), rank), (rank_peer(2), by_zmq)):
        assert router.send(peer, [b"to you"])
        assert receive(end) == (CONTROLLER, [b"to you"])
    for stranger in (*strangers, by_zmq):
        stranger.close()


def take_nothing(router: ZmqRouter) -> None:
    router.wait(0.01)
    assert router.recv() is None


def test_a_large_message_goes_on_while_both_wait(router: ZmqRouter, rank: ZmqRank) -> None:
    large = random.Random(0).randbytes(3 << 20)
    assert router.send(rank_peer(1), [b"head", large])
    assert rank.send(CONTROLLER, [b"head", large])
    came: dict[str, list[bytes]] = {}

    def take(name: str, end: ZmqRouter | ZmqRank) -> None:
        end.wait(0.01)
        if (received := end.recv()) is not None:
            came[name] = [bytes(part) for part in received[1]]

    def turn() -> None:
        take("router", router)
        take("rank", rank)

    pump_until(lambda: len(came) == 2, turn, "both messages")
    assert came == {"router": [b"head", large], "rank": [b"head", large]}


def test_a_rank_without_a_controller_has_no_line(tmp_path: Path) -> None:
    """It waits for its end, which its agent brings about."""
    rank = ZmqRank(f"ipc://{tmp_path}/gone", rank_peer(1), f"ipc://{tmp_path}/R1", has_line=True)
    assert rank.recv() is None
    rank.close()
