"""Tests the description of stacks: equal stacks once, and the ranks that a collective waits for."""

from __future__ import annotations

from collections.abc import Mapping

from monarch_kernel.base.events import MeshView, RankState, RankView
from monarch_kernel.errors import Failure, Frame
from monarch_kernel.notebook.view.stacks import doing_lines, stacks_text
from monarch_kernel.runtime.diagnostics.stacks import Activity, Collective, Doing

CELL = "<remote cell [5]>"
LIBRARY = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def view(*states: RankState, activity: str = "cell [5]") -> MeshView:
    ranks = [
        RankView(
            i, (("gpus", i),), state, activity if state == "running" else "", last_error="killed" * (state == "dead")
        )
        for i, state in enumerate(states)
    ]
    return MeshView("t", (("gpus", len(ranks)),), tuple(ranks))


def frame(line: int, source: str, function: str = "<module>", file: str = CELL) -> Frame:
    return Frame(file, line, function, (source,), line, user=file == CELL)


def at(*frames: Frame, call: str = "", executor: str = "main", thread: int = 1) -> Activity:
    return Activity(7, executor, frames, call, thread)


def waits(operation: str, number: int, age_s: float = 4.2, group: str = "", n: int = 3, thread: int = 1) -> Collective:
    return Collective(operation, number, group, tuple(range(n)), "4x8", age_s, thread)


def text(mesh: MeshView, answers: Mapping[int, Doing | Failure]) -> str:
    return "\n".join(doing_lines(mesh, answers, list(range(len(mesh.ranks)))))


REDUCES = at(frame(12, "dist.all_reduce(x)"), frame(3252, "work.wait()", "all_reduce", LIBRARY), call="work.wait()")


def test_ranks_at_the_same_place_are_one_block_and_the_missing_rank_is_named() -> None:
    answers = {
        0: Doing((REDUCES,), (waits("all_reduce", 17, 4.2),), {"": 17}),
        1: Doing((REDUCES,), (waits("all_reduce", 17, 3.9),), {"": 17}),
        2: Doing((at(frame(14, "    time.sleep(600)"), call="time.sleep(600)"),), (), {"": 16}),
    }
    assert text(view("running", "running", "running"), answers) == (
        "[0-1] cell [5], line 12: dist.all_reduce(x)\n"
        "    waits in all_reduce #17 (shape 4x8) for 4.2 s\n"
        "    [2] has not started it\n"
        "[2] cell [5], line 14: time.sleep(600)"
    )


def test_unknown_collectives_are_reported_and_blame_no_rank() -> None:
    answers = {
        0: Doing((REDUCES,), (waits("all_reduce", 17),), {"": 17}),
        1: Doing((at(frame(12, "dist.all_reduce(x)")),), unknown="KeyError: 'entries'"),
        2: Doing(unknown="KeyError: 'entries'"),
    }
    assert text(view("running", "running", "running"), answers) == (
        "[0] cell [5], line 12: dist.all_reduce(x)\n"
        "    waits in all_reduce #17 (shape 4x8) for 4.2 s\n"
        "    whether [1-2] started it is not known\n"
        "[1] cell [5], line 12: dist.all_reduce(x)\n"
        "    its collectives are not known: KeyError: 'entries'\n"
        "[2] between two steps of cell [5]\n"
        "    its collectives are not known: KeyError: 'entries'"
    )
    lost = Activity(7, "main", thread=1, unknown="RuntimeError: no frame")
    assert text(view("running"), {0: Doing((lost,))}) == "[0] cell [5]: its place is not known: RuntimeError: no frame"


def test_ranks_in_different_collectives_of_a_group_name_each_other() -> None:
    answers = {
        0: Doing((REDUCES,), (waits("all_reduce", 2, n=2),), {"": 2}),
        1: Doing((at(frame(9, "dist.barrier()")),), (waits("barrier", 2, n=2),), {"": 2}),
    }
    said = text(view("running", "running"), answers).splitlines()
    assert said[2] == "    [1] waits in barrier #2 (shape 4x8) instead"
    assert said[5] == "    [0] waits in all_reduce #2 (shape 4x8) instead"


def test_a_rank_that_finished_the_collective_is_not_missing() -> None:
    answers = {0: Doing((REDUCES,), (waits("broadcast", 2, n=2),), {"": 2}), 1: Doing((), (), {"": 3})}
    assert "not started" not in text(view("running", "idle"), answers)


def test_dead_ranks_and_groups_are_named() -> None:
    answers = {
        0: Doing((REDUCES,), (waits("all_reduce", 1, group="dp", n=2),), {"dp": 1}),
        1: Failure("lost", "RankDied", "killed by SIGKILL"),
    }
    assert text(view("running", "dead"), answers) == (
        "[0] cell [5], line 12: dist.all_reduce(x)\n"
        "    waits in all_reduce #1 of group dp [0-1] (shape 4x8) for 4.2 s\n"
        "    [1] cannot start it: dead\n"
        "[1] dead: killed"
    )


