"""Trees of actors in several processes, any failures, any order: each reaches an owner that handles it, or the program."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from monarch_kernel.errors import Failure, MeshFailure
from monarch_kernel.runtime.rpc.ownership import (
    PROGRAM,
    Effect,
    NotifyOwner,
    OwnershipTree,
    Process,
    Stop,
    StopOrphan,
    TellOwner,
    Watch,
)

N_PROCS = 4
HERE = Process(0)


def lost(why: str = "killed by SIGKILL") -> Failure:
    return Failure("lost", "RankDied", why)


def raised(why: str) -> Failure:
    return Failure("exception", "ValueError", why)


# -- one family


def test_failures_at_the_same_time_are_handled_once() -> None:
    family = OwnershipTree()
    family.spawned(7, "workers", PROGRAM, [1, 2, 3])
    assert family.process_gone(Process(2), lost()) == [NotifyOwner(PROGRAM)]
    assert family.child_ended(7, Process(3), raised("no")) == []
    failure = family.take(PROGRAM)
    assert failure == MeshFailure("workers", {1: lost(), 2: raised("no")}, {}, 7)
    assert family.take(PROGRAM) is None


def test_the_death_of_a_process_is_one_failure_for_each_mesh_in_it() -> None:
    family = OwnershipTree()
    family.spawned(7, "workers", PROGRAM, [1, 2])
    family.spawned(8, "judges", PROGRAM, [2])
    family.process_gone(Process(2), lost())
    assert [family.take(PROGRAM), family.take(PROGRAM), family.take(PROGRAM)] == [
        MeshFailure("workers", {1: lost()}, {}, 7),
        MeshFailure("judges", {0: lost()}, {}, 8),
        None,
    ]


def test_an_actor_that_ends_with_its_process_fails_once() -> None:
    family = OwnershipTree()
    family.spawned(7, "workers", PROGRAM, [1])
    assert family.child_ended(7, Process(1), raised("on the way out")) == [NotifyOwner(PROGRAM)]
    assert family.process_gone(Process(1), lost()) == []
    assert family.take(PROGRAM) == MeshFailure("workers", {0: raised("on the way out")}, {}, 7)
    assert family.child_ended(7, Process(1), raised("late")) == []


def test_a_stopped_mesh_does_not_fail() -> None:
    family = OwnershipTree()
    family.spawned(7, "workers", PROGRAM, [1, 2])
    family.stopped(7, [1])
    assert family.process_gone(Process(1), lost()) == []
    assert family.process_gone(Process(2), Failure("stopped", "Stopped", "%mesh down")) == []
    family.stopped(7)
    assert not family.children


def test_an_actor_that_ends_stops_its_children_and_notifies_its_owner() -> None:
    family = OwnershipTree()
    owner = Process(3, 1)
    assert family.hosts(5, owner) == [Watch(owner)]
    family.spawned(7, "workers", 5, [1, 2])
    cause = MeshFailure("workers", {1: lost()}, {}, 7)
    assert family.ended(5, raised("as well"), cause) == [
        Stop(7, (1, 2), "its owner has failed"),
        TellOwner(owner, 5, raised("as well"), cause),
    ]
    assert family.ended(5, raised("again")) == []
    assert not family.children


def test_an_actor_ends_silently_with_the_process_of_its_owner() -> None:
    family = OwnershipTree()
    family.hosts(5, Process(3, 1))
    family.spawned(7, "workers", 5, [1])
    assert family.process_gone(Process(3, 0), lost()) == []
    assert family.process_gone(Process(3, 1), lost()) == [
        StopOrphan(5, "the process of its owner is gone: killed by SIGKILL")
    ]
    assert family.process_up(Process(3, 2)) == []  # it gets the message once
    assert family.ended(5) == [Stop(7, (1,), "its owner ended")]


def test_a_rank_that_was_replaced_fails_again() -> None:
    family = OwnershipTree()
    family.process_up(Process(1))
    family.spawned(7, "workers", PROGRAM, [1])
    family.process_gone(Process(1), lost("first"))
    family.process_up(Process(1, 1))
    family.respawned(7, 1)
    assert family.child_ended(7, Process(1, 0), raised("of the old one")) == []
    family.take(PROGRAM)
    assert family.process_gone(Process(1, 1), lost("second")) == [NotifyOwner(PROGRAM)]
    assert family.take(PROGRAM) == MeshFailure("workers", {0: lost("second")}, {}, 7)


def test_a_mesh_that_is_not_made_fails_as_a_whole() -> None:
    family = OwnershipTree()
    family.spawned(7, "workers", PROGRAM, [1, 2])
    assert family.refused(7, {2: lost()}) == [NotifyOwner(PROGRAM)]
    failure = family.take(PROGRAM)
    assert failure is not None
    assert [report.etype for _, report in sorted(failure.reports.items())] == ["NotSent", "RankDied"]
    assert failure.primary == lost()


def test_children_spawned_by_an_ending_actor_are_stopped() -> None:
    family = OwnershipTree()
    family.hosts(5, Process(3))
    family.ended(5)
    assert family.spawned(7, "workers", 5, [1, 2]) == [Stop(7, (1, 2), "its owner ended")]
    assert not family.children


def test_a_rank_that_fails_twice_before_its_owner_looks_is_reported_twice() -> None:
    family = OwnershipTree()
    family.process_up(Process(1))
    family.spawned(7, "workers", PROGRAM, [1])
    for incarnation in (0, 1):
        family.process_up(Process(1, incarnation))
        family.respawned(7, 1)
        family.process_gone(Process(1, incarnation), lost(f"death {incarnation}"))
    assert [family.take(PROGRAM) for _ in range(3)] == [
        MeshFailure("workers", {0: lost("death 0")}, {}, 7),
        MeshFailure("workers", {0: lost("death 1")}, {}, 7),
        None,
    ]


def test_a_spawn_for_a_new_process_survives_the_end_of_the_former_one() -> None:
    family = OwnershipTree()
    family.spawned(7, "workers", PROGRAM, [1])
    assert family.process_up(Process(1, 2)) == []
    assert family.process_gone(Process(1, 1), lost()) == []
    assert family.process_gone(Process(1, 2), lost()) == [NotifyOwner(PROGRAM)]


# -- many


class Instance(NamedTuple):
    """An actor in one process."""

    actor: int
    process: Process


class Mesh(NamedTuple):
    """A mesh of actors as it was spawned."""

    actor: int
    owner: Instance
    procs: tuple[int, ...]


class Node:
    """A process: its family, the actors that live there, and the state of the transport."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.family = OwnershipTree()
        self.actors: set[int] = set()
        self.meshes: dict[int, Mesh] = {}  # spawned here and not over; a heal would send them again
        self.up = {process.proc: process.incarnation}
        self.dead: dict[int, int] = {}
        self.met = {process.proc}
        self.held: dict[int, list[tuple[object, ...]]] = {}
        self.wants_to_look: set[int] = set()
        self.family.process_up(process)


