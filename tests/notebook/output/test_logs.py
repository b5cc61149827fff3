"""Tests the last lines of logs."""

from __future__ import annotations

import random
from typing import Literal

import pytest

from monarch_kernel.notebook.output.folding import render
from monarch_kernel.notebook.output.logs import CellMark, log_lines
from monarch_kernel.runtime.host.logs import LogRecord
from tests.support.timing import Bar

STREAMS: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stderr")


def shown(
    logs: dict[int, list[LogRecord]], n_lines: int, marks: list[CellMark] | None = None, stderr: bool = False
) -> list[str]:
    lines = log_lines(logs, marks or [], n_lines=n_lines, stderr=stderr)
    return [line for _, text in render(lines) for line in text.splitlines()]


@pytest.mark.parametrize("stderr", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_few_lines_are_the_last_lines_of_many(seed: int, stderr: bool) -> None:
    dice = random.Random(seed)
    pieces = ("a", "bc\n", "d\ne", "\n", "f\n\ng", "h\ri\n")
    records = [LogRecord(float(i), dice.choice(STREAMS), f"{i}{dice.choice(pieces)}") for i in range(60)]
    marks = [CellMark(float(at), at, frozenset({0})) for at in (0, 20, 40)]

    def last(n: int) -> list[tuple[str, str]]:
        lines = log_lines({0: records}, marks, n_lines=n, stderr=stderr, raw=True)
        return [(line.stream, line.text) for line in lines if "-- cell" not in line.text]

    everything = last(1_000)
    for n in range(1, 30):
        few = last(n)
        assert len(few) == min(n, len(everything))
        for stream in STREAMS:  # the streams have no order between them
            theirs = [line for line in few if line[0] == stream]
            assert not theirs or theirs == [line for line in everything if line[0] == stream][-len(theirs) :]


def test_a_line_that_began_long_before_is_whole() -> None:
    records = [LogRecord(0.0, "stderr", "x\nstarted "), *(LogRecord(1.0, "stdout", f"{i}\n") for i in range(100))]
    records.append(LogRecord(2.0, "stderr", "and ended\n"))
    assert "[0] started and ended" in shown({0: records}, 2)
    assert shown({0: records}, 1, stderr=True) == ["[0] started and ended"]


def test_a_cell_that_ends_without_a_newline_has_its_own_line() -> None:
    marks = [CellMark(0.0, 1, frozenset({0})), CellMark(2.0, 2, frozenset({0}))]
    records = [
        LogRecord(1.0, "stdout", "no newline"),
        LogRecord(1.1, "stderr", "50%\r100%"),
        LogRecord(3.0, "stdout", "done\n"),
    ]
    lines = [line.partition(",")[0] for line in shown({0: records}, 9, marks) if "100%" not in line]
    assert lines == ["[0] -- cell [1]", "[0] no newline", "[0] -- cell [2]", "[0] done"]
    assert shown({0: records}, 1, marks)[1:] == ["[0] done"]


@pytest.mark.parametrize(
    ("counts", "note"),
    [
        ((5,), ""),
        ((2_000,), "… 1,995 earlier lines left out here; more: %mesh logs t --lines 2000"),
        ((6, 6), "… 1 earlier line of each rank left out here; more: %mesh logs t --lines 1000"),
        ((3, 1_900), "… up to 1,895 earlier lines of a rank left out here; more: %mesh logs t --lines 2000"),
    ],
)
def test_it_says_how_many_earlier_lines_there_are_and_how_to_see_them(counts: tuple[int, ...], note: str) -> None:
    logs = {
        rank: [LogRecord(1.0, "stdout", "".join(f"{i}\n" for i in range(count)))] for rank, count in enumerate(counts)
    }
    lines = log_lines(logs, [], n_lines=5, command="%mesh logs t")
    assert [line.text for line in lines if line.note] == ([note] if note else [])
    assert lines[0].note is bool(note)


def test_few_lines_of_many_ranks_take_no_time(bar: Bar) -> None:
    log = [LogRecord(float(i), "stdout", "".join(f"{i} {j}\n" for j in range(1_000))) for i in range(500)]
    with bar.below(0.5, "the last two lines of four million"):
        assert len(shown(dict.fromkeys(range(8), log), 2)) == 2
