"""Tests that logs, warnings and bars of a rank are left out and counted where they only repeat those of another rank."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_kernel.notebook.output.folding import OutputFolder, render
from monarch_kernel.notebook.output.rate_limit import Stream
from monarch_kernel.notebook.output.repeats import MAX_KEYS, Repeats, is_logged

WARNING = "/site/torch/c10d.py:83: FutureWarning: `gather` is deprecated.\n  return func(*args, **kwargs)\n"
WHY = "left out: logs, warnings or bars that were shown above up to 5 s before (all: --raw)"


class Cell:
    """A cell on ranks: what each rank writes at a time, and the text that appears."""

    def __init__(self, n_ranks: int = 3, **options: Any) -> None:
        self.folder = OutputFolder(range(n_ranks), **options)
        self.lines: list[Any] = []
        self.now = 0.0

    def write(self, rank: int, text: str, *, at: float, stream: Stream = "stderr") -> None:
        self.drain(at)
        self.folder.feed(rank, stream, text, at)
        self.drain(at + 0.2)

    def drain(self, at: float) -> None:
        self.now = max(self.now, at)
        self.lines += self.folder.drain(self.now)

    def finish(self) -> list[str]:
        self.lines += self.folder.finish(self.now)
        return "".join(text for _, text in render(self.lines)).splitlines()


def of_two_ranks(first: str, later: str, *, at: float = 3.0, stream: Stream = "stderr", **options: Any) -> list[str]:
    cell = Cell(2, **options)
    cell.write(0, first, at=0.0, stream=stream)
    cell.write(1, later, at=at, stream=stream)
    return cell.finish()


class TestALateRepeatOfAnotherRank:
    @pytest.mark.parametrize(
        ("first", "later"),
        [
            (
                "[2026-11-28 14:42:28,470] [WARNING] [a.py:213:get] To CPU\n",
                "[2026-11-28 14:42:30,792] [WARNING] [a.py:213:get] To CPU\n",
            ),
            ("12:00:01 INFO 4711 ready in 0x\n", "12:00:03 INFO 4711 ready in 0x\n"),
            ("[transformers] The tokenizer has new tokens\n", "[transformers] The tokenizer has new tokens\n"),
            ("WARNING:root:slow disk\n", "WARNING:root:slow disk\n"),
            ("W1128 14:42:28.470123 17 c10d.cpp:9] no device\n", "W1128 14:42:30.512345 18 c10d.cpp:9] no device\n"),
        ],
        ids=["deepspeed", "time", "transformers", "logging", "torch"],
    )
    def test_of_a_log_is_left_out_and_counted(self, first: str, later: str) -> None:
        assert of_two_ranks(first, later) == [f"[0] {first.rstrip()}", f"… 1 line of [1] {WHY}"]
        assert of_two_ranks(first, later, raw=True) == [f"[0] {first.rstrip()}", f"[1] {later.rstrip()}"]

    def test_of_a_warning_is_left_out_with_its_line_of_code(self) -> None:
        shown = [f"[0] {line}" for line in WARNING.splitlines()]
        assert of_two_ranks(WARNING, WARNING) == [*shown, f"… 2 lines of [1] {WHY}"]

    def test_is_found_where_it_arrives_in_pieces(self) -> None:
        cell = Cell(2)
        cell.write(0, WARNING, at=0.0)
        for i, piece in enumerate(WARNING.splitlines(keepends=True)):
            cell.write(1, piece, at=1.0 + i)
        assert cell.finish()[2:] == [f"… 2 lines of [1] {WHY}"]

    @pytest.mark.parametrize(
        "line",
        [
            "step 3: loss 0.5\n",
            "[0.1, 0.2]\n",
            "2026-11-28 14:42:28,470 ERROR no route to host\n",
            "ERROR:root:no route to host\n",
            "[rank0]: ValueError: no data\n",
            "E1128 14:42:28.470123 17 c10d.cpp:9] no device\n",
            "Traceback (most recent call last):\n",
        ],
    )
    def test_of_an_error_or_of_what_a_program_prints_appears(self, line: str) -> None:
        assert of_two_ranks(line, line) == [f"[0] {line.rstrip()}", f"[1] {line.rstrip()}"]

    def test_on_stdout_appears_unless_it_has_a_time_stamp(self) -> None:
        assert of_two_ranks("[train] ready\n", "[train] ready\n", stream="stdout") == [
            "[0] [train] ready",
            "[1] [train] ready",
        ]
        lines = of_two_ranks("12:00:01 INFO ready\n", "12:00:02 INFO ready\n", stream="stdout")
        assert lines == ["[0] 12:00:01 INFO ready", f"… 1 line of [1] {WHY}"]

    def test_appears_after_more_than_five_seconds(self) -> None:
        assert of_two_ranks("WARNING:root:slow\n", "WARNING:root:slow\n", at=5.5) == [
            "[0] WARNING:root:slow",
            "[1] WARNING:root:slow",
        ]

    def test_that_another_number_tells_apart_appears(self) -> None:
        lines = of_two_ranks("12:00:01 INFO loss 0.5\n", "12:00:02 INFO loss 0.7\n")
        assert lines == ["[0] 12:00:01 INFO loss 0.5", "[1] 12:00:02 INFO loss 0.7"]


class TestTheSameRank:
    def test_logs_a_line_again_and_it_appears(self) -> None:
        cell = Cell(2)
        for at in range(2):
            for rank in range(2):
                cell.write(rank, f"12:00:0{at} INFO saved\n", at=at + rank / 2)
        assert cell.finish() == ["[0] 12:00:00 INFO saved", "[0] 12:00:01 INFO saved", f"… 2 lines of [1] {WHY}"]

    def test_repeats_a_warning_in_each_step_and_it_appears_once(self) -> None:
        cell = Cell(1)
        for step in range(10):
            cell.write(0, WARNING, at=2.0 * step)
        assert cell.finish() == [*(f"[0] {line}" for line in WARNING.splitlines()), f"… 18 lines of [0] {WHY}"]


class TestTheNote:
    def test_comes_while_the_cell_runs_once_nothing_more_is_left_out(self) -> None:
        cell = Cell()
        for rank in range(3):
            cell.write(rank, "WARNING:root:slow\n", at=float(rank))
        cell.drain(6.9)
        assert not any(line.note for line in cell.lines)
        cell.drain(7.3)
        assert [line.text for line in cell.lines if line.note] == [f"… 2 lines of [1-2] {WHY}"]
        assert len(cell.finish()) == 2

    def test_comes_every_half_minute_where_lines_are_left_out_all_the_time(self) -> None:
        cell = Cell(1)
        for step in range(34):
            cell.write(0, WARNING, at=float(step))
        assert [line.text for line in cell.lines if line.note] == [f"… 62 lines of [0] {WHY}"]


class TestBars:
    BAR = "\rMap:   0%|          | 0/64\rMap: 100%|##########| 64/64 [00:00<00:00, {rate} examples/s]\n"

    def test_of_other_ranks_that_end_later_are_left_out(self) -> None:
        cell = Cell()
        for rank in range(3):
            cell.write(rank, self.BAR.format(rate=rank), at=float(rank))
            cell.drain(rank + 0.9)
        assert cell.finish() == [
            "[0] Map: 100%|##########| 64/64 [00:00<00:00, 0 examples/s]",
            f"… 2 lines of [1-2] {WHY}",
        ]

    def test_that_end_later_join_the_line_of_a_bar_that_was_live(self) -> None:
        folder = OutputFolder(range(2))
        start, end = self.BAR.format(rate=1).rsplit("\r", 1)
        blocks = []
        folder.feed(0, "stderr", start, 0.0)
        for at in (0.1, 0.5):
            assert folder.drain(at) == []
            blocks += folder.bars(at)
        folder.feed(0, "stderr", f"\r{end}", 1.0)
        folder.drain(1.2)
        folder.feed(1, "stderr", f"{start}\r{end}", 2.0)
        for at in (2.15, 2.5):
            assert folder.drain(at) == []
        assert folder.finish(3.0) == []
        blocks += folder.bars(3.0, last=True)
        assert blocks[0].text.startswith("[0] Map:   0%")
        assert blocks[-1].text == "[0-1] Map: 100%|##########| 64/64 [00:00<00:00, 1 examples/s]"

    def test_with_other_totals_appear(self) -> None:
        cell = Cell(2)
        cell.write(0, "\rMap:   0%\rMap: 100%| 3/3\n", at=0.0)
        cell.drain(0.9)
        cell.write(1, "\rMap:   0%\rMap:  50%| 1/2\n", at=1.0)
        cell.drain(1.9)
        assert cell.finish() == ["[0] Map: 100%| 3/3", "[1] Map:  50%| 1/2"]


def test_few_lines_are_remembered() -> None:
    repeats = Repeats()
    assert not repeats.leave_out((0,), "first", 0.0)
    for i in range(MAX_KEYS):
        assert not repeats.leave_out((0,), str(i), 0.0)
    assert not repeats.leave_out((1,), "first", 0.0)
    assert repeats.leave_out((1,), str(MAX_KEYS - 1), 0.0)


@pytest.mark.parametrize(
    "line", ["[0] 3", "[Rank 3] x", "a.py:3: no Warning: x", "DeprecationWarning: x", "INFO: x", "12:00:01"]
)
def test_lines_that_only_look_like_logs_are_none(line: str) -> None:
    assert not is_logged(line, True)
