"""Tests what the view shows of waits in calls of actors, without processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from monarch_kernel.base.events import MeshView, RankState, RankView, WaitView
from monarch_kernel.errors import Failure, Frame, MeshDownError
from monarch_kernel.notebook.cells.call_watch import CallWatch
from monarch_kernel.runtime.diagnostics.stacks import Activity, AwaitedCall, Collective, Doing
from monarch_kernel.runtime.rpc.future import Future


def at(executor: str, line: int, code: str = "f(x)") -> Activity:
    return Activity(7, executor, (Frame("<remote cell [5]>", line, "<module>", (code,), line, user=True),), thread=1)


class FakeMesh:
    """Three ranks, of which the first two may run something.

    Attributes:
        answers: what the ranks do.
        activity: what the first two ranks run, as the view says; empty for nothing.
        since: since when they run it.
        asked_at: when the ranks were asked.
        states: what agents say of the processes of silent ranks.
        shown: the waits in the views.
        others: the waits of other sources.
    """

    def __init__(self) -> None:
        self.answers: dict[int, Doing | Failure] = {rank: Doing() for rank in range(3)}
        self.activity = "trainer.step"
        self.since = 0.0
        self.now = 0.0
        self.asked_at: list[float] = []
        self.states: dict[int, str] = {}
        self.shown: tuple[WaitView, ...] = ()
        self.others: tuple[WaitView, ...] = ()
        self.state: RankState = "idle"

    def doing(self, *, brief: bool = False) -> Future[dict[int, Doing | Failure]]:
        self.asked_at.append(self.now)
        return Future.resolved(self.answers)

    def process_states(self, ranks: Sequence[int]) -> dict[int, Future[str]]:
        return {rank: Future.resolved(self.states.get(rank, "")) for rank in ranks}

    def places(self, procs: Sequence[int]) -> list[tuple[str, int]]:
        return [("", 0) if proc == 0 else ("t", proc - 11) if proc < 20 else ("u", proc - 21) for proc in procs]

    def view(self) -> MeshView:
        ranks = [
            RankView(i, (("gpus", i),), "running", self.activity, self.now - self.since)
            if self.activity and i < 2
            else RankView(i, (("gpus", i),), self.state)
            for i in range(3)
        ]
        return MeshView("t", (("gpus", 3),), tuple(ranks), waits=(*self.shown, *self.others))

    def show_waits(self, source: object, waits: Sequence[WaitView]) -> None:
        self.shown = tuple(waits)

    def run(self, watch: CallWatch, until: float) -> None:
        while self.now < until:
            self.now = round(self.now + 0.2, 1)
            watch.poll(self, self.now)


def in_collective(age_s: float = 12.0) -> Doing:
    call = Collective("all_reduce", 17, "", (0, 1, 2), "4", age_s, 1)
    return Doing((at("actor trainer", 12),), (call,), {"": 17})


def awaiting(note: str, *procs: int, executor: str = "actor trainer", age_s: float = 12.0) -> Doing:
    return Doing((at(executor, 12),), calls=(AwaitedCall(note, procs, age_s, 1),))


def test_short_calls_cost_nothing() -> None:
    mesh, watch = FakeMesh(), CallWatch(10.0)
    for _ in range(20):
        mesh.run(watch, mesh.now + 9.0)
        mesh.since = mesh.now
    assert not mesh.asked_at
    mesh.activity = "cell [5]"  # the cell has a watch
    mesh.run(watch, mesh.now + 100.0)
    assert not mesh.asked_at
    mesh.activity = "trainer.step"
    mesh.run(CallWatch(0.0), mesh.now + 100.0)
    assert not mesh.asked_at


def test_an_endpoint_that_waits_in_a_collective_is_shown_until_the_wait_ends() -> None:
    mesh, watch = FakeMesh(), CallWatch(10.0)
    mesh.answers = {
        0: in_collective(),
        1: in_collective(),
        2: Doing((at("actor trainer", 15, "load()"),), (), {"": 16}),
    }
    mesh.run(watch, 14.0)
    text = "[0-1] wait for 12 s in all_reduce #17 (shape 4), actor trainer: cell [5], line 12; "
    text += "[2] has not started it: actor trainer: cell [5], line 15: load()"
    assert mesh.shown == (WaitView(text, (0, 1), (2,)),)
    mesh.answers = {rank: Doing() for rank in range(3)}
    mesh.run(watch, 16.0)
    assert mesh.shown == ()
    assert len(mesh.asked_at) <= 5


def test_the_lines_go_when_the_call_ends() -> None:
    mesh, watch = FakeMesh(), CallWatch(10.0)
    mesh.answers |= {0: in_collective(), 1: in_collective()}
    mesh.run(watch, 14.0)
    assert mesh.shown
    mesh.activity = ""
    mesh.run(watch, 16.0)
    assert mesh.shown == ()


def test_a_younger_wait_is_not_shown() -> None:
    mesh, watch = FakeMesh(), CallWatch(10.0)
    mesh.answers |= {0: in_collective(9.0), 1: awaiting("b.step", 13, age_s=9.0)}
    mesh.run(watch, 14.0)
    assert mesh.asked_at
    assert mesh.shown == ()


def test_a_call_that_waits_for_a_stopped_process_is_shown() -> None:
    mesh, watch = FakeMesh(), CallWatch(10.0)
    mesh.answers = {0: awaiting("b.step", 13), 1: Doing(), 2: Failure("interrupted", "CancelledError", "")}
    mesh.states = {2: "state: t 4711 99\n"}
    mesh.run(watch, 14.0)
    (wait,) = mesh.shown
    assert wait.text.endswith("; [2] is stopped by a debugger or tracer, process 99")


@pytest.mark.parametrize(
    ("answer", "state", "text"),
    [
        (Doing((at("actor b", 20, "time.sleep(60)"),)), "idle", "[2] is at actor b: cell [5], line 20: time.sleep(60)"),
        (Doing((at("actor other", 20),)), "idle", "[2] runs no code of it"),
        (
            Failure("interrupted", "CancelledError", ""),
            "running",
            "[2] has not answered: what runs there is not known",
        ),
        (Failure("lost", "RankDied", ""), "dead", "[2] is dead"),
        (Failure("lost", "RankDied", ""), "starting", "[2] is not up"),
    ],
)
def test_a_call_that_waits_for_another_actor_is_shown(answer: Doing | Failure, state: RankState, text: str) -> None:
    mesh, watch = FakeMesh(), CallWatch(10.0)
    mesh.state = state
    mesh.answers = {0: awaiting("b.step", 13), 1: awaiting("b.step", 13), 2: answer}
    mesh.run(watch, 14.0)
    (wait,) = mesh.shown
    assert (wait.ranks, wait.missing) == ((0, 1), (2,))
    assert wait.text.startswith(f"[0-1] wait for 12 s for b.step of [2], actor trainer: cell [5], line 12; {text}")


def test_calls_of_other_meshes_and_of_the_program_are_named() -> None:
    mesh, watch = FakeMesh(), CallWatch(10.0)
    mesh.answers |= {0: awaiting("buffer.take", 21, 22), 1: awaiting("head.next", 0)}
    mesh.run(watch, 14.0)
    place = "actor trainer: cell [5], line 12"
    assert mesh.shown == (
        WaitView(f"[0] waits for 12 s for buffer.take of u[0-1], {place}", (0,)),
        WaitView(f"[1] waits for 12 s for head.next of the program, {place}", (1,)),
    )


def test_a_transfer_with_a_buffer_is_shown_without_what_its_owner_does() -> None:
    mesh, watch = FakeMesh(), CallWatch(10.0)
    mesh.answers |= {0: awaiting("a transfer with a buffer", 13), 2: Doing()}
    mesh.run(watch, 14.0)
    (wait,) = mesh.shown
    assert wait.text == "[0] waits for 12 s for a transfer with a buffer of [2], actor trainer: cell [5], line 12"


def test_what_the_watch_of_a_cell_shows_is_not_shown_twice() -> None:
    mesh, watch = FakeMesh(), CallWatch(10.0)
    mesh.others = (WaitView("[0-1] wait ...", (0, 1), (2,)),)
    mesh.answers |= {0: in_collective(), 1: in_collective(), 2: Doing((), (), {"": 16})}
    mesh.run(watch, 14.0)
    assert mesh.shown == ()
    mesh.others = ()
    mesh.run(watch, 18.0)
    assert len(mesh.shown) == 1


def test_a_mesh_that_is_down_ends_the_watch() -> None:
    mesh, watch = FakeMesh(), CallWatch(10.0)

    def down(*, brief: bool = False) -> Future[dict[int, Doing | Failure]]:
        mesh.asked_at.append(mesh.now)
        raise MeshDownError("down")

    mesh.doing = down  # type: ignore[method-assign]
    mesh.run(watch, 60.0)
    assert len(mesh.asked_at) == 1


def test_a_rank_that_waits_in_a_cell_is_left_to_the_cell() -> None:
    mesh, watch = FakeMesh(), CallWatch(10.0)
    mesh.answers |= {0: replace(awaiting("b.step", 13), rank=0)}
    mesh.run(watch, 14.0)
    assert mesh.shown
    mesh.activity = "cell [6]"
    mesh.run(watch, 20.0)
    assert mesh.shown == ()
