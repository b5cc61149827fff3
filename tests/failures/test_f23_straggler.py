"""F23: a rank is slower than the others; it is named, with the line where its time goes."""

from __future__ import annotations

import pytest

from tests.failures.cells import Cells

pytestmark = pytest.mark.slow  # the rule needs seconds of steps
N = 3
LOOP = """
from monarch_kernel import live
def augment():
    time.sleep(0.03)
for step in live.loop(2_000):
    time.sleep(0.02)
    if rank == {slow}:
        augment()
    dist.all_reduce(torch.ones(4))
"""
ALONE = """
for step in live.loop(600):
    time.sleep(0.06 if rank == 1 else 0.02)
"""


def test_the_rank_that_others_wait_for_is_named_with_its_line(cells: Cells) -> None:
    (line,) = cells.watched(LOOP.format(slow=2), "live loop")
    assert line.startswith("live loop: the other ranks wait for [2] ")
    assert f"while it is at cell [{cells.number}], line 4, in augment: time.sleep(0.03). Usual causes: " in line


def test_a_rank_that_nobody_waits_for_is_compared_with_the_median(cells: Cells) -> None:
    """No other rank is blamed for the collectives of the cell before."""
    (line,) = cells.watched(ALONE, "live loop")
    assert line.startswith("live loop: [1] takes 6")
    assert " ms a step, the median of the ranks is 2" in line


def test_nobody_is_named_in_a_healthy_loop(cells: Cells) -> None:
    assert cells.watched(LOOP.format(slow="-1").replace("2_000", "500"), "live loop") == []
