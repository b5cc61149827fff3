"""Which cell has to wait for which."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from monarch_kernel.notebook.cells.cell import Lane


class FakeCell:
    """What a lane looks at."""

    def __init__(self, ranks: Collection[int], busy: Collection[int] | None = None) -> None:
        self.ranks = frozenset(ranks)
        self.is_stopping = busy is not None
        self._busy = list(busy or ())

    def busy_ranks(self) -> list[int]:
        return self._busy


@pytest.mark.parametrize(
    ("earlier", "waits"),
    [
        (FakeCell({0, 1}), True),
        (FakeCell({2, 3}), False),
        (FakeCell({0, 1, 2, 3}, busy={1}), True),  # interrupted in vain on a rank that is needed
        (FakeCell({0, 1, 2, 3}, busy={3}), False),
        (FakeCell({2, 3}, busy=()), True),  # all have answered, but it has not ended: is the group still good?
    ],
)
def test_what_a_cell_waits_for(earlier: Any, waits: bool) -> None:
    lane = Lane(None, None)  # type: ignore[arg-type]
    cell: Any = FakeCell({0, 1})
    for each in (earlier, cell):
        lane.enter(each)
    assert lane.before(cell) is (earlier if waits else None)
    lane.leave(earlier)
    assert lane.before(cell) is None