class Trees(RuleBasedStateMachine):
    """Processes; their messages and the news of their ends arrive in order within a link, and in any order between links."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = {proc: Node(Process(proc)) for proc in range(N_PROCS)}
        self.alive = set(self.nodes)
        self.links: dict[tuple[object, Process], deque[tuple[object, ...]]] = {}
        self.meshes: dict[int, Mesh] = {}
        self.failed: dict[Instance, str] = {}  # instances that have failed, and why
        self.too_late: set[Instance] = set()  # instances that failed after their owner had stopped them
        self.stopped: set[tuple[int, int]] = set()  # (actor, proc) that were requested to end
        self.deaths: list[Process] = []
        self.taken: dict[Instance, int] = {}
        self.at_root: list[MeshFailure] = []
        self.n = 0

    # -- the layer above, as simple as possible

    def send(self, node: Node, proc: int, *message: object) -> None:
        if proc not in node.met:
            self.meet(node, proc)
        if proc in node.up:
            self.link(node.process, Process(proc, node.up[proc])).append((node.process, *message))
        elif proc not in node.dead:
            node.held.setdefault(proc, []).append((node.process, *message))

    def link(self, sender: object, receiver: Process) -> deque[tuple[object, ...]]:
        return self.links.setdefault((sender, receiver), deque())

    def meet(self, node: Node, proc: int) -> None:
        """The controller sends news of a process, and from now on of its end and its successors."""
        node.met.add(proc)
        self.link("news", node.process).append(self.news_of(proc))

    def news_of(self, proc: int) -> tuple[object, ...]:
        return ("up" if proc in self.alive else "gone", self.nodes[proc].process)

    def tell_all(self, proc: int) -> None:
        for node in self.nodes.values():
            if node.process.proc in self.alive and proc in node.met and node.process.proc != proc:
                self.link("news", node.process).append(self.news_of(proc))

    def perform(self, node: Node, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, NotifyOwner):
                node.wants_to_look.add(effect.owner)
            elif isinstance(effect, Stop):
                for proc in effect.procs:
                    self.stopped.add((effect.actor, proc))
                    self.send(node, proc, "stop", effect.actor)
                node.meshes.pop(effect.actor, None)
            elif isinstance(effect, TellOwner):
                process = effect.process
                if node.up.get(process.proc, process.incarnation) == process.incarnation:
                    self.send(node, process.proc, "ended", effect.actor, effect.failure, effect.cause)
            elif isinstance(effect, StopOrphan):
                self.end(node, effect.actor)
            elif isinstance(effect, Watch):
                if effect.process.proc not in node.met:
                    self.meet(node, effect.process.proc)
                elif (
                    effect.process.proc in node.dead or node.up.get(effect.process.proc, 0) > effect.process.incarnation
                ):
                    self.perform(node, node.family.process_gone(effect.process, lost("known")))

    def end(self, node: Node, actor: int, failure: Failure | None = None, cause: MeshFailure | None = None) -> None:
        if actor not in node.actors:
            return
        node.actors.remove(actor)
        node.wants_to_look.discard(actor)
        instance = Instance(actor, node.process)
        if failure is not None:
            self.failed[instance] = failure.message
            if (actor, node.process.proc) in self.stopped:
                self.too_late.add(instance)
        self.perform(node, node.family.ended(actor, failure, cause))

    def receive(self, node: Node, message: tuple[object, ...]) -> None:
        family = node.family
        if message[0] == "gone":
            process = message[1]
            assert isinstance(process, Process)
            node.up.pop(process.proc, None)
            node.held.pop(process.proc, None)
            node.dead[process.proc] = process.incarnation
            self.perform(node, family.process_gone(process, lost(f"death of {process}")))
        elif message[0] == "up":
            process = message[1]
            assert isinstance(process, Process)
            proc = process.proc
            was_known = proc in node.up or proc in node.dead
            node.dead.pop(proc, None)
            node.up[proc] = process.incarnation
            self.perform(node, family.process_up(process))
            if was_known:
                for mesh in list(node.meshes.values()):
                    if proc in mesh.procs and (mesh.actor, proc) not in self.stopped:
                        self.send(node, proc, "spawn", mesh.actor)
                        self.perform(node, family.respawned(mesh.actor, proc))
            for held in node.held.pop(proc, []):
                self.link(node.process, process).append(held)
        else:
            sender, what, actor, *rest = message
            assert isinstance(sender, Process)
            assert isinstance(actor, int)
            if what == "spawn":
                node.actors.add(actor)
                self.perform(node, family.hosts(actor, sender))
            elif what == "stop":
                self.end(node, actor)
            elif what == "ended":
                failure, cause = rest
                assert failure is None or isinstance(failure, Failure)
                assert cause is None or isinstance(cause, MeshFailure)
                self.perform(node, family.child_ended(actor, sender, failure, cause))

    def look(self, node: Node, owner: int, handles: bool) -> None:
        node.wants_to_look.discard(owner)
        while (failure := node.family.take(owner)) is not None:
            mesh = self.meshes[failure.actor]
            assert mesh.owner == Instance(owner, node.process)
            for rank, report in failure.reports.items():
                instance = self.instance_that_failed(mesh.actor, mesh.procs[rank], report)
                assert instance not in self.too_late
                self.taken[instance] = self.taken.get(instance, 0) + 1
                if rank in failure.causes:  # the failure that this instance did not handle
                    assert f"unhandled {failure.causes[rank].actor}" in report.message
            if owner == PROGRAM:
                self.at_root.append(failure)
            elif not handles:
                self.end(node, owner, raised(f"{self.number()}: unhandled {failure.actor}"), failure)
                return

    def instance_that_failed(self, actor: int, proc: int, report: Failure) -> Instance:
        """The instance that a report is about: each actor's report has another text, and that of a death names the process."""
        if report.kind == "lost":
            process = next(process for process in self.deaths if report.message == f"death of {process}")
            assert process.proc == proc
            return Instance(actor, process)
        return next(
            instance for instance, why in self.failed.items() if why == report.message and instance.actor == actor
        )

    def number(self) -> int:
        self.n += 1
        return self.n

    def living(self) -> list[Instance]:
        """All actors, and the program, which counts as one."""
        found = [Instance(PROGRAM, HERE)]
        for proc in sorted(self.alive):
            found += [Instance(actor, self.nodes[proc].process) for actor in sorted(self.nodes[proc].actors)]
        return found

    # -- events

    @rule(owner=st.integers(0), procs=st.sets(st.integers(0, N_PROCS - 1), min_size=1))
    def spawn(self, owner: int, procs: set[int]) -> None:
        living = self.living()
        parent = living[owner % len(living)]
        node = self.nodes[parent.process.proc]
        places = tuple(sorted(procs - set(node.dead)))  # processes that are known to be dead are refused
        if not places:
            return
        actor = self.number()
        mesh = self.meshes[actor] = node.meshes[actor] = Mesh(actor, parent, places)
        self.perform(node, node.family.spawned(actor, f"m{actor}", parent.actor, places))
        for proc in mesh.procs:
            self.send(node, proc, "spawn", actor)

    @precondition(lambda self: len(self.living()) > 1)
    @rule(which=st.integers(0))
    def fail(self, which: int) -> None:
        """An actor raises, and no caller waits for it."""
        actors = self.living()[1:]
        actor, process = actors[which % len(actors)]
        self.end(self.nodes[process.proc], actor, raised(f"{self.number()}: no"))

    @precondition(lambda self: len(self.alive) > 1)
    @rule(which=st.integers(0))
    def kill(self, which: int) -> None:
        """A process dies."""
        proc = sorted(self.alive - {0})[which % (len(self.alive) - 1)]
        node = self.nodes[proc]
        self.alive.remove(proc)
        self.deaths.append(node.process)
        for actor in node.actors:
            instance = Instance(actor, node.process)
            self.failed[instance] = f"death of {node.process}"
            if (actor, proc) in self.stopped:
                self.too_late.add(instance)
        for link in [link for link in self.links if link[1] == node.process]:
            del self.links[link]
        self.tell_all(proc)

    @precondition(lambda self: len(self.alive) < N_PROCS)
    @rule(which=st.integers(0))
    def heal(self, which: int) -> None:
        """A process replaces one that died."""
        dead = sorted(set(self.nodes) - self.alive)
        proc = dead[which % len(dead)]
        self.nodes[proc] = Node(Process(proc, self.nodes[proc].process.incarnation + 1))
        self.alive.add(proc)
        self.tell_all(proc)

    @rule(which=st.integers(0))
    def stop(self, which: int) -> None:
        """An owner stops a mesh that it has spawned."""
        living = self.living()
        meshes = [mesh for node in self.nodes.values() for mesh in node.meshes.values() if mesh.owner in living]
        if not meshes:
            return
        mesh = meshes[which % len(meshes)]
        node = self.nodes[mesh.owner.process.proc]
        self.perform(node, node.family.stopped(mesh.actor))
        self.perform(node, [Stop(mesh.actor, mesh.procs, "stopped")])

    @precondition(lambda self: len(self.living()) > 1)
    @rule(which=st.integers(0))
    def somebody_else_stops(self, which: int) -> None:
        actors = self.living()[1:]
        actor, process = actors[which % len(actors)]
        self.stopped.add((actor, process.proc))
        self.end(self.nodes[process.proc], actor)

    @rule(which=st.integers(0), handles=st.booleans())
    def attend(self, which: int, handles: bool) -> None:
        """An owner has time to look at a failure."""
        waiting = [(node, owner) for node in self.living_nodes() for owner in sorted(node.wants_to_look)]
        if waiting:
            node, owner = waiting[which % len(waiting)]
            self.look(node, owner, handles)

    @rule(which=st.integers(0), times=st.integers(1, 6))
    def deliver(self, which: int, times: int) -> None:
        """Messages, or news of other processes, arrive."""
        for _ in range(times):
            links = [link for link, queue in self.links.items() if queue]
            if not links:
                return
            link = links[which % len(links)]
            message = self.links[link].popleft()
            node = self.nodes[link[1].proc]
            if node.process == link[1] and node.process.proc in self.alive:
                self.receive(node, message)

    def living_nodes(self) -> list[Node]:
        return [self.nodes[proc] for proc in sorted(self.alive)]

    # -- invariants at the end

    def teardown(self) -> None:
        for _ in range(10_000):
            self.deliver(0, 1)
            self.attend(0, False)
            if not any(self.links.values()) and not any(node.wants_to_look for node in self.living_nodes()):
                break
        else:
            raise AssertionError("messages never stop")
        living = set(self.living())
        for instance in living - {Instance(PROGRAM, HERE)}:
            mesh = self.meshes[instance.actor]
            assert mesh.owner in living, f"{instance} has outlived its owner"
            assert (mesh.actor, instance.process.proc) not in self.stopped
        for instance in self.failed:
            mesh = self.meshes[instance.actor]
            times = self.taken.get(instance, 0)
            assert times <= 1
            expected = mesh.owner in living and (instance.actor, instance.process.proc) not in self.stopped
            assert times == 1 or not expected, f"no owner got the failure of {instance}"
        for node in self.living_nodes():
            assert set(node.family.hosted) == node.actors
            for actor in node.family.children:
                assert self.meshes[actor].owner in living
            assert not any(node.family.has_news(owner) for owner in (PROGRAM, *self.meshes))


TestTrees = Trees.TestCase
TestTrees.settings = settings(stateful_step_count=50)
