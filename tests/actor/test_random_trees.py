"""Random trees of actors with random failures: each failure reaches exactly one owner that handles it, or the root.

The ranks are real `Rank` objects, with their actors, threads and drivers, in one process. Only the network is simulated, so
the test can cut a rank off at any moment, and a hundred trees take seconds. No call may hang.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import monarch_kernel.actor
from monarch_kernel.actor import Actor, MeshFailure, ProcMesh, context, endpoint
from monarch_kernel.actor.hosting import actor_host as instance_module
from monarch_kernel.actor.hosting.enable_hosting import host_actors
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.errors import ActorError, Failure, MonarchError, SupervisionError
from monarch_kernel.net.transport.base import rank_peer
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import ProcessStatus
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.worker.rank import Rank
from monarch_kernel.runtime.worker.stdio import OutputMarks
from monarch_kernel.testing import FakeAgent, FakeLauncher, MemoryHub, add_host, rank_spec
from tests.support.waiting import LONG_S, wait_until

TOKEN = "token"
N_RANKS = 4
PROGRAM = ("", 0)


class NoMarks(OutputMarks):
    """Stand-in for output marks: the ranks share the streams of the tests, which need no marks."""

    def __init__(self) -> None:
        super().__init__((-1, -1), "")

    def set(self, **_: object) -> tuple[int, int]:
        return 0, 0


@dataclass
class Trial:
    """Records the events in one tree: which owner got which failure, and which actors have cleaned up."""

    reported: list[tuple[tuple[str, int], str, int]] = field(default_factory=list)
    verdicts: list[tuple[tuple[str, int], str]] = field(default_factory=list)
    born: list[tuple[str, int]] = field(default_factory=list)
    cleaned: list[tuple[str, int]] = field(default_factory=list)


class Node(Actor):
    """Has children, gets their failures, and returns the verdict given to its constructor."""

    trial: ClassVar[Trial]

    def __init__(self, verdict: str) -> None:
        instance = context().actor_instance
        self.me = instance.name, instance.rank.rank
        self.verdict = verdict
        self.reported = 0
        self.trial.born.append(self.me)

    @endpoint
    def spawn(self, procs: Any, name: str, verdict: str) -> Any:
        return procs.spawn(name, type(self), verdict)

    @endpoint
    def ping(self) -> int:
        return self.reported

    @endpoint
    def ask(self, other: Any) -> object:
        """Wait for another node, and get failures meanwhile."""
        try:
            other.ping.call().get()
        except MonarchError as error:
            return error
        return None

    @endpoint
    def fail(self) -> None:
        raise ValueError("no good")

    @endpoint
    def leave(self) -> None:
        raise SystemExit(3)

    def __supervise__(self, failure: MeshFailure) -> bool:
        note(self.trial, self.me, failure)
        self.trial.verdicts.append((self.me, self.verdict))
        if self.verdict == "raises":
            raise RuntimeError("not my problem")
        return self.verdict == "handles"

    def __cleanup__(self, error: BaseException | None) -> None:
        self.trial.cleaned.append(self.me)


class AsyncNode(Node):
    """The same, asynchronous."""

    @endpoint
    async def spawn(self, procs: Any, name: str, verdict: str) -> Any:
        return procs.spawn(name, type(self), verdict)

    @endpoint
    async def ping(self) -> int:
        return self.reported

    @endpoint
    async def ask(self, other: Any) -> object:
        try:
            await other.ping.call()
        except MonarchError as error:
            return error
        return None

    @endpoint
    async def fail(self) -> None:
        raise ValueError("no good")

    @endpoint
    async def leave(self) -> None:
        raise SystemExit(3)


def note(trial: Trial, owner: tuple[str, int], failure: MeshFailure) -> None:
    if failure.mesh is None:  # the program had no actors in this process
        assert failure.mesh_name == "procs"
        return
    assert failure.mesh.name == failure.mesh_name
    for rank, report in failure.reports.items():
        trial.reported.append((owner, failure.mesh_name, rank))
        if report.etype == "UnhandledFailure":
            assert rank in failure.causes
            assert failure.root_cause is not failure


class World:
    """A controller, and ranks that are threads of this process."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.runtime = Runtime(self.hub.connect(), TOKEN)
        host = add_host(self.runtime, FakeLauncher())
        self.agent = FakeAgent(self.hub, host, TOKEN)
        procs = self.runtime.new_procs(N_RANKS)
        specs = [rank_spec(proc, rank=i, world_size=N_RANKS) for i, proc in enumerate(procs)]
        self.runtime.start_ranks(host, specs)
        self.agent.hello()
        extent = Extent({"r": N_RANKS})
        self.mesh = ProcMesh(self.runtime, Region.whole(extent), procs, "procs", extent)
        self.ranks: dict[int, Rank] = {}
        for spec in specs:
            rank = self.ranks[spec.rank] = Rank(
                spec, self.hub.connect(rank_peer(spec.proc)), TOKEN, NoMarks(), "memory"
            )
            host_actors(rank, spec.rank, ProcMesh(rank.peers, Region.whole(extent), procs, "procs", extent))
            rank.driver.start()
            rank.driver.submit(pack(rank.hello))
        self.killed: set[int] = set()

    def kill(self, rank: int) -> None:
        """Kill a process: from now on no message comes from it or reaches it, and its host agent reports its death."""
        if rank not in self.killed:
            self.killed.add(rank)
            proc = self.ranks[rank].spec.proc
            self.hub.cut(rank_peer(proc))
            self.agent.lost(proc, signal=9)
            self.ranks[rank].driver.submit(partial(end_waits, self.ranks[rank], list(self.mesh.procs)))

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.driver.submit(partial(end_actors, rank))
        wait_until(
            lambda: not any(each.name.startswith("monarch-actor-n") for each in threading.enumerate()),
            "the threads of all actors to end",
        )
        for rank in self.ranks.values():
            rank.driver.close()
        self.runtime.close()


