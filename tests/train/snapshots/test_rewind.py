"""The snapshot to which all ranks can go back."""

from __future__ import annotations

from monarch_kernel.train.snapshots.rewind import Common, _no_such_step_text, common

A0, A10, A20, B0 = (7, 1, 0), (7, 1, 10), (7, 1, 20), (9, 1, 0)


def test_each_rank_keeps_its_own() -> None:
    held = {0: {0: [A0, A10]}, 1: {1: [A0, A10]}}
    assert common((0, 1), held) == [Common(A0, (0, 1)), Common(A10, (0, 1))]


def test_a_new_rank_gets_its_snapshot_from_its_buddy() -> None:
    held = {0: {0: [A10, A20], 2: [A10, A20]}, 1: {1: [A10, A20], 0: [A10]}, 2: {}}
    assert common((0, 1, 2), held)[-1] == Common(A20, (0, 1, 0))


def test_the_buddy_does_not_have_the_last_one() -> None:
    held = {0: {0: [A10, A20], 1: [A10]}, 1: {}}
    assert common((0, 1), held) == [Common(A10, (0, 0))]


def test_a_rank_is_farther_than_another() -> None:
    assert common((0, 1), {0: {0: [A10, A20]}, 1: {1: [A0, A10]}}) == [Common(A10, (0, 1))]
    assert common((0, 1), {0: {0: [A20]}, 1: {1: [A0]}}) == []


def test_both_ranks_that_kept_it_are_gone() -> None:
    assert common((0, 1, 2), {0: {}, 1: {}, 2: {2: [A10], 1: [A10]}}) == []


def test_a_rank_does_not_answer() -> None:
    assert common((0, 1), {0: {0: [A10], 1: [A10]}}) == [Common(A10, (0, 0))]


def test_a_later_loop_counts_as_later_whatever_its_step() -> None:
    held = {rank: {rank: [A10, A20, B0]} for rank in range(2)}
    assert common((0, 1), held)[-1].key == B0


def test_no_rank_has_anything() -> None:
    assert common((0, 1), {0: {}, 1: {}}) == []


def test_a_step_without_a_snapshot_is_answered_with_those_that_have_one() -> None:
    assert _no_such_step_text("t", [30, 1040], 999) == (
        "t has no snapshot of step 999; it has: 30, 1,040 (%mesh rollback t 30 takes the newest before it)"
    )
    assert _no_such_step_text("t", [30, 40], 2) == (
        "t has no snapshot of step 2; it has: 30, 40 (live.snapshot(keep=3) keeps 3)"
    )
