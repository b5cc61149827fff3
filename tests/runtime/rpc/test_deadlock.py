"""Probes find every cycle of waits and nothing else, for any order of messages; against a model that sees everything."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.net.wire.messages import Probe
from monarch_kernel.runtime.rpc.deadlock import Cycle, Deadlocks, PassOn, Standing, describe_circle

CLIENT = -1
"""Asks, and is never asked."""


@dataclass
class Turn:
    """An endpoint that an actor runs: ``request`` is the request it will answer, ``waits`` maps waits to their requests."""

    request: int
    waits: dict[int, int] = field(default_factory=dict)


@dataclass
class ModelActor:
    proc: int
    turn: Turn | None = None
    queue: list[int] = field(default_factory=list)


class World:
    """Processes with actors, one message at a time, and links that keep order."""

    def __init__(self, procs: Sequence[int]) -> None:
        self.actors = [ModelActor(proc) for proc in procs]
        self.links: dict[tuple[int, int], deque[tuple[str, object]]] = {}
        self.open_requests: dict[
            int, dict[int, None]
        ] = {}  # request -> actors that have not answered, as its maker knows
        self.maker: dict[int, int] = {}  # request -> process
        self.numbers = count(1)
        self.sides = {proc: Deadlocks(self.owing) for proc in sorted(set(procs))}
        self.told: set[int] = set()
        self.false_alarms: list[Cycle] = []

    def owing(self, request: int) -> list[int]:
        return sorted({self.actors[actor].proc for actor in self.open_requests.get(request, ())})

    # -- events

    def post(self, source: int, request: int, targets: Sequence[int]) -> None:
        self.maker[request] = source
        self.open_requests[request] = dict.fromkeys(targets)
        for target in targets:
            self.send(source, self.actors[target].proc, ("call", (request, target)))

    def call(self, index: int, targets: Sequence[Sequence[int]]) -> None:
        """An actor makes requests and waits for all of them."""
        actor = self.actors[index]
        assert actor.turn is not None
        for each in targets:
            request, wait = next(self.numbers), next(self.numbers)
            actor.turn.waits[wait] = request
            self.post(actor.proc, request, each)

    def finish(self, index: int) -> None:
        actor = self.actors[index]
        assert actor.turn is not None
        self.send(actor.proc, self.maker[actor.turn.request], ("answer", (actor.turn.request, index)))
        actor.turn = Turn(actor.queue.pop(0)) if actor.queue else None

    def probe(self, index: int) -> None:
        actor = self.actors[index]
        assert actor.turn is not None
        for wait, request in actor.turn.waits.items():
            self.perform(actor.proc, self.sides[actor.proc].probe(wait, request, f"actor {index}"))

    def deliver(self, link: tuple[int, int]) -> None:
        kind, message = self.links[link].popleft()
        if not self.links[link]:
            del self.links[link]
        if kind == "call":
            request, target = message  # type: ignore[misc]
            actor = self.actors[target]
            if actor.turn is None:
                actor.turn = Turn(request)
            else:
                actor.queue.append(request)
        elif kind == "answer":
            request, by = message  # type: ignore[misc]
            self.open_requests[request].pop(by)
            if not self.open_requests[request]:
                self.resolve(request)
        else:
            assert isinstance(message, Probe)
            proc = link[1]
            for standing in self.standings(proc, message.request):
                self.perform(proc, self.sides[proc].handle(message, standing))

    # -- effects

    def send(self, source: int, target: int, item: tuple[str, object]) -> None:
        if target != CLIENT:
            self.links.setdefault((source, target), deque()).append(item)

    def resolve(self, request: int) -> None:
        for actor in self.actors:
            if actor.turn is not None:
                for wait in [wait for wait, wanted in actor.turn.waits.items() if wanted == request]:
                    del actor.turn.waits[wait]
                    self.sides[actor.proc].ended(wait)

    def standings(self, proc: int, request: int) -> list[Standing]:
        found = []
        for index, actor in enumerate(self.actors):
            if actor.proc == proc and actor.turn is not None:
                waits = tuple(actor.turn.waits)
                if actor.turn.request == request:
                    found.append(Standing(f"actor {index}", "", waits))
                elif request in actor.queue:
                    found.append(Standing(f"actor {index}", f"actor {index}", waits))
        return found

    def perform(self, proc: int, effects: Sequence[PassOn | Cycle]) -> None:
        for effect in effects:
            if isinstance(effect, Cycle):
                self.told.add(effect.wait)
                if effect.wait not in self.on_circles():
                    self.false_alarms.append(effect)
            else:
                for target in effect.procs:
                    self.send(proc, target, ("probe", effect.probe))

    # -- the truth, which also counts messages on their way

    def on_circles(self) -> set[int]:
        """The waits of which some answer depends on the actor that waits."""
        holder = {wait: index for index, actor in enumerate(self.actors) if actor.turn for wait in actor.turn.waits}
        found = set()
        for wait, index in holder.items():
            actor = self.actors[index]
            assert actor.turn is not None
            seen: set[int] = set()
            pending = self.standing_at(actor.turn.waits[wait])
            while pending:
                at = pending.pop()
                if at in seen:
                    continue
                seen.add(at)
                turn = self.actors[at].turn
                for request in turn.waits.values() if turn else ():
                    pending += self.standing_at(request)
            if index in seen:
                found.add(wait)
        return found

    def standing_at(self, request: int) -> list[int]:
        """Actors that run a request or have it in their queue."""
        return [
            index
            for index, actor in enumerate(self.actors)
            if actor.turn is not None and (actor.turn.request == request or request in actor.queue)
        ]

    def actions(self) -> list[tuple[str, object]]:
        found: list[tuple[str, object]] = [("post", index) for index in range(len(self.actors))]
        for index, actor in enumerate(self.actors):
            if actor.turn is not None:
                kinds = ("probe",) if actor.turn.waits else ("call", "call", "finish")
                found += [(kind, index) for kind in kinds]
        found += [("deliver", link) for link in self.links] * 2
        return found

    def step(self, choice: int) -> None:
        actions = self.actions()
        choice, index = divmod(choice, len(actions))
        kind, what = actions[index]
        if kind == "deliver":
            self.deliver(what)  # type: ignore[arg-type]
        elif kind == "post":
            self.post(CLIENT, next(self.numbers), [what])  # type: ignore[list-item]
        elif kind == "call":
            size = len(self.actors)
            targets = [[choice % size], [choice // size % size], sorted({choice % size, choice // size % size})]
            shapes = (targets[:1], targets[:1], targets[:1], targets[2:], targets[:2])
            self.call(what, shapes[choice // size**2 % len(shapes)])  # type: ignore[arg-type]
        elif kind == "probe":
            self.probe(what)  # type: ignore[arg-type]
        else:
            self.finish(what)  # type: ignore[arg-type]

    def drain(self) -> None:
        while self.links:
            self.deliver(next(iter(self.links)))


@given(
    procs=st.lists(st.integers(0, 3), min_size=1, max_size=6), choices=st.lists(st.integers(0, 1 << 20), max_size=150)
)
def test_all_cycles_are_found_and_nothing_else(procs: list[int], choices: list[int]) -> None:
    world = World(procs)
    for choice in choices:
        world.step(choice)
    world.drain()
    for index, actor in enumerate(world.actors):
        if actor.turn is not None and actor.turn.waits:
            world.probe(index)
    world.drain()
    assert not world.false_alarms
    assert world.on_circles() <= world.told
    waiting = sum(len(actor.turn.waits) for actor in world.actors if actor.turn)
    assert sum(len(side) for side in world.sides.values()) <= waiting  # waits that are over are forgotten


def ring(size: int) -> World:
    """Actors on different processes, each of which waits for the next."""
    world = World(range(size))
    for index in range(size):
        world.post(CLIENT, next(world.numbers), [index])
    world.drain()
    for index in range(size):
        world.call(index, [[(index + 1) % size]])
    world.drain()
    return world


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_a_probe_around_a_ring_ends_only_the_wait_of_its_sender(size: int) -> None:
    world = ring(size)
    for index in range(1, size):  # the others wait, and sent their last probe long ago
        turn = world.actors[index].turn
        assert turn is not None
        for wait, request in turn.waits.items():
            world.sides[index].probe(wait, request, f"actor {index}")
    world.probe(0)
    world.drain()
    turn = world.actors[0].turn
    assert turn is not None
    assert world.told == set(turn.waits)


def test_a_probe_that_runs_into_a_cycle_ends() -> None:
    world = World(range(4))
    for index in range(4):
        world.post(CLIENT, next(world.numbers), [index])
    world.drain()
    for index, target in ((0, 1), (1, 2), (2, 3), (3, 1)):
        world.call(index, [[target]])
    world.drain()
    for index in (1, 2, 3, 0):
        world.probe(index)
    world.drain()
    assert len(world.told) == 3
    turn = world.actors[0].turn
    assert turn is not None
    assert not world.told & set(turn.waits)  # it waits for a cycle, but is on none


def test_the_path_names_the_endpoints_on_the_cycle() -> None:
    side = Deadlocks(lambda request: [2] if request == 7 else [1])
    passed = side.probe(100, 7, "a.f on rank 0")
    assert passed == [PassOn([2], Probe(100, 1, 7, (("a.f on rank 0", ""),)))]
    others = Deadlocks(lambda request: [1])
    others.probe(200, 8, "b.g on rank 1")
    (onward,) = others.handle(passed[0].probe, Standing("b.g on rank 1", "", [200]))
    assert isinstance(onward, PassOn)
    assert (onward.procs, onward.probe.request) == ([1], 8)
    (circle,) = side.handle(onward.probe, Standing("a.h on rank 0", "a.f", [100]))
    assert isinstance(circle, Cycle)
    assert circle.wait == 100
    assert describe_circle(circle.path) == "a.f on rank 0 -> b.g on rank 1 -> a.h on rank 0 (behind a.f)"


def test_a_wait_passes_a_probe_on_once_in_each_round() -> None:
    side, others = Deadlocks(lambda request: [2]), Deadlocks(lambda request: [3])
    others.probe(200, 8, "b.g")
    standing = Standing("b.g", "", [200])
    (first,) = side.probe(100, 7, "a.f")
    (again,) = side.probe(100, 7, "a.f")
    assert [len(others.handle(each.probe, standing)) for each in (first, first, again, again, first)] == [1, 0, 1, 0, 0]


def test_a_long_cycle_is_described_in_a_few_steps() -> None:
    text = describe_circle([(f"actor {index}", "") for index in range(1000)])
    assert text.startswith("actor 0 -> actor 1 -> ")
    assert text.endswith(" -> actor 998 -> actor 999")
    assert "(984 more)" in text


def test_a_wait_that_is_over_gets_no_error() -> None:
    side = Deadlocks(lambda request: [1])
    (sent,) = side.probe(100, 7, "a.f")
    assert side.handle(sent.probe, None) == []
    side.ended(100)
    assert side.handle(sent.probe, Standing("a.h", "a.f", [100])) == []
    assert len(side) == 0
