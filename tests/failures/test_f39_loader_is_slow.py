"""F39: the loader is the bottleneck; the share of the step spent waiting for it is named, by rank."""

from __future__ import annotations

import re

import pytest

from tests.failures.cells import Cells

pytestmark = pytest.mark.slow  # the rule needs seconds of steps
LOOP = """
from monarch_kernel import live
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 100_000
    def __getitem__(self, i):
        time.sleep(0.03)
        return i
rows = iter(torch.utils.data.DataLoader(Rows()))
for step in live.loop(1_000):
    next(rows)
    time.sleep(0.005)
"""


def test_the_share_of_the_step_is_named(cells: Cells) -> None:
    (line,) = cells.watched(LOOP, "live loop")
    found = re.match(r"live loop: \[0-1\] wait for the DataLoader for (\d+) % of a step \(rank [01]: \d+ % of ", line)
    assert found, line
    assert int(found[1]) > 50
    assert "num_workers=" in line
