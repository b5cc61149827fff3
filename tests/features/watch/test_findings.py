"""What the watch tells of a loop: each thing once, with ranks folded."""

from __future__ import annotations

import math

import pytest

from monarch_kernel.features.watch.findings import Trouble, straggler_text
from monarch_kernel.features.watch.stragglers import Straggler
from monarch_kernel.net.wire.messages import LoopAlarm


def nan(step: int, name: str = "loss") -> LoopAlarm:
    return LoopAlarm("nan", name, step, math.nan)


def spike(step: int, value: float = 50.0, name: str = "loss") -> LoopAlarm:
    return LoopAlarm("spike", name, step, value, 2.0)


def told(*alarms: tuple[int, LoopAlarm]) -> dict[str, str]:
    trouble = Trouble()
    for rank, alarm in alarms:
        trouble.alarmed(rank, alarm)
    return trouble.texts()


def test_a_healthy_loop_has_no_text() -> None:
    assert Trouble().texts() == {}
    assert Trouble().step_s() == 0.0


def test_the_first_rank_is_named_whatever_the_order_of_the_reports() -> None:
    texts = {
        told((0, nan(12)), (2, nan(11)), (1, nan(12)))["nan"],
        told((2, nan(11)), (1, nan(12)), (0, nan(12)))["nan"],
    }
    (text,) = texts
    assert text.startswith("loss is nan in step 11, first on [2], then on [0-1] from step 12. Usual causes: ")


def test_several_names_are_one_text() -> None:
    text = told((0, nan(5)), (0, nan(6, "grad_norm")), (0, nan(6, "a")), (0, nan(6, "b")), (0, nan(6, "c")))["nan"]
    assert "loss is nan in step 5, first on [0]; later grad_norm, a, b and 1 more too. " in text


@pytest.mark.parametrize(
    ("hooks", "action", "done"),
    [
        ([{}, {}], "", ""),
        ([{"spike": "stop"}, {"spike": "call"}], "", ""),
        ([{"nan": "stop"}, {"nan": "stop"}], "stop", "The loop stops (on_nan). "),
        ([{}, {"nan": "stop"}, {"nan": "call"}], "stop", "The loop stops (on_nan). "),
        ([{"nan": "call"}, {"nan": "call"}], "call", "All ranks call on_nan. "),
        ([{}, {"nan": "call"}], "call", "[1] calls on_nan. "),
        ([{"nan": "call"}, {}, {"nan": "call"}], "call", "[0,2] call on_nan. "),
        ([{"nan": "call"}], "call", "[0] calls on_nan. "),
        ([{"nan": "skip"}, {"nan": "skip"}], "", "No rank applies the update of that step (on_nan). "),
    ],
)
def test_the_text_says_what_the_loop_does_and_on_which_ranks(
    hooks: list[dict[str, str]], action: str, done: str
) -> None:
    trouble = Trouble()
    trouble.hooks = dict(enumerate(hooks))
    trouble.alarmed(0, nan(1))
    assert trouble.action("nan") == action
    assert f"on that rank. {done}%mesh rollback" in trouble.texts()["nan"]


def test_a_fault_after_a_value_was_finite_again_is_another_text() -> None:
    texts = told((0, nan(0, "grad_norm")), (2, nan(5_000)), (0, nan(5_001)))
    assert set(texts) == {"nan", "nan 1"}
    assert texts["nan"].startswith("grad_norm is nan in step 0, first on [0]. ")
    assert texts["nan 1"].startswith("loss is nan in step 5,000, first on [2], then on [0] from step 5,001. ")


def test_a_value_that_is_logged_seldom_belongs_to_the_fault_that_lasts() -> None:
    late = LoopAlarm("nan", "accuracy", 500, math.nan, is_more=True)
    (text,) = told((0, nan(100)), (0, late)).values()
    assert text.startswith("loss is nan in step 100, first on [0]; later accuracy too. ")


def test_a_value_that_is_not_finite_now_and_then_hides_no_other() -> None:
    texts = told(*((0, nan(100 * time, "recall")) for time in range(20)), (1, nan(10_000)))
    assert len(texts) == 4
    assert any(text.startswith("loss is nan in step 10,000, first on [1]. ") for text in texts.values())


def test_many_alarms_for_one_value_hide_no_other_and_the_loop_acts_on_each() -> None:
    trouble = Trouble()
    acted = [trouble.alarmed(rank, nan(100 * time, "recall")) for time in range(40) for rank in range(8)]
    assert acted == [rank == 0 for _ in range(40) for rank in range(8)]
    assert trouble.alarmed(1, nan(10_000))
    assert any(text.startswith("loss is nan in step 10,000, first on [1]. ") for text in trouble.texts().values())


def test_a_loop_acts_again_when_a_fault_comes_again() -> None:
    trouble = Trouble()
    assert [trouble.alarmed(*each) for each in ((0, nan(5)), (1, nan(6)), (0, nan(500)))] == [True, False, True]


def test_a_spike_of_all_ranks_is_one_text() -> None:
    (text,) = told(*((rank, spike(100 + rank, 50 + rank)) for rank in range(4))).values()
    assert text.startswith("loss jumps to 53 in step 100 on [0-3]; the median of the last steps is 2. Usual causes: ")


def test_spikes_that_are_far_apart_are_two_texts() -> None:
    assert len(told((0, spike(100)), (0, spike(500)), (0, spike(100, name="other_loss")))) == 3


