"""The agent's transport: answers that may be equal wait for each other, and nothing else is delayed."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch_kernel.net.hosts import gateway as gateway_module
from monarch_kernel.net.hosts.gateway import Gateway
from monarch_kernel.net.hosts.links import new_keys
from monarch_kernel.net.hosts.relay import CONTROLLER_HOST
from monarch_kernel.net.hosts.zmq import ZmqRouter
from monarch_kernel.net.transport.base import CONTROLLER, Peer, host_peer, rank_peer
from monarch_kernel.net.transport.unix_packets import PacketSocket
from tests.net.transport.pump import pump_until
from tests.support.timing import Bar
from tests.support.waiting import LONG_S

RANKS = tuple(rank_peer(i) for i in range(1, 5))


class Host:
    """A host whose agent runs when the test calls it, and whose ranks are the test."""

    def __init__(self, folder: Path) -> None:
        self.fds = select.poll()
        self.controller = ZmqRouter(f"ipc://{folder}/c")
        self.gateway = Gateway(1, str(folder), [f"ipc://{folder}/c"], None, 0, self._watch)
        self.ranks: dict[Peer, PacketSocket] = {}
        self.came: list[tuple[Peer, bytes]] = []
        self.controller.route(host_peer(1), 1)
        for name in RANKS:
            self.controller.route(name, 1)
            self.gateway.expect(name)
            self.ranks[name] = PacketSocket.connect(self.gateway.address.removeprefix("ipc://"))
            self.ranks[name].send([name])
        self.gateway.send(CONTROLLER, [b"up"])
        self.until(lambda: self.came == [(host_peer(1), b"up")])
        self.came.clear()

    def _watch(self, fd: int, is_open: bool) -> None:
        if is_open:
            self.fds.register(fd, select.POLLIN)
        else:
            self.fds.unregister(fd)

    def turn(self) -> None:
        """Run one turn of the agent, if it has work, and read all that the controller has received."""
        self.fds.poll(5)
        self.gateway.turn()
        while (received := self.controller.recv()) is not None:
            senders, parts = received
            for sender in senders if isinstance(senders, tuple) else (senders,):
                self.came.append((sender, bytes(parts[0])))

    def until(self, condition: Callable[[], bool]) -> None:
        pump_until(condition, self.turn, "the host")

    def ask(self, *ranks: Peer) -> None:
        """Send a request of the controller to ranks, and wait until they have received it."""
        question = [b"question"]
        for name in ranks:
            self.controller.send(name, question)
        self.controller.flush()
        heard: set[Peer] = set()

        def all_heard() -> bool:
            heard.update(name for name in ranks if self.ranks[name].recv() is not None)
            return heard == set(ranks)

        self.until(all_heard)

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.close()
        self.gateway.close()
        self.controller.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make answers wait for each other until all have arrived."""
    monkeypatch.setattr(gateway_module, "FOLD_S", 2 * LONG_S)
    monkeypatch.setattr(gateway_module, "MAX_FOLD_S", 2 * LONG_S)


def answer(host: Host, *ranks: Peer) -> None:
    for name in ranks:
        host.ranks[name].send([CONTROLLER, b"answer"])


@pytest.mark.usefixtures("patient")
def test_answers_wait_until_the_last_has_arrived_and_go_up_as_one(host: Host) -> None:
    for _ in range(3):
        host.ask(*RANKS)
        answer(host, *RANKS[:3])
        for _ in range(20):
            host.turn()
        assert host.came == []
        answer(host, RANKS[3])
        host.until(lambda: len(host.came) == 4)
        assert sorted(host.came) == [(name, b"answer") for name in RANKS]
        host.came.clear()


@pytest.mark.usefixtures("patient")
def test_a_rank_that_owes_no_answer_is_not_delayed(host: Host) -> None:
    host.ask(*RANKS[:3])
    answer(host, RANKS[0])
    for _ in range(20):
        host.turn()
    assert host.came == []
    answer(host, RANKS[3])
    host.until(lambda: len(host.came) == 2)
    assert sorted(host.came) == [(RANKS[0], b"answer"), (RANKS[3], b"answer")]


@pytest.mark.usefixtures("patient")
def test_answers_do_not_wait_for_a_rank_that_has_ended(host: Host) -> None:
    host.ask(*RANKS)
    answer(host, *RANKS[:3])
    host.ranks[RANKS[3]].send([CONTROLLER, b"the last"])
    host.gateway.forget(RANKS[3])
    host.until(lambda: len(host.came) == 4)
    assert (RANKS[3], b"the last") in host.came


def test_a_single_answer_is_not_delayed_for_long(host: Host, bar: Bar) -> None:
    host.ask(*RANKS)
    with bar.below(5.0, "three answers"):
        for i, name in enumerate(RANKS[:3]):
            answer(host, name)
            host.until(lambda i=i: len(host.came) == 1 + i)  # type: ignore[misc]


def test_a_connection_with_an_unknown_or_taken_name_is_closed(host: Host) -> None:
    before = host.gateway.refused
    for name in (RANKS[0], rank_peer(99)):
        stranger = PacketSocket.connect(host.gateway.address.removeprefix("ipc://"))
        stranger.send([name])

        def is_cut_off(stranger: PacketSocket = stranger) -> bool:
            assert stranger.recv() is None
            return stranger.is_over

        host.until(is_cut_off)
        stranger.close()
    assert host.gateway.refused == before + 2
    answer(host, RANKS[0])
    host.until(lambda: host.came == [(RANKS[0], b"answer")])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Gateway, Gateway]]:
    """Two hosts of one session without a controller; the first one knows the address of the second."""
    keys, fds = new_keys(), select.poll()
    watch: Callable[[int, bool], None] = lambda fd, is_open: fds.register(fd) if is_open else fds.unregister(fd)  # noqa: E731
    gateways = [Gateway(host, str(tmp_path), [], keys, 0, watch, "127.0.0.1") for host in (1, 2)]
    gateways[0].reach(2, [f"tcp://127.0.0.1:{gateways[1].port}"], [rank_peer(1)])
    yield gateways[0], gateways[1]
    for each in gateways:
        each.close()


def test_hosts_keep_their_direct_path_when_late_messages_come_by_the_controller(pair: tuple[Gateway, Gateway]) -> None:
    one, two = pair

    def are_direct() -> bool:
        return (one._relay.way(2), two._relay.way(1)) == (2, 1)

    def turn() -> None:
        for each in pair:
            each.turn()

    pump_until(are_direct, turn, "the direct path")
    one._relay.lead(2, CONTROLLER_HOST)  # as after a message that was on its way before the hosts were connected
    two._relay.lead(1, CONTROLLER_HOST)
    one.beat(time.monotonic())
    pump_until(are_direct, turn, "the direct path after the next beat")
