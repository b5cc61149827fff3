"""Bandwidths of collectives are those of nccl-tests, and what ranks send is what ranks receive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.features.traffic.bandwidth import Moved, bus_factor, moved


@pytest.mark.parametrize(
    ("operation", "factor"),
    [  # for 8 ranks, from nccl-tests
        ("all_reduce", 14 / 8),
        ("all_gather", 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_to_all", 7 / 8),
        ("gather", 7 / 8),
        ("scatter", 7 / 8),
        ("broadcast", 1),
        ("reduce", 1),
        ("send", 1),
        ("recv", 1),
    ],
)
def test_the_bus_factor_is_that_of_nccl_tests(operation: str, factor: float) -> None:
    assert bus_factor(operation, 8) == factor


def test_what_a_rank_moves() -> None:
    # For 4 ranks; outputs and inputs in bytes.
    assert moved("all_reduce", 4, 100, 100) == Moved(100, 100, 150, 150)
    assert moved("all_gather", 4, 400, 100) == Moved(400, 400, 300, 300)
    assert moved("reduce_scatter", 4, 100, 400) == Moved(400, 400, 300, 300)
    assert moved("all_to_all", 4, 400, 200, own_output=100, own_input=50) == Moved(400, 400, 300, 150)
    assert moved("broadcast", 4, 100, 100, is_root=True) == Moved(100, 100, 0, 100)
    assert moved("broadcast", 4, 100, 100) == Moved(100, 100, 100, 0)
    assert moved("reduce", 4, 100, 100, is_root=True) == Moved(100, 100, 100, 0)
    assert moved("reduce", 4, 100, 100) == Moved(100, 100, 0, 100)
    assert moved("gather", 4, 400, 100, is_root=True) == Moved(400, 400, 300, 0)
    assert moved("gather", 4, 0, 100) == Moved(100, 400, 0, 100)
    assert moved("scatter", 4, 100, 400, is_root=True) == Moved(400, 400, 0, 300)
    assert moved("scatter", 4, 100, 0) == Moved(100, 400, 100, 0)
    assert moved("send", 4, 100, 100) == Moved(100, 100, 0, 100)
    assert moved("recv", 4, 100, 100) == Moved(100, 100, 100, 0)
    assert moved("barrier", 4, 0, 0) == Moved(0, 0, 0, 0)


@given(st.integers(1, 64), st.integers(0, 1 << 20))
def test_ranks_receive_together_what_they_send_together(ranks: int, nbytes: int) -> None:
    whole = ranks * nbytes
    each = {
        "all_reduce": [moved("all_reduce", ranks, nbytes, nbytes)] * ranks,
        "all_gather": [moved("all_gather", ranks, whole, nbytes)] * ranks,
        "reduce_scatter": [moved("reduce_scatter", ranks, nbytes, whole)] * ranks,
        "all_to_all": [moved("all_to_all", ranks, whole, whole, own_output=nbytes, own_input=nbytes)] * ranks,
        "gather": [moved("gather", ranks, whole if i == 0 else 0, nbytes, is_root=i == 0) for i in range(ranks)],
        "scatter": [moved("scatter", ranks, nbytes, whole if i == 0 else 0, is_root=i == 0) for i in range(ranks)],
    }
    for operation, parts in each.items():
        assert sum(part.nbytes_in for part in parts) == sum(part.nbytes_out for part in parts), operation
        sizes = {part.size for part in parts}
        assert len(sizes) == 1
        if ranks == 1:
            assert parts[0].nbytes_in == 0
        elif operation not in ("gather", "scatter"):  # their links differ
            assert parts[0].nbytes_in == int(sizes.pop() * bus_factor(operation, ranks) + 1e-6)
    for operation in ("broadcast", "reduce"):
        parts = [moved(operation, ranks, nbytes, nbytes, is_root=i == 0) for i in range(ranks)]
        assert all(part.nbytes_in + part.nbytes_out == (nbytes if ranks > 1 else 0) for part in parts)