def test_only_the_first_alarm_makes_the_loop_act() -> None:
    trouble = Trouble()
    assert [trouble.alarmed(rank, nan(5 + rank)) for rank in range(3)] == [True, False, False]
    assert [trouble.alarmed(0, spike(step)) for step in (10, 20, 200)] == [True, False, True]


def test_alarms_are_bounded() -> None:
    trouble = Trouble()
    assert sum(trouble.alarmed(0, spike(step * 100)) for step in range(2_000)) == 1_100


def times(*reports: tuple[int, int, float, float], repeat: int = 20) -> dict[str, str]:
    trouble = Trouble()
    for _ in range(repeat):
        for report in reports:
            trouble.reported(*report)
    return trouble.texts()


def test_a_slow_loader_is_named_by_rank() -> None:
    (text,) = times((0, 10, 0.05, 0.03), (1, 10, 0.05, 0.04), (2, 10, 0.05, 0.0)).values()
    assert text.startswith(
        "[0-1] wait for the DataLoader for 70 % of a step (rank 1: 80 % of 50 ms): the loader is the bottleneck. Try "
    )


@pytest.mark.parametrize(
    "reports",
    [
        [(0, 10, 0.05, 0.01)],  # a fifth of a step
        [(0, 1, 0.05, 0.04)],  # not long enough
    ],
)
def test_a_loader_that_is_fast_or_new_is_not_named(reports: list[tuple[int, int, float, float]]) -> None:
    assert times(*reports) == {}


def test_the_first_report_does_not_count() -> None:
    trouble = Trouble()
    trouble.reported(0, 10, 10.0, 9.9)  # workers start
    for _ in range(20):
        trouble.reported(0, 10, 0.05, 0.001)
    assert trouble.texts() == {}
    assert trouble.step_s() == pytest.approx(0.05)


@pytest.mark.parametrize("step_s", [0.05, 2.0])
def test_one_long_step_is_neither_a_slow_loader_nor_a_slow_rank(step_s: float) -> None:
    """As at a breakpoint, or at the first batch of an epoch; also where a report has one step."""
    trouble = Trouble()
    for number in range(60):
        for rank in range(3):
            is_long = number == 30 and rank == 1
            trouble.reported(rank, 1, 60.0 if is_long else step_s, 60.0 if is_long else 0.0)
        assert trouble.texts() == {}
    assert trouble.step_s() == pytest.approx(step_s)


def test_long_steps_are_compared_too() -> None:
    assert list(times((0, 1, 2.0, 1.5), (1, 1, 5.0, 0.0), (2, 1, 2.0, 0.0))) == ["loader", "slow 1"]


def test_a_loader_that_is_slow_in_some_steps_is_named() -> None:
    """Where workers load batches in advance, some steps wait long, and others do not."""
    assert list(times((0, 1, 0.5, 0.4), (0, 1, 0.1, 0.0))) == ["loader"]


def test_a_rank_that_is_slower_than_the_median_is_named() -> None:
    (text,) = times((0, 10, 0.05, 0), (1, 10, 0.09, 0), (2, 10, 0.051, 0)).values()
    assert text.startswith("[1] takes 90 ms a step, the median of the ranks is 51 ms. ")
    assert list(times((0, 10, 0.05, 0), (1, 10, 0.09, 0))) == ["slow 1"]


def test_ranks_that_are_about_as_fast_are_not_named() -> None:
    assert times((0, 10, 0.05, 0), (1, 10, 0.07, 0), (2, 10, 0.06, 0)) == {}
    assert times((0, 10_000, 0.00005, 0), (1, 10_000, 0.0002, 0)) == {}


def test_a_straggler_has_its_line() -> None:
    text = straggler_text(Straggler(2, 0.42, "cell [5], line 8: augment()"), 0.05)
    assert text.startswith(
        "the other ranks wait for [2] in 42 % of the looks at them (a step takes 50 ms), while it is at cell [5], line 8: "
        "augment(). Usual causes: "
    )
    late = straggler_text(Straggler(2, 0.97, "", 0.0204), 0.05)
    assert late.startswith(
        "the other ranks wait for [2] for 20.4 ms, in 97 % of the collectives compared (a step takes 50 ms). Usual causes"
    )
    assert straggler_text(Straggler(2, 0.42, ""), 0.0).startswith(
        "the other ranks wait for [2] in 42 % of the looks at them. "
    )


def test_the_text_has_what_is_known_of_the_step() -> None:
    about = "learning rate 0.1, last batch of a DataLoader: rows 4 to 7"
    bad = LoopAlarm("nan", "loss", 5, math.nan, 0.0, about)
    assert f"first on [1]. On [1]: {about}. Usual causes" in told((1, bad))["nan"]
    high = LoopAlarm("spike", "loss", 5, 50.0, 2.0, about)
    (text,) = told((0, spike(5, 40.0)), (1, high)).values()
    assert f"of the last steps is 2. On [1]: {about}. Usual causes" in text


def test_the_module_has_a_text_when_it_is_known() -> None:
    trouble = Trouble()
    first = nan(5)
    assert trouble.alarmed(1, first)
    assert set(trouble.texts()) == {"nan"}
    assert not trouble.alarmed(
        1, LoopAlarm("nan", "loss", 5, math.nan, module="in step 6 the first one is net.0 (Log)")
    )
    assert trouble.texts()["nan module"] == "on [1] in step 6 the first one is net.0 (Log)"
    assert trouble.texts()["nan"].startswith("loss is nan in step 5, first on [1]. Usual")
