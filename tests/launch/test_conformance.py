"""Conformance tests that every launcher passes, with real agents and a real controller.

An engine takes part with a module ``tests/launch/bench_ENGINE.py``, named as in ``--on``. It has a context manager
``bench(directory)``, which starts the engine with at least three hosts (or calls ``pytest.skip`` with what is missing),
yields a `Bench`, and stops the engine. All tests here share one entry of it, so it must have opened everything that it needs
when it yields; nothing else uses ``directory``. Agents must inherit the environment of the tests, so that leftover processes
are found.

Separate files test what is specific to one engine: its errors, options and texts.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator

import pytest

from monarch_kernel.actor.host_mesh import HostMesh, serve_ranks
from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.errors import LaunchError, SupervisionError
from monarch_kernel.launch.base import Launcher
from monarch_kernel.launch.registry import ENGINES
from monarch_kernel.runtime.controller.session import Session
from tests.launch.bench import Bench
from tests.support.processes import wait_gone
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until

SOON_S = 15.0
"""Upper limit for ending hosts of an engine that does not stall."""

pytestmark = pytest.mark.timeout(300)  # an engine starts in its first test, which may take minutes on a busy machine


BENCHES = [
    name if name == "local" else pytest.param(name, marks=pytest.mark.slow)
    for name in ENGINES
    if importlib.util.find_spec(f"tests.launch.bench_{name}")
]


@pytest.fixture(scope="module", params=BENCHES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    module = importlib.import_module(f"tests.launch.bench_{request.param}")
    with module.bench(tmp_path_factory.mktemp(request.param)) as bench:
        yield bench


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session()
    serve_ranks(session)
    yield session
    session.close()


@pytest.fixture(autouse=True)
def nothing_left_in_the_engine(engine: Bench, session: Session) -> Iterator[None]:
    """Check that a test, even if it fails, leaves nothing in the engine after its session."""
    with engine.running():
        yield
        session.close()
        wait_all_back(engine)


class Hosts:
    """Hosts of one launcher, in a session."""

    def __init__(self, session: Session, launcher: Launcher, count: int, timeout_s: float = 60.0) -> None:
        self.session = session
        self.launcher = launcher
        self.numbers = session.add_hosts(launcher, count, timeout_s=timeout_s, is_light=True)
        self.mesh = HostMesh(session.runtime, Region.whole(Extent({"hosts": count})), self.numbers)

    def ranks(self, name: str = "t", n: int = 1) -> ProcMesh:
        return self.mesh.spawn_procs({"gpus": n}, name=name, device="cpu")

    def states(self) -> list[str]:
        return [host.state for host in self.mesh.view().hosts]


def agent_of(ranks: ProcMesh, host: int) -> int:
    """Return the pid of the agent of a host's ranks."""
    return int(ranks.slice(hosts=host, gpus=0).run("import os; os.getppid()").get(LONG_S).item())


def wait_all_back(engine: Bench) -> None:
    """Wait until the launcher has no objects in the engine."""
    try:
        wait_until(lambda: not engine.left(), "the engine to get everything back")
    except AssertionError as error:
        raise AssertionError(f"left in the engine: {engine.left()}") from error


