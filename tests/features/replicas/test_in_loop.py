"""The calls of live.check on several ranks; without ranks."""

from __future__ import annotations

from monarch_kernel.features.replicas.compare import Comparison, Copy, Difference
from monarch_kernel.features.replicas.in_loop import Call, call_problem, drift_text, nothing_text


def test_calls_in_different_steps_are_not_compared() -> None:
    text = call_problem({rank: Call(3 if rank else 5, True, True, {}) for rank in range(4)})
    assert text.startswith("the ranks call live.check in different steps: [0] 5, [1-3] 3; call it with the same every=")
    assert call_problem({rank: Call(3, True, True, {}) for rank in range(4)}) == ""


def test_a_rank_without_modules_takes_part_if_others_have_some() -> None:
    assert "found no module" in call_problem({rank: Call(0, False, False, {}) for rank in range(2)})
    assert call_problem({rank: Call(0, rank == 1, rank == 1, {}) for rank in range(2)}) == ""


def test_a_check_that_can_compare_nothing_is_an_error() -> None:
    assert "no tensor that it can compare" in call_problem({rank: Call(0, True, False, {}) for rank in range(2)})


def test_the_number_of_other_differences_agrees_with_its_noun() -> None:
    difference = Difference(Copy("m.a", "parameter", None, (2,), "float32", b"1"), ((0,), (1,)))
    texts = [drift_text(5, Comparison(differences=(difference,) * count)) for count in (1, 2, 3)]
    assert texts[0].startswith("step 5: the replicas differ: m.a: [0] and [1] differ; ")
    assert " differ (and 1 more difference); " in texts[1]
    assert " differ (and 2 more differences); " in texts[2]


def test_a_check_that_compares_nothing_says_why() -> None:
    assert nothing_text(["model"], 1, is_sharded=True) == (
        "live.check compared nothing in model: the process group has 1 rank, and replicas are compared between ranks"
    )
    assert nothing_text(["model", "ema"], 4, is_sharded=True) == (
        "live.check compared nothing in model, ema: no tensor has a replica, as each of 4 ranks has another shard (FSDP on "
        "all ranks)"
    )
    assert nothing_text([], 2, is_sharded=False) == (
        "live.check compared nothing in any variable: there are only buffers, which ranks may have different on purpose"
    )
