"""Findings as text: columns are aligned, the sign is also a word, and the remedy follows an arrow."""

from __future__ import annotations

import pytest

from monarch_kernel.doctor.report import Finding, Sign, as_json, exit_code, finding_text, summary

GOOD = Finding("Python", Sign.OK, "3.11.7")
DOUBTED = Finding("open files", Sign.WARNING, "256 at most", "ulimit -n 4096")
BAD = Finding("torch", Sign.PROBLEM, "not installed", "install it")


def test_columns_are_aligned_and_signs_are_words_too() -> None:
    assert [finding_text(each, 10) for each in (GOOD, DOUBTED, BAD)] == [
        "✓ ok       Python      3.11.7",
        "! warning  open files  256 at most\n                       → ulimit -n 4096",
        "✗ problem  torch       not installed\n                       → install it",
    ]


def test_long_text_wraps_between_words_and_paths_stay_whole() -> None:
    path = "/a-long/path" * 6
    text = finding_text(Finding("x", Sign.OK, f"one two three four five {path}", "do this\nand that"), 1, 46)
    assert text.splitlines() == [
        "✓ ok       x  one two three four five",
        f"              {path}",
        "              → do this",
        "                and that",
    ]


def test_control_sequences_do_not_reach_the_terminal() -> None:
    assert finding_text(Finding("x", Sign.OK, "\x1b[31mred\x1b]0;title\x07"), 1) == "✓ ok       x  red"


@pytest.mark.parametrize(
    ("findings", "code", "text"),
    [
        ([GOOD, GOOD], 0, "All 2 items are ok."),
        ([GOOD, DOUBTED], 0, "1 warning among 2 items; each arrow (→) says what to do."),
        ([BAD, DOUBTED, BAD], 1, "2 problems and 1 warning among 3 items; each arrow (→) says what to do."),
    ],
)
def test_only_problems_set_the_exit_code(findings: list[Finding], code: int, text: str) -> None:
    assert (exit_code(findings), summary(findings)) == (code, text)


def test_findings_as_json() -> None:
    report = as_json([GOOD, DOUBTED], "1.2")
    assert (report["version"], report["problems"], report["warnings"]) == ("1.2", 0, 1)
    assert report["findings"][1] == {
        "item": "open files",
        "sign": "warning",
        "found": "256 at most",
        "remedy": "ulimit -n 4096",
    }