class TestLauncher:
    def test_hosts_come_up_work_and_are_given_back_one_by_one(self, engine: Bench, session: Session, bar: Bar) -> None:
        launcher = engine.make(3)
        hosts = Hosts(session, launcher, 2)
        ranks = hosts.ranks()  # returns at once: messages wait for the ranks
        ranks["x"] = ranks.per_rank([10, 20])
        assert list(ranks.run("x + rank").get(engine.up_s).values()) == [10, 21]
        assert hosts.states() == ["up", "up"]
        assert launcher.progress() == ""
        more = Hosts(session, launcher, 1)  # while other hosts are up
        assert more.mesh.initialized.get(engine.up_s)
        with bar.below(SOON_S, "the end of three hosts"):
            hosts.mesh.slice(hosts=0).shutdown().get()
            assert hosts.states() == ["released", "up"]
            assert ranks.slice(hosts=1).run("x").get(LONG_S).item(gpus=0) == 20
            hosts.mesh.shutdown().get()
            assert more.states() == ["up"]
            more.mesh.shutdown().get()
        wait_all_back(engine)

    def test_progress_says_what_hosts_wait_for(self, engine: Bench, session: Session) -> None:
        with engine.stalled():
            launcher = engine.make(2)
            hosts = Hosts(session, launcher, 2)
            wait_until(lambda: re.search(engine.waits_for, hosts.mesh.view().waits_for), engine.waits_for)
            assert "\n" not in launcher.progress()
            assert hosts.states() == ["starting", "starting"]
        assert hosts.mesh.initialized.get(engine.up_s)
        assert hosts.mesh.view().waits_for == ""

    def test_hosts_that_do_not_come_up_in_time_are_given_back(self, engine: Bench, session: Session) -> None:
        with engine.stalled():
            hosts = Hosts(session, engine.make(2), 2, timeout_s=1.0)
            with pytest.raises(LaunchError, match="2 of 2 hosts are gone"):
                hosts.mesh.initialized.get(LONG_S)
            hosts.mesh.shutdown().get(LONG_S)  # while the engine still stalls
        wait_all_back(engine)

    def test_hosts_that_are_shut_down_while_pending_do_not_come_up(self, engine: Bench, session: Session) -> None:
        with engine.stalled():
            launcher = engine.make(2)
            hosts = Hosts(session, launcher, 2)
            ranks = hosts.ranks()
            hosts.mesh.shutdown().get(LONG_S)  # while the engine still stalls
            assert hosts.states() == ["released", "released"]
            with pytest.raises(SupervisionError, match="its host was given back"):
                ranks.initialized.get(LONG_S)
        wait_all_back(engine)
        launcher.close(1.0)  # a second time

    def test_a_dead_host_is_lost_alone_and_replaced(self, engine: Bench, session: Session, bar: Bar) -> None:
        hosts = Hosts(session, engine.make(2), 2)
        ranks = hosts.ranks(n=2)
        ranks["x"] = 7
        former = agent_of(ranks, 1)
        with bar.below(engine.lost_s, "the news of the death"):
            engine.kill(former)
            wait_until(lambda: len(ranks.deaths()) == 2, "its two ranks to be lost")
        assert sorted(ranks.deaths()) == [2, 3]
        assert hosts.states() == ["up", "lost"]
        assert hosts.mesh.view().hosts[1].why
        assert list(ranks.slice(hosts=0).run("x").get(LONG_S).values()) == [7, 7]
        assert ranks.heal().get(engine.up_s) == (2, 3)
        assert hosts.states() == ["up", "up"]
        assert agent_of(ranks, 1) != former
        assert list(ranks.run("globals().get('x')").get(LONG_S).values()) == [7, 7, None, None]

    def test_closing_a_launcher_gives_back_all_hosts(self, engine: Bench, session: Session, bar: Bar) -> None:
        launcher = engine.make(2)
        hosts = Hosts(session, launcher, 2)
        ranks = hosts.ranks()
        pids = [agent_of(ranks, 0), agent_of(ranks, 1)]
        with bar.below(SOON_S, "the end of the launcher"):
            launcher.close(1.0)
        wait_all_back(engine)
        wait_until(lambda: hosts.states() == ["lost", "lost"], "both hosts to be lost")
        wait_gone(*pids)

    def test_an_agent_that_cannot_start_is_reported_with_its_log(self, engine: Bench, session: Session) -> None:
        python = "/no/such/python"
        try:
            hosts = Hosts(session, engine.make(1, python), 1)
            with pytest.raises(LaunchError) as caught:
                hosts.mesh.initialized.get(engine.up_s)
        except LaunchError as error:  # raised at once, if the launcher knows at once
            assert python in str(error)
        else:
            assert python in str(caught.value)
