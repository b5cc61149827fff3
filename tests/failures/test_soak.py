"""A minute of the soak (`make soak`): each kind of round once, then some again. What grows is found, and noise is not.

Five minutes would make the same kinds of rounds, and take a tenth of the time of the slow tier. `test_random_faults.py` makes
the faults of hosts, which are left out here. Memory takes far longer to judge.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.failures.holdings import Held, grown, held_by, per_round
from tests.failures.soak import Soak

SEED = 3
MORE = 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_is_wrong_and_nothing_leaks() -> None:
    soak = Soak(SEED, print)
    try:
        report = soak.run(more=MORE)
    finally:
        soak.close()
    print(report.text())
    assert report.is_good, report.text()


def samples(numbers: Sequence[int], kind: str = "descriptors", what: str = "kernel socket:[N]") -> list[Held]:
    return [Held({**Held().counts, kind: Counter({what: number})}) for number in numbers]


@pytest.mark.parametrize("numbers", [[3] * 9, [3, 5, 4, 3, 5, 4, 5, 3, 5], [9, 9, 9, 3, 3, 3, 3, 3, 3], [3], []])
def test_noise_and_less_are_no_growth(numbers: list[int]) -> None:
    assert grown(samples(numbers)) == []


@pytest.mark.parametrize("numbers", [[3, 4], [3, 3, 3, 4, 4, 4], [3, 4, 5, 6, 7, 8, 9, 10], [0, 2, 0, 0, 3, 4, 5]])
@pytest.mark.parametrize("kind", ["processes", "descriptors", "threads", "segments"])
def test_growth_is_named(numbers: list[int], kind: str) -> None:
    (found,) = grown(samples(numbers, kind))
    assert str(found).startswith(f"{kind}: kernel socket:[N]: ")


def test_the_growth_of_memory_is_that_of_most_rounds() -> None:
    assert per_round([]) == per_round([5.0]) == per_round([7.0] * 50) == 0
    assert per_round([3.0 * i for i in range(50)]) == 3.0
    assert per_round([10.0 if i % 10 else 5000.0 for i in range(50)]) == 0


def test_what_a_process_holds_is_counted() -> None:
    roles = {os.getpid(): "kernel"}
    before = held_by(roles)
    file = os.memfd_create("soak-held")
    try:
        after = held_by(roles)
    finally:
        os.close(file)
    assert after.counts["segments"] - before.counts["segments"] == Counter({"/memfd:soak-held": 1})
    assert after.counts["descriptors"] - before.counts["descriptors"] == Counter({"kernel /memfd:soak-held": 1})
    assert after.counts["processes"] == Counter({"kernel": 1})
    assert after.memory["kernel"] > 1 << 20
