"""Hosts are given back at the same time, and their replacements do not wait for that."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from monarch_kernel.net.wire.config import AgentConfig
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.testing import FakeHost, FakeLauncher, MemoryHub

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
