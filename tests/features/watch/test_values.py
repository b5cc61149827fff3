"""Values that are not finite and spikes are found, and ordinary losses raise no alarm."""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.features.watch.values import NOT_FINITE, SPIKE, ValueWatch, is_loss
from monarch_kernel.net.wire.messages import LoopAlarm


def alarms(values: list[float], name: str = "loss") -> list[LoopAlarm]:
    return ValueWatch().take(name, list(enumerate(values)))


def steady(n: int = 100) -> list[float]:
    return [2.0 + (i * 7 % 10) / 20 for i in range(n)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "accuracy"])
def test_the_first_value_that_is_not_finite_is_found(bad: float, name: str) -> None:
    (alarm,) = alarms([1.0, 2.0, bad, bad, 1.0, bad], name)
    assert (alarm.kind, alarm.name, alarm.step) == (NOT_FINITE, name, 2)
    assert alarm.value == bad or math.isnan(bad)


def test_each_name_has_an_alarm_also_in_later_reports() -> None:
    watch = ValueWatch()
    assert len(watch.take("a", [(3, math.nan)])) == 1
    assert len(watch.take("b", [(4, math.nan)])) == 1
    assert watch.take("a", [(5, math.nan)]) == []


def test_a_value_that_was_finite_for_long_has_another_alarm() -> None:
    for finite, expected in ((63, [0]), (64, [0, 65])):
        found = alarms([math.nan, *[1.0] * finite, math.inf, math.inf])
        assert [each.step for each in found] == expected


def test_with_patience_only_many_values_in_succession_raise_an_alarm() -> None:
    watch = ValueWatch()
    values = [math.inf] * 3 + [1.0] + [math.inf] * 3
    assert watch.take("grad_norm", list(enumerate(values)), 4) == []
    (alarm,) = watch.take("grad_norm", [(7, math.inf)], 4)
    assert (alarm.step, alarm.value) == (4, math.inf)
    assert watch.take("grad_norm", [(8, math.inf)], 1) == []


def test_an_alarm_says_whether_another_value_is_not_finite_either() -> None:
    watch = ValueWatch()
    (first,) = watch.take("loss", [(0, math.nan)])
    (second,) = watch.take("accuracy", [(500, math.nan)])
    watch.take("accuracy", [(501, 1.0)])
    watch.take("loss", [(501, 1.0)])
    (third,) = watch.take("grad_norm", [(502, math.nan)])
    assert [first.is_more, second.is_more, third.is_more] == [False, True, False]


def test_a_loss_of_zeros_has_no_scale_to_compare_with() -> None:
    zeros = [0.0] * 100
    assert alarms([*zeros, 0.3, *zeros, 0.2]) == []
    assert [each.step for each in alarms([*zeros, *steady(), 50.0])] == [200]


def test_a_spike_is_found_once_with_the_median() -> None:
    (alarm,) = alarms([*steady(), 9.0, 9.5, *steady(10)])
    assert (alarm.kind, alarm.step, alarm.value, alarm.usual) == (SPIKE, 100, 9.0, 2.25)


def test_a_second_spike_is_found_after_the_first_one_is_over() -> None:
    assert [each.step for each in alarms([*steady(), 9.0, *steady(50), 9.0])] == [100, 151]


def test_other_names_have_no_spikes() -> None:
    assert alarms([*steady(), 9.0], "step_time") == []
    assert [is_loss(name) for name in ("loss", "train/Loss", "val_loss", "lr")] == [True, True, True, False]


def test_the_first_values_are_no_spikes() -> None:
    assert alarms([1.0] * 10 + [50.0]) == []


def test_a_new_level_is_accepted() -> None:
    watch = ValueWatch()
    values = [*steady(), *[value + 20 for value in steady(200)]]
    assert len(watch.take("loss", list(enumerate(values)))) == 1
    assert watch.take("loss", [(300, 22.0)]) == []
    assert len(watch.take("loss", [(301, 200.0)])) == 1


def test_a_falling_and_a_constant_loss_raise_no_alarm() -> None:
    assert alarms([10 * 0.99**step for step in range(2_000)]) == []
    assert alarms([0.0] * 500) == []
    assert alarms([1.0] * 500) == []


@given(st.integers(0, 10_000), st.sampled_from(["gauss", "exponential", "uniform", "rl"]))
def test_noise_raises_no_alarm(seed: int, kind: str) -> None:
    noise = random.Random(seed)
    draw = {
        "gauss": lambda step: 2 + noise.gauss(0, 0.3),
        "exponential": lambda step: noise.expovariate(1),
        "uniform": lambda step: noise.random(),
        "rl": lambda step: noise.gauss(0, 1) * (1 + 0.2 * math.sin(step / 50)),
    }[kind]
    assert alarms([draw(step) for step in range(500)]) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["lognormal", "squares", "pareto"])
def test_the_rare_peaks_of_heavy_tails_raise_few_alarms(seed: int, kind: str) -> None:
    noise = random.Random(seed)
    draw = {
        "lognormal": lambda: noise.lognormvariate(0, 1.5),
        "squares": lambda: noise.gauss(0, 1) ** 2 / noise.gammavariate(1.5, 2 / 3),  # of errors with heavy tails
        "pareto": lambda: noise.paretovariate(2),
    }[kind]
    assert len(alarms([draw() for _ in range(20_000)])) <= 5


def test_the_third_jump_in_two_thousand_values_makes_such_jumps_usual() -> None:
    jumps = [*steady(48), 9.0] * 4
    assert [each.step for each in alarms([*steady(), *jumps])] == [148, 197, 246]
    assert len(alarms([*steady(), *jumps, *steady(), 60.0])) == 4
    assert len(alarms([*steady(), *jumps, *steady(2_100), 9.0])) == 4


@pytest.mark.parametrize("quiet", [[1.0] * 200, [0.0] * 200, [1.0, 1.0 + 1e-9] * 100, [1e-300, 1e300] * 50])
def test_a_loss_that_hardly_moves_or_overflows_hides_no_later_jump(quiet: list[float]) -> None:
    noisy = [value + 10 for value in steady(300)]
    found = [each.step for each in alarms([*quiet, *noisy, 100.0])]
    assert found[-1:] == [len(quiet) + 300]


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=20), max_size=10))
def test_the_alarms_do_not_depend_on_the_reports(reports: list[list[float]]) -> None:
    values = list(enumerate(value for report in reports for value in report))
    watch, whole = ValueWatch(), ValueWatch().take("loss", values)
    apart, at = [], 0
    for report in reports:
        apart += watch.take("loss", values[at : at + len(report)])
        at += len(report)
    assert apart == whole


@pytest.mark.timing
def test_a_value_costs_microseconds() -> None:
    values = list(enumerate(steady(100_000)))
    began = time.process_time()
    ValueWatch().take("loss", values)
    assert (time.process_time() - began) / len(values) < 5e-6
