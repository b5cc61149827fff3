"""Hosts are given back at the same time, and their replacements do not wait for that."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from monarch_kernel.net.wire.config import AgentConfig
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.host_pool import Item
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.testing import FakeHost, FakeLauncher, MemoryHub, rank_spec

LONG_S = 60.0


class SlowHost(FakeHost):
    """A host that is given back only when others are, too."""

    def __init__(self, token: str, others: threading.Barrier) -> None:
        super().__init__(token)
        self.others = others
        self.was_alone = False

    def close(self, timeout_s: float) -> None:
        try:
            self.others.wait(LONG_S)
        except threading.BrokenBarrierError:
            self.was_alone = True
        super().close(timeout_s)


class SlowLauncher(FakeLauncher):
    def __init__(self, together: int) -> None:
        super().__init__()
        self.others = threading.Barrier(together)
        self.slow: list[SlowHost] = []

    def launch(self, configs: Sequence[AgentConfig]) -> list[FakeHost]:
        found = [SlowHost(config.token, self.others) for config in configs]
        self.slow += found
        return list(found)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    runtime = Runtime(MemoryHub().connect(), "t")
    yield runtime
    runtime.close()


def add(runtime: Runtime, launcher: SlowLauncher, count: int) -> tuple[int, ...]:
    return runtime.host_pool.add(launcher, lambda host: AgentConfig(host, "t", ("ipc://nowhere",)), count)


@pytest.mark.parametrize("how", ["release", "close"])
def test_hosts_are_given_back_at_the_same_time(runtime: Runtime, how: str) -> None:
    launcher = SlowLauncher(3)
    hosts = add(runtime, launcher, 3)
    if how == "release":
        runtime.host_pool.release(hosts, "no longer needed")
    else:
        runtime.close()
    assert [(host.closed, host.was_alone) for host in launcher.slow] == [(True, False)] * 3


def test_a_replaced_host_is_given_back_in_the_background(runtime: Runtime) -> None:
    launcher = SlowLauncher(2)
    old, new = add(runtime, launcher, 2)
    runtime.host_pool.replace(old, new)
    assert not launcher.slow[0].closed
    assert runtime.run_on_io_thread(lambda: runtime.host_pool.now(old)) == new
    runtime.host_pool.release((new,), "no longer needed")
    assert [(host.closed, host.was_alone) for host in launcher.slow] == [(True, False)] * 2


def test_leaving_gives_back_only_replaced_hosts(runtime: Runtime) -> None:
    launcher = SlowLauncher(2)
    old, new = add(runtime, launcher, 2)
    runtime.host_pool.replace(old, new)
    meanwhile = threading.Thread(target=launcher.others.wait)
    meanwhile.start()
    runtime.leave()
    meanwhile.join()
    assert [host.closed for host in launcher.slow] == [True, False]


def test_processes_that_have_just_been_started_are_found(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their start may still wait for the I/O thread."""
    (host,) = add(runtime, SlowLauncher(1), 1)
    go = threading.Event()

    def hold(now: float) -> list[Effect]:
        go.wait(LONG_S)
        return []

    runtime.enter(hold)
    runtime.start_ranks(host, [rank_spec(1)], view=3)
    enter = runtime.enter

    def enter_and_go(item: Item) -> None:
        enter(item)
        go.set()

    monkeypatch.setattr(runtime, "enter", enter_and_go)
    try:
        assert runtime.host_pool.procs_on((host,), 3) == (1,)
        assert not runtime.host_pool.can_end(host)
    finally:
        go.set()


def test_processes_belong_to_the_view_through_which_they_were_started(runtime: Runtime) -> None:
    (host,) = add(runtime, SlowLauncher(1), 1)
    pool = runtime.host_pool
    runtime.start_ranks(host, [rank_spec(1)])
    runtime.start_ranks(host, [rank_spec(2)], view=3)
    assert (pool.procs_on((host,)), pool.procs_on((host,), 3), pool.procs_on((host,), 4)) == ((1,), (2,), ())
    runtime.close()
    assert pool.procs_on((host,), 3) == (2,)
