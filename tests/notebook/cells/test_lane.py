"""Tests which cell must wait for which."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.notebook.cells.cell import CellQueue


class FakeCell:
    """A cell with the attributes that a lane reads."""

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
        (FakeCell({0, 1, 2, 3}, busy={1}), True),  # interrupted, but a needed rank has not stopped
        (FakeCell({0, 1, 2, 3}, busy={3}), False),
        (
            FakeCell({2, 3}, busy=()),
            True,
        ),  # all ranks have answered, but the cell has not ended: its group may need repair
    ],
)
def test_what_a_cell_waits_for(earlier: Any, waits: bool) -> None:
    cell_queue = CellQueue(None, None)  # type: ignore[arg-type]
    cell: Any = FakeCell({0, 1})
    for each in (earlier, cell):
        cell_queue.enter(each)
    assert cell_queue.before(cell) is (earlier if waits else None)
    cell_queue.leave(earlier)
    assert cell_queue.before(cell) is None


@pytest.mark.parametrize(("n_formed", "has_group", "wants"), [(1, True, False), (1, False, True), (0, True, True)])
def test_the_first_cell_uses_the_group_that_distributed_tensors_have_formed(
    n_formed: int, has_group: bool, wants: bool
) -> None:
    queries = SimpleNamespace(
        n_groups_formed=n_formed, has_group=lambda procs: has_group, share_group=lambda procs: True
    )
    mesh: Any = SimpleNamespace(
        runtime=SimpleNamespace(queries=queries), procs=(0, 1), ranks=(0, 1), incarnations=lambda: (0, 0), deaths=dict,
        view=lambda: SimpleNamespace(ranks=()),
    )  # fmt: skip
    cell_queue = CellQueue(mesh, lambda mesh: mesh)
    assert cell_queue.wants_group(mesh) is wants
    assert cell_queue.needs_group is wants
    mesh.incarnations = lambda: (0, 1)
    assert cell_queue.wants_group(mesh)
