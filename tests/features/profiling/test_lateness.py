"""The rank that others wait for is the last one to arrive, and only long waits count."""

from __future__ import annotations

import random

import pytest

from monarch_kernel.features.profiling.lateness import lateness


def arrivals(late: dict[int, float], n: int = 60, ranks: int = 4, jitter: float = 0.001) -> list[dict[int, float]]:
    chance = random.Random(7)
    return [{rank: step + late.get(rank, 0.0) + chance.random() * jitter for rank in range(ranks)} for step in range(n)]


def test_a_slow_rank_is_last_each_time() -> None:
    found = lateness(arrivals({2: 0.0236}))
    assert (found[2].last, found[2].of) == (60, 60)
    assert found[2].late_s == pytest.approx(0.0236, abs=0.001)
    assert found[2].by_s == pytest.approx(0.0236, abs=0.001)
    assert found[2].lost_s == pytest.approx(60 * 0.0236, rel=0.05)
    assert all(found[rank].last == 0 and found[rank].by_s == 0.0 for rank in (0, 1, 3))
    assert all(found[rank].late_s < 0.001 for rank in (0, 1, 3))


def test_the_short_waits_of_a_step_do_not_count() -> None:
    """Of the collectives of a step, ranks wait long only in the first one."""
    found = lateness([each for pair in zip(arrivals({1: 0.02}), arrivals({}), arrivals({})) for each in pair])
    assert (found[1].last, found[1].of) == (60, 60)


def test_a_rare_long_wait_hides_nothing() -> None:
    found = lateness([*arrivals({1: 0.02}), *arrivals({0: 9.0}, n=3)])
    assert (found[1].last, found[1].of) == (60, 63)


def test_without_a_slow_rank_each_is_last_sometimes() -> None:
    found = lateness(arrivals({}, n=400))
    assert all(0.15 < each.last / each.of < 0.35 for each in found.values())


def test_collectives_of_one_rank_are_no_comparison() -> None:
    assert lateness([]) == {}
    assert lateness([{0: 1.0}, {}]) == {}


def test_groups_may_have_other_ranks() -> None:
    found = lateness([*arrivals({1: 0.02}, ranks=2), *({2: at, 3: at + 0.02} for at in range(60))])
    assert {rank: each.last for rank, each in found.items()} == {0: 0, 1: 60, 2: 0, 3: 60}


def test_a_slow_rank_is_behind_also_where_all_ranks_are_delayed_at_random() -> None:
    """As on a machine with more busy processes than cores: which rank is last says little then."""
    chance = random.Random(3)
    noisy = [
        {rank: step + 0.02 * (rank == 5) + chance.expovariate(1 / 0.012) for rank in range(8)} for step in range(128)
    ]
    found = lateness(noisy)
    assert found[5].last < 0.8 * found[5].of
    assert found[5].behind > 0.9 * found[5].of
    assert found[5].behind_s > 0.015
    assert all(found[rank].behind < 0.7 * found[rank].of for rank in range(8) if rank != 5)


def test_the_median_is_that_of_the_other_ranks() -> None:
    found = lateness([{0: step, 1: step + 0.01, 2: step + 0.03} for step in range(30)])
    assert {rank: (each.behind, round(each.behind_s, 9)) for rank, each in found.items()} == {
        0: (0, -0.03),
        1: (0, -0.02),
        2: (30, 0.02),
    }
    assert [round(each.behind_s, 9) for each in lateness([{0: 1.0, 1: 1.5}]).values()] == [-0.5, 0.5]