def end_waits(rank: Rank, procs: list[int]) -> None:
    """End the waits of a dead process, whose threads live on in this test."""
    for proc in procs:
        rank.peers.handle_status(ProcessStatus(proc, 0, "", Failure("lost", "RankDied", "we are dead ourselves")))


def end_actors(rank: Rank) -> None:
    for actor in list(rank.actors):
        rank.end_actor(actor, "the test is over")


@dataclass
class Mesh:
    """A spawned mesh of nodes."""

    handle: Any
    owner: tuple[str, int]
    places: tuple[int, ...]
    stopped: bool = False


class Tree:
    """The program's view of a tree in a world: the meshes that it has spawned, and the expected results."""

    def __init__(self, world: World, trial: Trial) -> None:
        self.world = world
        self.trial = trial
        self.meshes: dict[str, Mesh] = {}
        self.futures: list[Any] = []
        self._names = (f"n{i}" for i in itertools.count())

    def instances(self) -> list[tuple[str, int]]:
        return [(name, rank) for name, mesh in self.meshes.items() for rank in range(len(mesh.places))]

    def one(self, instance: tuple[str, int]) -> Any:
        return self.meshes[instance[0]].handle.slice(r=instance[1])

    def spawn(self, which: int, first: int, count: int, verdict: str, kind: type[Node]) -> None:
        owners = [PROGRAM, *self.instances()]
        owner = owners[which % len(owners)]
        places = tuple(range(first, min(first + count, N_RANKS)))
        procs, name = self.world.mesh.slice(r=slice(places[0], places[-1] + 1)), next(self._names)
        if owner == PROGRAM:
            handle = procs.spawn(name, kind, verdict)
        else:
            try:
                handle = self.one(owner).spawn.call_one(procs, name, verdict).get(LONG_S)
            except (ActorError, SupervisionError):
                return  # the node has ended
        self.meshes[name] = Mesh(handle, owner, places)

    def do(self, what: str, which: int, other: int) -> None:
        instances = self.instances()
        if not instances:
            return
        instance, another = instances[which % len(instances)], instances[other % len(instances)]
        mesh = self.meshes[instance[0]]
        if what == "fail":
            self.one(instance).fail.broadcast()
        elif what == "fail together":
            mesh.handle.fail.broadcast()
        elif what == "leave":
            self.futures.append(self.one(instance).leave.call_one())
        elif what == "ask":
            self.futures.append(self.one(instance).ask.call_one(self.meshes[another[0]].handle))
        elif what == "kill":
            self.world.kill(mesh.places[instance[1]])
        elif what == "stop":
            mesh.stopped = True
            self.futures.append(mesh.handle.stop())

    def problems(self) -> list[str]:
        """List the violated invariants when no request is in progress."""
        asked = {instance: self.one(instance).ping.call_one() for instance in self.instances()}
        living = {instance for instance, future in asked.items() if future.exception(LONG_S) is None} | {PROGRAM}
        found = []
        for instance in asked:
            mesh = self.meshes[instance[0]]
            times = self.trial.reported.count((mesh.owner, *instance))
            is_killed = mesh.places[instance[1]] in self.world.killed
            if times > 1:
                found.append(f"the failure of {instance} was reported {times} times")
            if mesh.stopped or mesh.owner not in living:
                if instance in living:
                    found.append(f"{instance} lives on, without its owner {mesh.owner} or against its will")
                elif not is_killed and self.trial.cleaned.count(instance) != self.trial.born.count(instance):
                    found.append(f"{instance} was cleaned up {self.trial.cleaned.count(instance)} times")
            elif (instance in living) == (times == 1):
                found.append(f"{instance} {'lives' if instance in living else 'has failed'}, reported {times} times")
        reported = {owner for owner, _, _ in self.trial.reported}
        wrong = [node for node, verdict in self.trial.verdicts if verdict != "handles" and node in living & reported]
        return found + [f"{node} lives on, although it did not handle a failure" for node in wrong]


OPERATIONS = ("fail", "fail together", "leave", "ask", "kill", "stop")
steps = st.one_of(
    st.tuples(
        st.just("spawn"),
        st.integers(0, 30),
        st.integers(0, N_RANKS - 1),
        st.integers(1, 3),
        st.sampled_from(["handles", "handles", "does not", "raises"]),
        st.sampled_from([Node, AsyncNode]),
    ),
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 30), st.integers(0, 30)),
)


@pytest.fixture
def trial_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_module, "CHILDREN_S", 0.5)  # they get no messages from processes that are cut off
    monkeypatch.setattr(
        monarch_kernel.actor, "unhandled_fault_hook", lambda failure: note(Node.trial, PROGRAM, failure)
    )


@settings(
    max_examples=settings.default.max_examples * 5 // 12,  # one example takes a tenth of a second
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(script=st.lists(steps, min_size=4, max_size=25))
def test_every_failure_reaches_one_owner_that_handles_it_or_the_root(trial_hook: None, script: list[Any]) -> None:
    Node.trial = trial = Trial()
    world = World()
    tree = Tree(world, trial)
    try:
        for what, *arguments in script:
            if what == "spawn":
                tree.spawn(*arguments)
            else:
                tree.do(what, *arguments)
        for future in tree.futures:
            future.exception(LONG_S)  # no call hangs
        deadline = time.monotonic() + LONG_S
        while (problems := tree.problems()) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not problems, "\n".join(problems)
    finally:
        world.close()
