"""Opened memory stays until the processes that use it close it or end; memory that can't be opened takes another data path."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from monarch_kernel.actor import Actor, ProcMesh, endpoint, this_host
from monarch_kernel.actor.channels import client_here
from monarch_kernel.errors import MeshDownError
from monarch_kernel.net.memory.layout import memory_of
from monarch_kernel.net.memory.paths import OwnerGone, PathUnavailable
from monarch_kernel.rdma import Buffer
from monarch_kernel.runtime.buffers import nixl
from tests.support.processes import wait_gone
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until

DEVICE = "cuda:0"
needs_nixl = pytest.mark.skipif(not nixl.is_installed(), reason="NIXL is not installed")
PROCS = {"gpus": 1}


class Owner(Actor):
    """Lends memory, and knows whether the memory still exists."""

    @endpoint
    def lend(self, count: int, device: str = "") -> Buffer:
        self.kept: Any = torch.ones(count)
        self.seen = weakref.ref(self.kept)
        buffer = Buffer(self.kept)
        if device:  # pretend that it is on the device
            exports, lease = client_here().exports, buffer._handle.lease
            exports._held[lease] = exports._held[lease]._replace(device=device)
            buffer._handle = buffer._handle._replace(device=device)
        return buffer

    @endpoint
    def let_go(self) -> None:
        self.kept = None

    @endpoint
    def is_there(self) -> bool:
        return self.seen() is not None

    @endpoint
    def tasks(self) -> int:
        """Count the threads, including those that Python did not start."""
        return len(os.listdir("/proc/self/task"))


class Reader(Actor):
    """Opens memory, and may end without closing it."""

    @endpoint
    def open(self, buffer: Buffer) -> int:
        client_here().paths["rdma"]._opening.ask(buffer._handle)
        return os.getpid()


class Ranks(NamedTuple):
    procs: ProcMesh
    owner: Any
    reader: Any


@pytest.fixture
def ranks(procs: ProcMesh) -> Iterator[Ranks]:
    """Processes for one test, because tests kill some. The fixture ``procs`` has started the agent and the zygote."""
    mine = this_host().spawn_procs({"gpus": 2}, device="cpu")
    yield Ranks(mine, mine.slice(gpus=0).spawn("owner", Owner), mine.slice(gpus=1).spawn("reader", Reader))
    client_here().paths.close()  # also closes what this process keeps for the next transfer
    mine.stop(grace_s=0).get(LONG_S)


def call(endpoint: Any, *args: Any) -> Any:
    return endpoint.call_one(*args).get(LONG_S)


@needs_nixl
def test_memory_stays_while_it_is_open_and_is_freed_after_the_last_close(ranks: Ranks) -> None:
    before = call(ranks.owner.tasks)
    path: Any = client_here().paths["rdma"]
    buffer = call(ranks.owner.lend, 1000)
    opened, _ = path._opening.ask(buffer._handle)
    again, _ = path._opening.ask(buffer._handle)
    assert buffer.drop().get(LONG_S)
    call(ranks.owner.let_go)
    with pytest.raises(OwnerGone, match="it was dropped"):
        path._opening.ask(buffer._handle)
    path._opening.close(buffer._handle, opened)
    for _ in range(20):
        assert call(ranks.owner.is_there)
    path._opening.close(buffer._handle, again)
    wait_until(lambda: not call(ranks.owner.is_there), "the memory to be freed")
    wait_until(lambda: call(ranks.owner.tasks) <= before + 1, "the end of the threads that serve it")


@needs_nixl
def test_memory_is_freed_when_the_process_that_opened_it_is_killed(ranks: Ranks) -> None:
    buffer = call(ranks.owner.lend, 1000)
    pid = call(ranks.reader.open, buffer)
    buffer.drop().get(LONG_S)
    call(ranks.owner.let_go)
    assert call(ranks.owner.is_there)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not call(ranks.owner.is_there), "the memory to be freed")


def test_memory_that_cannot_be_opened_takes_another_path_and_is_not_tried_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = call(ranks.owner.lend, 1000, DEVICE)  # CUDA can't share it, because it did not allocate it
    path: Any = client_here().paths["cuda"]
    assert not path.leads_to(buffer._handle)  # this process uses no device
    monkeypatch.setattr("monarch_kernel.net.memory.devices.are_in_use", lambda: True)
    assert path.leads_to(buffer._handle)
    assert not path.leads_to(call(ranks.owner.lend, 1000)._handle)  # not on a device
    into = torch.zeros(1000)
    assert buffer.read_into(into).get(LONG_S).path == "messages"
    assert bool((into == 1).all())
    assert not path.leads_to(buffer._handle)


@needs_nixl
def test_the_rdma_path_is_used_only_with_hardware(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    far = call(ranks.owner.lend, 1 << 20)
    small = far[:10]
    path: Any = client_here().paths["rdma"]
    assert not path.leads_to(far._handle)
    monkeypatch.setattr("monarch_kernel.runtime.buffers.nixl.has_hardware", lambda: True)
    monkeypatch.setattr(path, "_is_there", None)
    assert not path.leads_to(far._handle)  # the owner is on this machine
    monkeypatch.setattr(path._tables, "is_local", lambda lent: False)
    assert path.leads_to(far._handle)
    assert not path.leads_to(small._handle)
    into = torch.zeros(1 << 20)
    assert far.read_into(into).get(LONG_S).path == "rdma"
    assert bool((into == 1).all())


@pytest.mark.slow
@needs_nixl
def test_no_bytes_arrive_after_the_end_of_a_transfer(ranks: Ranks) -> None:
    count = 64 << 20
    buffer = call(ranks.owner.lend, count)
    path: Any = client_here().paths["rdma"]
    mine = torch.zeros(count)
    memory = buffer._memory(mine, is_write=False)
    path.carry(buffer._handle, memory, is_write=False)
    ended: list[BaseException | None] = []

    def read() -> None:
        try:
            while True:
                path.carry(buffer._handle, memory, is_write=False)
        except (OwnerGone, PathUnavailable, MeshDownError) as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    pid = ranks.procs.view().ranks[0].pid
    os.kill(pid, signal.SIGSTOP)  # now it can't end by itself
    ranks.procs.stop().get(LONG_S)  # from now on it counts as dead; after two seconds it is killed
    reader.join(LONG_S)
    assert ended
    mine.zero_()
    wait_gone(pid)
    threading.Event().wait(0.3)  # for data that it has sent and this process has not received yet
    assert not mine.any()


def test_scattered_elements_are_refused_at_once(ranks: Ranks, bar: Bar) -> None:
    buffer = call(ranks.owner.lend, 1 << 22)
    path: Any = client_here().paths["rdma"]
    into = torch.zeros(1 << 11, 1 << 11).t()
    begin = time.thread_time()
    with pytest.raises(PathUnavailable, match="too far apart"):
        path.carry(buffer._handle, memory_of(into), is_write=False)
    bar.check(time.thread_time() - begin, 0.1, "the refusal")


class Library:
    """Fake NIXL: remembers agents, and raises an error if the memory of a known agent has changed."""

    def __init__(self) -> None:
        self.known: dict[bytes, bytes] = {}
        self.removed = 0

    def add_remote_agent(self, metadata: bytes) -> None:
        if self.known.setdefault(metadata[:1], metadata) != metadata:
            raise ValueError("NOT_ALLOWED")

    def remove_remote_agent(self, name: str) -> None:
        self.removed += 1
        del self.known[name.encode()]


def test_an_agent_is_not_removed_during_a_transfer() -> None:
    agent = object.__new__(nixl.Agent)
    agent.nixl, agent._peers = Library(), {}
    agent._lock = threading.RLock()
    agent._changed = threading.Condition(agent._lock)
    one, other = (nixl.Described("a", metadata, "DRAM", 0, 0, 0, False) for metadata in (b"a1", b"a2"))
    entered = threading.Event()

    def meet_other() -> None:
        with agent._using(other):
            entered.set()

    with agent._using(one), agent._using(one):
        later = threading.Thread(target=meet_other)  # whose memory is at the same address
        later.start()
        assert not entered.wait(0.3)
        assert agent.nixl.removed == 0
    later.join(LONG_S)
    assert entered.is_set()
    assert agent.nixl.removed == 1
    with pytest.raises(nixl.NixlUnreachable, match="broken"), agent._using(other):
        raise ValueError("broken")
    assert agent.nixl.removed == 2  # the next caller meets it again
    with agent._using(other):
        pass
    assert agent.nixl.removed == 2


def test_the_error_names_what_ucx_cannot_do(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "^tcp")  # the default; and this machine has nothing else
    buffer = call(ranks.owner.lend, 1000)
    path: Any = client_here().paths["rdma"]
    with pytest.raises(PathUnavailable, match="UCX found no way to other machines"):
        path.carry(buffer._handle, buffer._memory(torch.zeros(1000), is_write=False), is_write=False)
    assert path._opening.is_barred(buffer._handle)
