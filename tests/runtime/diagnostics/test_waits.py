"""Tests the description of waits in collectives: which ranks wait in what, and what the missing ranks do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from monarch_kernel.base.events import MeshView, RankState, RankView
from monarch_kernel.errors import Failure, Frame, format_ranks
from monarch_kernel.runtime.diagnostics.stacks import Activity, Collective, Doing, LoopPlace, with_callers
from monarch_kernel.runtime.diagnostics.waits import Stall, collective_text, stalls

CELL = "<remote cell [5]>"
SILENT = Failure("interrupted", "CancelledError", "cancelled by the caller")


def view(*states: RankState) -> MeshView:
    ranks = tuple(RankView(i, (("gpus", i),), state) for i, state in enumerate(states))
    return MeshView("t", (("gpus", len(ranks)),), ranks)


FOUR = view("running", "running", "running", "running")


def at(line: int, code: str = "f(x)", executor: str = "main") -> Activity:
    return Activity(7, executor, (Frame(CELL, line, "<module>", (code,), line, user=True),), thread=1)


def waits(
    line: int, operation: str = "all_reduce", number: int = 17, shapes: str = "4", group: str = "", n: int = 4
) -> Doing:
    call = Collective(operation, number, group, tuple(range(n)), shapes, 12.0, 1)
    return Doing((at(line),), (call,), {group: number})


def peer(line: int, operation: str, rank: int, tag: int = 0, age_s: float = 12.0) -> Doing:
    call = Collective(operation, 0, "", (0, 1, 2, 3), "4", age_s, 1, rank, tag)
    return Doing((at(line),), (call,), {})


def found(answers: Mapping[int, Doing | Failure], finished: tuple[int, ...] = (), mesh: MeshView = FOUR) -> list[Stall]:
    return stalls(mesh, answers, finished, 10.0)


def text(answers: Mapping[int, Doing | Failure], finished: tuple[int, ...] = (), mesh: MeshView = FOUR) -> str:
    return "\n".join(stall.text for stall in found(answers, finished, mesh))


def test_a_missing_rank_is_named_with_its_line() -> None:
    late = Doing((at(15, "time.sleep(600)"),), (), {"": 16})
    assert text({0: waits(12), 1: waits(12), 2: late, 3: waits(12)}) == (
        "[0-1,3] wait for 12 s in all_reduce #17 (shape 4), cell [5], line 12; "
        "[2] has not started it: cell [5], line 15: time.sleep(600)"
    )


def test_missing_ranks_that_have_finished_died_or_are_silent() -> None:
    mesh = view("running", "idle", "dead", "running")
    assert text({0: waits(12), 1: Doing(), 2: Failure("lost", "RankDied", ""), 3: SILENT}, (1,), mesh) == (
        "[0] waits for 12 s in all_reduce #17 (shape 4), cell [5], line 12; [1] has finished the cell; [2] is dead; "
        "[3] has not answered: what runs there is not known"
    )


def test_a_rank_that_has_failed_is_not_said_to_have_finished() -> None:
    mesh = view("running", "failed", "running", "running")
    assert text({0: waits(12), 1: Doing(), 2: waits(12), 3: waits(12)}, (1,), mesh).endswith(
        "; [1] has failed in the cell"
    )


def test_a_rank_whose_collectives_are_not_known_is_not_said_to_be_late() -> None:
    dumped = Doing((at(15, "solve(a)"),), unknown="KeyError: 'entries'")
    assert text({0: waits(12), 1: waits(12), 2: dumped, 3: Doing(unknown="KeyError: 'entries'")}) == (
        "[0-1] wait for 12 s in all_reduce #17 (shape 4), cell [5], line 12; "
        "[2] is at cell [5], line 15: solve(a), and its collectives are not known; [3] is not known to have started it"
    )


def test_ranks_in_another_collective_with_the_same_number_are_part_of_the_wait() -> None:
    broadcast = waits(14, "broadcast", shapes="3")
    assert text({0: waits(12), 1: broadcast, 2: broadcast, 3: broadcast}) == (
        "[0] waits for 12 s in all_reduce #17 (shape 4), cell [5], line 12; "
        "[1-3] in broadcast #17 (shape 3), cell [5], line 14 instead"
    )


def test_different_shapes_and_lines_of_one_collective() -> None:
    assert text({0: waits(12), 1: waits(12), 2: waits(13), 3: waits(12, shapes="5")}) == (
        "[0-1] wait for 12 s in all_reduce #17 (shape 4), cell [5], line 12; [2] at cell [5], line 13; "
        "[3] in all_reduce #17 (shape 5), cell [5], line 12 instead"
    )


def test_a_collective_that_all_ranks_have_started() -> None:
    assert text(dict.fromkeys(range(4), waits(12))) == (
        "[0-3] wait for 12 s in all_reduce #17 (shape 4), cell [5], line 12; all ranks of the group have started it"
    )


def test_ranks_that_wait_in_another_group() -> None:
    answers = {0: waits(12), 1: waits(13, group="tp", number=2, n=2)}
    lines = text(answers).splitlines()
    assert lines[0].startswith(
        "[0] waits for 12 s in all_reduce #17 (shape 4), cell [5], line 12; "
        "[1] waits in all_reduce #2 of group tp [0-1] (shape 4), cell [5], line 13 instead"
    )
    assert lines[1].startswith("[1] waits for 12 s in all_reduce #2 of group tp [0-1] (shape 4)")


def test_a_receive_names_its_peer() -> None:
    assert text({0: peer(3, "recv", 1), 1: Doing((at(4, "compute()"),)), 2: Doing(), 3: Doing()}) == (
        "[0] waits for 12 s in recv from [1] (shape 4), cell [5], line 3; [1] is at cell [5], line 4: compute()"
    )


def test_a_send_and_a_receive_with_different_tags_are_one_wait() -> None:
    assert text({0: peer(3, "recv", 1, tag=2), 1: peer(4, "send", 0, tag=1, age_s=11.0)}) == (
        "[0] waits for 12 s in recv from [1] with tag 2 (shape 4), cell [5], line 3; "
        "[1] in send to [0] with tag 1 (shape 4), cell [5], line 4 instead"
    )
    assert "instead" not in text({0: peer(3, "recv", 1), 1: peer(4, "send", 0, age_s=11.0)})


def test_receives_in_a_circle_are_one_wait_with_all_pairs() -> None:
    ring = {rank: peer(3, "recv", (rank - 1) % 4) for rank in range(4)}
    (stall,) = found(ring)
    assert stall.text == (
        "[0-3] wait for 12 s in recv (shape 4), cell [5], line 3: [0] from [3], [1] from [0], [2] from [1], [3] from [2]; "
        "[0-3] wait for each other in a circle"
    )
    assert (stall.call, stall.ranks, stall.missing) == ("recv (shape 4)", (0, 1, 2, 3), ())


def test_stages_of_a_pipeline_are_one_wait_for_the_stage_that_is_missing() -> None:
    idle = Doing((at(9, "load()"),))
    (stall,) = found({0: idle, 1: peer(3, "recv", 0), 2: peer(3, "recv", 1), 3: peer(3, "recv", 2, age_s=14.0)})
    assert stall.text == (
        "[1-3] wait for 14 s in recv (shape 4), cell [5], line 3: [1] from [0], [2] from [1], [3] from [2]; "
        "[0] is at cell [5], line 9: load()"
    )
    assert stall.missing == (0,)


def test_a_wait_for_one_rank_keeps_its_key_when_others_join_it() -> None:
    alone = {0: Doing((at(9),)), 1: peer(3, "recv", 0), 2: Doing((at(9),)), 3: Doing((at(9),))}
    (first,) = found(alone)
    (second,) = found({**alone, 2: peer(3, "recv", 0), 3: peer(3, "recv", 0, tag=2)})
    assert first.key == second.key
    assert "in recv (shape 4), cell [5], line 3: [1-2] from [0], [3] from [0] with tag 2; [0] is at" in second.text


def test_messages_at_other_lines_and_sends_are_other_waits() -> None:
    doing = {0: peer(3, "recv", 3), 1: peer(4, "recv", 3), 2: peer(3, "send", 3), 3: Doing((at(9),))}
    assert len(found(doing)) == 3


def test_groups_that_are_not_made_in_the_same_order() -> None:
    def making(number: int) -> Doing:
        return Doing((at(5),), (Collective(f"new_group #{number}", 0, "", (0, 1, 2, 3), "", 12.0, 1),), {})

    assert text({0: making(4), 1: making(4), 2: making(3), 3: making(3)}) == (
        "[0-1] wait for 12 s in new_group #4, cell [5], line 5; [2-3] in new_group #3, cell [5], line 5 instead"
    )


def making(number: int, *members: int) -> Doing:
    call = Collective(f"new_group #{number} of {format_ranks(members)}", 0, "", members, "", 12.0, 1)
    return Doing((at(5),), (call,), {}, groups=number)


def test_a_new_group_needs_its_members_only_and_the_numbers_of_groups_are_said() -> None:
    late = Doing((at(9, "time.sleep(60)"),), groups=1)
    assert text({0: making(2, 0, 1), 1: late, 2: Doing(), 3: late}, (2,)) == (
        "[0] waits for 12 s in new_group #2 of [0-1], cell [5], line 5; "
        "[1] is at cell [5], line 9: time.sleep(60) (groups made: 1)"
    )
    assert text({0: making(2, 0, 1), 1: Doing(groups=3)}, (1, 2, 3)).endswith(
        "; [1] has finished the cell (groups made: 3)"
    )


def test_members_that_make_groups_in_another_order_are_named_with_what_they_make() -> None:
    lines = text({0: making(2, 0, 1), 1: making(2, 1, 2), 2: making(2, 1, 2)}, (3,)).splitlines()
    assert lines == [
        "[0] waits for 12 s in new_group #2 of [0-1], cell [5], line 5; "
        "[1] waits in new_group #2 of [1-2], cell [5], line 5 instead",
        "[1-2] wait for 12 s in new_group #2 of [1-2], cell [5], line 5; all ranks of the group have started it",
    ]


def test_short_waits_and_ranks_that_are_past_it_are_left_out() -> None:
    assert not stalls(FOUR, {0: waits(12)}, (), 12.5)
    past = Doing((at(20),), (), {"": 18})
    assert "[1" not in text({0: waits(12), 1: past, 2: waits(12), 3: waits(12)})


def test_an_actor_that_waits_is_named() -> None:
    call = Collective("barrier", 1, "", (0, 1, 2, 3), "", 12.0, 1)
    actor = Doing((at(9, executor="actor w"),), (call,), {"": 1})
    assert text({0: actor, 1: Doing(), 2: Doing(), 3: Doing()}) == (
        "[0] waits for 12 s in barrier #1, actor w: cell [5], line 9; [1-3] have not started it: no code of the cell runs there"
    )


def torch_frame(function: str, file: str = "distributed_c10d.py") -> Frame:
    return Frame(f"/site-packages/torch/distributed/{file}", 9, function)


@pytest.mark.parametrize(
    ("functions", "operation", "caller"),
    [
        (("all_gather_object", "wrapper", "all_gather"), "all_gather", "all_gather_object"),
        (("broadcast_object_list", "broadcast"), "broadcast", "broadcast_object_list"),
        (("reduce_scatter_tensor",), "all_reduce", "reduce_scatter_tensor"),
        (("all_gather_into_tensor",), "all_gather", ""),
        (("all_reduce",), "all_reduce", ""),
        (("new_group", "_new_group_with_tag"), "new_group #4", ""),
        (("_private", "<lambda>"), "all_reduce", ""),
        ((), "all_reduce", ""),
    ],
)
def test_the_function_that_the_user_has_called_is_named(
    functions: tuple[str, ...], operation: str, caller: str
) -> None:
    user = Frame(CELL, 3, "<module>", ("f()",), 3, user=True)
    activity = Activity(7, "main", (torch_frame("run"), user, *map(torch_frame, functions)), thread=1)
    older, other = Collective(operation, 1, age_s=20.0, thread=1), Collective(operation, 1, "tp", age_s=9.0, thread=2)
    last = Collective(operation, 2, age_s=12.0, thread=1)
    assert with_callers((older, last, other), (activity,)) == (older, replace(last, caller=caller), other)


def test_messages_and_models_name_their_callers() -> None:
    user = Frame(CELL, 3, "<module>", ("f()",), 3, user=True)
    ddp = Frame("/site-packages/torch/nn/parallel/distributed.py", 9, "__init__")
    call = Collective("recv", 0, peer=1, thread=1)
    for frame, name in (
        (torch_frame("irecv"), ""),
        (torch_frame("recv_object_list"), "recv_object_list"),
        (ddp, "DistributedDataParallel"),
        (torch_frame("init_device_mesh", "device_mesh.py"), "init_device_mesh"),
    ):
        (found,) = with_callers((call,), (Activity(7, "main", (user, frame), thread=1),))
        assert found.caller == name


def test_the_caller_and_the_purpose_are_part_of_the_text() -> None:
    call = Collective("all_gather", 3, "tp", (0, 1), "1", caller="all_gather_object")
    assert collective_text(call, with_group=True) == "all_gather_object: all_gather #3 of group tp [0-1] (shape 1)"
    assert collective_text(Collective("all_reduce", 3, shapes="10", purpose="DDP's gradients of 0.weight")) == (
        "all_reduce #3 (shape 10, DDP's gradients of 0.weight)"
    )


def test_receives_from_any_rank_are_named() -> None:
    """Ranks that all receive have not started something together."""
    receives = replace(
        waits(12), collectives=(Collective("recv", 0, members=(0, 1), shapes="4", age_s=12.0, thread=1, tag=2),)
    )
    what = "wait for 12 s in recv from any rank with tag 2 (shape 4), cell [5], line 12"
    assert text({0: receives, 1: receives}) == f"[0-1] {what}; no rank sends"
    assert text({0: receives}, (1,)) == f"[0] {what.replace('wait', 'waits', 1)}; [1] has finished the cell"


def test_steps_of_a_live_loop_are_named() -> None:
    inside = replace(waits(12, number=5), loops=(LoopPlace(7, 5), LoopPlace(3, 9, is_over=True)))
    ended = Doing(loops=(LoopPlace(3, 9, is_over=True), LoopPlace(7, 4, is_over=True)))
    assert text({0: inside, 1: inside, 2: ended, 3: inside}, (2,)) == (
        "[0-1,3] wait for 12 s in all_reduce #5 (shape 4), cell [5], line 12, in step 4; "
        "[2] has finished the cell after 4 steps"
    )


def test_ranks_outside_a_call_are_named() -> None:
    (stall,) = stalls(None, {0: waits(12), 1: Doing()}, (1,), 10.0, what="the call")
    assert stall.text == (
        "[0] waits for 12 s in all_reduce #17 (shape 4), cell [5], line 12; [1] has finished the call; "
        "[2-3] are not in the call"
    )


def test_a_wait_that_is_over_is_described_in_the_past() -> None:
    late = Doing((at(15, "work()"),), (), {"": 16})
    (stall,) = stalls(FOUR, {0: waits(12), 1: waits(12), 2: late, 3: Doing()}, (3,), 1.0, is_over=True)
    assert stall.text == (
        "[0-1] waited for 12 s in all_reduce #17 (shape 4), cell [5], line 12; "
        "[2] had not started it: cell [5], line 15: work(); [3] had finished the cell"
    )


def backward(line: int, *numbers: int, turn: str = "") -> Doing:
    calls = tuple(Collective("all_reduce", n, "", (0, 1, 2), "4", 12.0 + n, 1, purpose=f"of {n}") for n in numbers)
    return Doing((replace(at(line), turn=turn),), calls, {"": numbers[-1]})


def test_the_collectives_of_one_line_are_one_wait() -> None:
    three = view("running", "running", "idle")
    doing = {0: backward(4, 39, 40, 41), 1: backward(4, 40, 39, 41), 2: Doing(reached={"": 38})}
    (stall,) = found(doing, (2,), three)
    assert stall.text == (
        "[0-1] wait for 53 s in all_reduce #39 (shape 4, of 39) and 2 more up to all_reduce #41 (shape 4, of 41), cell [5], "
        "line 4; [2] has finished the cell"
    )
    assert stall.call == "all_reduce #39 (shape 4, of 39) and 2 more up to all_reduce #41 (shape 4, of 41)"
    two = {0: backward(4, 39, 40), 1: backward(4, 39, 40), 2: Doing(reached={"": 38})}
    assert "in all_reduce #39 (shape 4, of 39) and all_reduce #40 (shape 4, of 40), cell" in text(two, (2,), three)


def test_collectives_that_wait_for_different_ranks_are_different_waits() -> None:
    doing = {0: backward(4, 39, 40), 1: backward(4, 39), 2: Doing(reached={"": 38})}
    assert len(found(doing, (2,), view("running", "running", "idle"))) == 2


def test_a_rank_that_has_finished_says_how_far_its_loop_has_come() -> None:
    waiting = {rank: backward(4, 39, turn="step = 4") for rank in (0, 1)}
    ended = Doing(reached={"": 38}, loop_ends={"epoch": 1, "step": 3})
    three = view("running", "running", "idle")
    assert text({**waiting, 2: ended}, (2,), three).endswith("; [2] has finished the cell with step = 3")
    assert text({**waiting, 2: replace(ended, loop_ends={"i": 3})}, (2,), three).endswith("; [2] has finished the cell")


def test_a_wait_says_how_far_the_loop_of_the_cell_is() -> None:
    doing = {
        0: backward(4, 39, turn="step = 4"),
        1: backward(4, 39, turn="step = 5"),
        2: Doing((replace(at(4), turn="step = 3"),)),
    }
    assert text(doing, (), view("running", "running", "running")) == (
        "[0] waits for 51 s in all_reduce #39 (shape 4, of 39), cell [5], line 4, step = 4; [1] at cell [5], line 4, step = 5; "
        "[2] has not started it: cell [5], line 4: f(x), step = 3"
    )


def test_messages_whose_tags_differ_are_shown_with_their_receivers() -> None:
    def exchange(rank: int, tag: int, age_s: float) -> Doing:
        calls = [Collective(each, 0, "", (0, 1), "4", age_s, 1, 1 - rank, tag) for each in ("send", "recv")]
        return Doing((at(5),), tuple(calls), {})

    assert text({0: exchange(0, 7, 12.0), 1: exchange(1, 8, 13.0)}, (), view("running", "running")) == (
        "[1] waits for 13 s in send to [0] with tag 8 (shape 4), cell [5], line 5; "
        "[0] in recv from [1] with tag 7 (shape 4), cell [5], line 5 instead"
    )
