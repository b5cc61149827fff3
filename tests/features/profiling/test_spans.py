"""Sets of spans of time are those of the moments that they cover."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.features.profiling.spans import Spans, contains, length, minus, union, within

SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8)


def moments(spans: Spans) -> set[float]:
    return {at for start, end in spans for at in range(round(start), round(end))}


@given(SPANS, SPANS)
def test_sets_of_spans_are_sets_of_moments(ones: Spans, others: Spans) -> None:
    one, other = union(ones), union(others)
    assert moments(one) == {at for start, end in ones for at in range(round(start), round(end))}
    assert moments(minus(one, other)) == moments(one) - moments(other)
    assert moments(within(one, 5, 9)) == moments(one) & set(range(5, 9))
    assert length(one) == len(moments(one))
    assert contains(one, range(21)) == [at in moments(one) for at in range(21)]


@given(SPANS, SPANS)
def test_spans_are_sorted_and_apart(ones: Spans, others: Spans) -> None:
    for spans in (union(ones), minus(union(ones), union(others))):
        assert all(start < end for start, end in spans)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