def test_the_users_frames_and_the_innermost_call() -> None:
    where = at(
        frame(20, "train()"),
        frame(3, "    step(x)", "train"),
        frame(80, "return solve(a)", "inv", "/venv/lib/python3.11/site-packages/numpy/linalg.py"),
        call="solve(a)",
    )
    assert text(view("running"), {0: Doing((where,))}) == (
        "[0] cell [5], line 3, in train: step(x)\n"
        "    in solve(a) (numpy/linalg.py, line 80)\n"
        "    called from cell [5], line 20: train()"
    )


def test_many_collectives_of_one_group_are_one_line() -> None:
    many = tuple(waits("all_reduce", number, 2.0, n=2) for number in (3, 2, *range(4, 501)))
    answers = {
        0: Doing((REDUCES,), (*many, waits("barrier", 7, 1.0, "g", n=2)), {"": 500}),
        1: Doing((REDUCES,), (), {}),
    }
    assert text(view("running", "running"), answers).splitlines()[1:5] == [
        "    waits in barrier #7 of group g [0-1] (shape 4x8) for 1.0 s",
        "    [1] has not started it",
        "    waits in all_reduce #2 (shape 4x8) and 498 more up to all_reduce #500 (shape 4x8) for 2.0 s",
        "    [1] has not started it",
    ]


def test_cells_and_actors_of_one_rank() -> None:
    actor = Activity(8, "actor trainer", (Frame("/home/me/model.py", 9, "step", ("self.go()",), 9, True),), "", 2)
    both = Doing((at(frame(1, "x")), actor), (waits("barrier", 1, n=1),), {"": 1})
    said = text(view("running"), {0: both}).splitlines()
    assert said[0] == "[0] cell [5], line 1: x"
    assert said[1].startswith("    waits in barrier #1")
    assert said[-1] == "[0] actor trainer: /home/me/model.py, line 9, in step: self.go()"


def test_a_class_of_the_notebook() -> None:
    actor = Activity(8, "actor a", (Frame("/tmp/ipykernel_12/345.py", 9, "step", ("self.go()",), 9, True),), "", 2)
    assert (
        text(view("running"), {0: Doing((actor,), (), {})})
        == "[0] actor a: a cell of the notebook, line 9, in step: self.go()"
    )


def test_a_rank_that_does_not_answer() -> None:
    gone = Failure("interrupted", "CancelledError", "cancelled by the caller")
    said = "[0] no answer, while cell [5] runs there: its line is not known"
    assert text(view("running"), {0: gone}) == said
    assert text(view("running"), {}) == said
    assert text(view("running", activity=""), {}) == "[0] no answer: what runs there is not known"
    assert text(view("running", "running"), {}) == said.replace("[0]", "[0-1]")


def test_code_without_a_user_frame_shows_the_activity_that_the_controller_knows() -> None:
    assert text(view("running", activity="push 'x'"), {0: Doing((at(),))}) == "[0] push 'x'"
    assert text(view("running"), {0: Doing()}) == "[0] between two steps of cell [5]"


def test_stacks_of_a_mesh_and_of_a_part() -> None:
    answers = {0: Doing(), 1: Doing((at(frame(1, "spin()")),)), 2: Doing()}
    mesh = view("idle", "running", "idle")
    assert stacks_text(mesh, answers) == "t: 3 ranks, 1 busy\n[0,2] idle\n[1] cell [5], line 1: spin()"
    assert stacks_text(mesh, answers, (1,)) == "t: 1 rank, 1 busy\n[1] cell [5], line 1: spin()"
    assert stacks_text(mesh, answers, (0, 2)) == "t: nothing runs on [0,2]"
    assert "[1] dead: killed" in stacks_text(view("idle", "dead"), {0: Doing()})


def test_many_places_are_bounded() -> None:
    n = 40
    answers = {i: Doing((at(frame(i + 1, "x")),)) for i in range(n)}
    said = text(view(*["running"] * n), answers).splitlines()
    assert len(said) == 13
    assert said[-1] == "and 28 more places, on [12-39]"


def test_work_for_other_callers_counts_as_busy() -> None:
    broadcast = at(frame(7, "fly()"), executor="actor pilots")
    done = Activity(0, "actor judge", (Frame("loop.py", 3, "wait", ("wait()",), 3),))
    answers = {0: Doing((broadcast,)), 1: Doing((done,))}
    assert stacks_text(view("idle", "idle"), answers) == (
        "t: 2 ranks, 1 busy\n[0] actor pilots: cell [5], line 7: fly()\n[1] idle"
    )
    assert stacks_text(view("idle", "idle"), {0: Doing(), 1: Doing((done,))}) == "t: nothing runs on [0-1]"
