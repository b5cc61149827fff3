"""Which ranks have the same part of a sharded tensor, and what a refill says."""

from __future__ import annotations

import pytest

from monarch_kernel.tensor.inventory import copies_for
from monarch_kernel.tensor.refilling import Refilled

INDEXES = [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("placements", "copies"),
    [
        (("R", "R"), [0, 1, 2]),
        (("S(0)", "R"), [2]),
        (("R", "S(0)"), [1]),
        (("P(sum)", "R"), [2]),
        (("S(0)", "S(1)"), []),
    ],
)
def test_ranks_with_the_same_indexes_along_sharded_axes_are_copies(
    placements: tuple[str, str], copies: list[int]
) -> None:
    assert copies_for(3, INDEXES, placements) == copies


def test_a_refill_says_what_is_lost() -> None:
    assert repr(Refilled((), 0, 0, 0, {})) == "nothing to refill: no rank has lost a part of a tensor"
    said = repr(Refilled((3,), 17, 2048, 1, {"x": 1, "model": 12, "": 2}))
    assert said == (
        "[3]: 17 tensors copied from other ranks (2.0 KiB), 1 loaded\n"
        "  lost: x, model (12), 2 without a variable; make them again, or call refill(load=...)"
    )
