"""The comparison of two commits pairs rounds that ran next to each other."""

from __future__ import annotations

from benchmarks.compare import compare, table


def test_the_ratio_is_that_of_neighbouring_rounds() -> None:
    """The machine was ten times slower in the second round, and both sides with it."""
    base = [{"call": {"us": 100.0, "switches": 0.0}}, {"call": {"us": 1000.0, "switches": 2.0}}]
    new = [{"call": {"us": 50.0, "switches": 0.0}}, {"call": {"us": 600.0, "switches": 1.0}}]
    rows = compare(base, new)
    assert rows[0] == ("call", "us", 550.0, 325.0, 0.55, 0.5, 0.6)
    assert rows[1] == ("call", "switches", 1.0, 0.5, 0.25, 0.0, 0.5)
    assert table(rows).splitlines()[2] == "| call | us | 550.0 | 325.0 | 0.55 (0.50-0.60) |"
