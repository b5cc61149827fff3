"""Versions that differ, and clocks: hosts that are refused, warnings, and their texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.net.wire.messages import Software
from monarch_kernel.runtime.controller.host_compatibility import (
    Clock,
    clock_warning,
    compare,
    differences,
    refusal,
    software_table,
)
from monarch_kernel.runtime.host.software import PACKAGES, software_here


def software(
    python: str = "3.11.4", ours: str = "0.1.0", torch: str = "2.9.0+cpu", pickle: str = "3.1.0", path: str = "/here"
) -> Software:
    return Software(python, path, {"monarch_kernel": ours, "torch": torch, "cloudpickle": pickle})


HERE = software()


def test_installed_versions_are_found_without_imports() -> None:
    here = software_here()
    assert here.python.count(".") >= 2
    assert set(here.packages) == set(PACKAGES)
    assert all(here.packages.values())
    assert refusal(here, here) == ""


@pytest.mark.parametrize(
    ("there", "matters"),
    [
        (software(), None),
        (software(torch="2.9.0+cu128"), None),
        (software(torch="2.9.0"), None),
        (software(python="3.11.9"), False),
        (software(torch="2.9.1+cu128"), False),
        (software(pickle="3.0.0"), False),
        (software(python="3.12.4"), True),
        (software(torch="2.10.0"), True),
        (software(ours="0.1.1"), True),
        (software(pickle="2.2.0"), True),
        (software(torch=""), True),
        (Software("3.11.4", "/there", {"monarch_kernel": "0.1.0"}), True),
    ],
)
def test_which_versions_can_work_together(there: Software, matters: bool | None) -> None:
    found = differences(HERE, there)
    assert bool(found) == (matters is not None)
    assert any(difference.matters for difference in found) == bool(matters)
    assert bool(refusal(HERE, there)) == bool(matters)


def test_a_refusal_names_versions_and_interpreters() -> None:
    there = software(python="3.12.1", torch="", pickle="3.0.0", path="/opt/python")
    assert refusal(HERE, there) == (
        "Python is 3.12.1 there and 3.11.4 here; torch is not installed there and 2.9.0+cpu here "
        "(/opt/python there, /here here)"
    )


def test_the_table_has_one_row_for_equal_hosts_and_the_columns_that_differ() -> None:
    other = software(torch="2.8.0", path="/opt/python")
    assert software_table(HERE, [("n1", other), ("n2", HERE), ("n3", other)]) == [
        "host         executable   torch",
        "this kernel  /here        2.9.0+cpu",
        "n1, n3       /opt/python  2.8.0",
        "n2           /here        2.9.0+cpu",
    ]
    many = software_table(HERE, [(f"n{i}", other) for i in range(9)])
    assert many[2].startswith("n0, n1, n2 and 6 more")


@given(
    st.floats(-1e6, 1e6),
    st.floats(0, 10),
    st.floats(0, 10),
)
def test_the_true_offset_of_a_clock_is_within_the_error(offset_s: float, there_s: float, back_s: float) -> None:
    sent_s = 1_000_000.0
    at_s = sent_s + there_s + offset_s
    clock = Clock.read(sent_s, at_s, sent_s + there_s + back_s)
    assert abs(clock.offset_s - offset_s) <= clock.error_s + 1e-3
    if abs(offset_s) <= 1.0 - 1e-3:
        assert not clock_warning("n1", clock)  # however long the messages took


def test_the_warning_of_a_clock_says_ahead_or_behind() -> None:
    assert clock_warning("n1", Clock.read(100.0, 103.1, 100.2)) == "the clock of n1 is 3.0 s ahead of this machine's"
    assert clock_warning("n1", Clock.read(100.0, 98.0, 100.0)) == "the clock of n1 is 2.0 s behind this machine's"


def test_hosts_are_compared_together() -> None:
    patch, right, wrong = software(torch="2.9.1"), Clock(0.1, 0.0), Clock(9.0, 0.5)
    fine = compare(HERE, [("a", HERE, right), ("b", patch, None), ("c", patch, wrong)])
    assert fine.table == ()
    assert fine.warnings == (
        "torch is 2.9.1 on b, c and 2.9.0+cpu here",
        "the clock of c is 9.0 s ahead of this machine's",
    )
    refused = compare(HERE, [("a", HERE, right), ("b", software(python="3.12.0", path="/p"), right)])
    assert refused.warnings == ()
    assert refused.table == (
        "host         executable  Python",
        "this kernel  /here       3.11.4",
        "a            /here       3.11.4",
        "b            /p          3.12.0",
    )
