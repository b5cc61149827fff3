"""Tests output folding: common lines appear once, each rank keeps its order, floods are bounded and counted."""

from __future__ import annotations

import random
import re
import time
import tracemalloc
from collections import Counter
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.notebook.output.folding import FoldedItem, FoldedLine, OutputFolder, render

Stream = Literal["stdout", "stderr"]
Events = list[tuple[int, Stream, str]]

UNBOUNDED: dict[str, Any] = {
    "lines_per_s": 1e9,
    "nbytes_per_s": 1e12,
    "burst_lines": 10**9,
    "burst_nbytes": 10**12,
    "first_lines": 10**9,
    "max_line_length": 10**6,
}


def shown(lines: list[Any]) -> list[tuple[tuple[int, ...], str]]:
    return [(line.ranks, line.text) for line in lines]


def of_rank(lines: list[Any], rank: int) -> list[tuple[str, str]]:
    return [(line.stream, line.text) for line in lines if rank in line.ranks and not line.note]


class TestLinesThatDifferInTimesAndTheLike:
    def fold(self, *texts: str, **options: Any) -> list[tuple[tuple[int, ...], str]]:
        folder = OutputFolder(range(len(texts)), **options)
        for rank, text in enumerate(texts):
            folder.feed(rank, "stdout", text, now=0.0)
        return shown([*folder.drain(0.0), *folder.finish(0.0)])

    @pytest.mark.parametrize(
        "line",
        [
            "12:35:3{rank}.7{rank}1 INFO train: epoch 0 done",
            "2026-11-26 12:35:3{rank},123 - train - INFO - epoch 0 done",
            "INFO 2026/11/26 12:35:3{rank} epoch 0 done",
            "2026-11-26 12:35:3{rank},123 2910{rank} INFO epoch 0 done",
            "[2026-11-26 12:35:30,123] [INFO] [utils.py:73] MA 0.0{rank} GB, used = {rank}.5 GiB, percent = {rank}.1%",
            "2026-11-26 12:35:3{rank},123 [2910{rank}] [ERROR] epoch 0 failed",
            "\x1b[2;36m[12:35:3{rank}]\x1b[0m \x1b[34mINFO\x1b[0m epoch 0 done",
            "[rank{rank}]:[E1126 04:39:58.60673253{rank} ProcessGroupGloo.cpp:67] [Rank {rank}]: no answer",
            "[rank{rank}]: ValueError: no data",
            "[rank: {rank}] Seed set to 42",
            "(Rank {rank}/3) ready",
            "Rank {rank}: 3 rows",
            "RANK {rank} | ready",
            "rank[{rank}]: ready",
            "INFO:root:rank {rank}: ready",
            "2026-11-26 12:35:3{rank},123 - rank {rank} - INFO - ready",
            "2026-11-26 12:35:3{rank},123 INFO ready after 1.{rank} s, 0.{rank}3ms each",
            "<Net object at 0x7f22aa0{rank}1234>",
            "a.py:3: DeprecationWarning: This process (pid=400{rank}) is multi-threaded",
        ],
    )
    def test_they_fold_with_the_text_of_the_lowest_rank_and_a_note(self, line: str) -> None:
        texts = [line.format(rank=rank) for rank in range(3)]
        lines = self.fold(*(f"before\n{text}\nafter\n" for text in texts))
        assert lines[:3] == [((0, 1, 2), "before"), ((0, 1, 2), texts[0]), ((0, 1, 2), "after")]
        ((ranks, note),) = lines[3:]
        assert ranks == ()
        assert note.startswith(
            "… lines of several ranks are equal but for numbers such as times, ranks or pids; those of"
        )
        assert note.endswith("the lowest rank are shown (all: --raw)")
        assert [text for _, text in self.fold(*(f"{text}\n" for text in texts), raw=True)] == texts

    @pytest.mark.parametrize(
        "line",
        [
            "loss {rank}.5",
            "12:35:30 INFO loss {rank}.5",
            "my memory: {rank}.5 GiB",
            "12:35:30 INFO 2910{rank}",
            "12:35:30 step 2910{rank} INFO",
            "2026-11-26 12:35:30 rank {rank} has 3 rows",
            "4{rank}71",
            "pid {rank}471",
            "0x7f22aa0{rank}1234",
            "took 00:00:1{rank}",
            "12:35:3{rank}",
            "1{rank}.5 GiB",
            "[rank{rank}] 3.0",
            "Rank {rank}: 3.0",
            "rank {rank} has 3 rows",
            "Rank {rank}: loss {rank}.5",
            "ready after 1.{rank} s",
        ],
    )
    def test_lines_whose_numbers_may_carry_meaning_do_not_fold(self, line: str) -> None:
        texts = [line.format(rank=rank) for rank in range(3)]
        assert self.fold(*(f"{text}\n" for text in texts)) == [((rank,), text) for rank, text in enumerate(texts)]

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
    @pytest.mark.parametrize("prefix", ["rank {rank}:", "[rank{rank}]", "INFO:root:Rank {rank} |"])
    def test_what_all_ranks_print_of_each_rank_folds_without_a_note(self, prefix: str, order: tuple[int, ...]) -> None:
        """As after an `all_gather`: the line of the rank itself is no prefix then."""
        lines = [f"{prefix.format(rank=rank)} {rows} rows" for rank, rows in enumerate((3, 5, 3))]
        folder = OutputFolder(range(3))
        for rank in order:
            folder.feed(rank, "stdout", "\n".join(lines) + "\n", now=0.0)
        assert shown(folder.finish(0.0)) == [((0, 1, 2), line) for line in lines]

    def test_equal_lines_have_no_note(self) -> None:
        assert self.fold("12:35:30 INFO x\n", "12:35:30 INFO x\n") == [((0, 1), "12:35:30 INFO x")]

    def test_incomplete_lines_fold_and_the_note_comes_once(self) -> None:
        folder = OutputFolder(range(2))
        for cell in range(2):
            folder.feed(0, "stdout", f"12:00:01 INFO {cell}", now=0.0)
            folder.feed(1, "stdout", f"12:00:02 INFO {cell}", now=0.0)
            assert shown(folder.finish(0.0))[0] == ((0, 1), f"12:00:01 INFO {cell}")
        assert folder.finish(0.0) == []

    def test_each_rank_keeps_its_own_texts_in_order(self) -> None:
        chance = random.Random(0)
        stamp = lambda: f"12:00:{chance.randrange(60):02}.{chance.randrange(1000):03}"  # noqa: E731
        written = [[f"{stamp()} INFO {chance.randrange(5)}" for _ in range(500)] for _ in range(3)]
        folder = OutputFolder(range(3), repeats=True, **UNBOUNDED)
        for rank, texts in enumerate(written):
            folder.feed(rank, "stdout", "\n".join(texts) + "\n", now=0.0)
        lines = [line for line in folder.finish(0.0) if not line.note]  # type: ignore[union-attr]
        for rank, texts in enumerate(written):
            assert [text.split(" ", 1)[1] for _, text in of_rank(lines, rank)] == [
                text.split(" ", 1)[1] for text in texts
            ]
            mine = [line.text for line in lines if line.ranks[0] == rank]  # type: ignore[union-attr]
            assert mine == [text for text in texts if text in set(mine)][: len(mine)]


class TestMerging:
    def test_a_line_of_all_ranks_is_shown_immediately_and_once(self) -> None:
        folder = OutputFolder(range(4))
        for rank in range(4):
            folder.feed(rank, "stdout", "6.0\n", now=1.0)
        assert folder.drain(1.0) == [FoldedLine((0, 1, 2, 3), "stdout", "6.0")]
        assert not folder.pending

    def test_a_line_of_some_ranks_waits_for_the_others_for_the_window_only(self) -> None:
        folder = OutputFolder(range(3), window_s=0.05)
        folder.feed(0, "stdout", "a\n", now=1.0)
        folder.feed(2, "stdout", "a\n", now=1.02)
        assert folder.drain(1.049) == []
        assert folder.pending
        assert shown(folder.drain(1.051)) == [((0, 2), "a")]
        folder.feed(1, "stdout", "a\n", now=1.06)
        assert folder.drain(1.1) == []
        assert shown(folder.drain(1.12)) == [((1,), "a")]

    def test_lines_in_front_of_a_common_line_go_first(self) -> None:
        folder = OutputFolder(range(2))
        folder.feed(0, "stdout", "A\nB\nC\n", now=0.0)
        folder.feed(1, "stdout", "X\nA\nB\nC\n", now=0.0)
        assert shown(folder.drain(0.0)) == [((1,), "X"), ((0, 1), "A"), ((0, 1), "B"), ((0, 1), "C")]

    def test_repeated_lines_are_matched_correctly(self) -> None:
        folder = OutputFolder(range(2))
        folder.feed(0, "stdout", "-\nA\n-\nB\n-\nC\n-\n", now=0.0)
        folder.feed(1, "stdout", "X\n-\nA\n-\nB\n-\nC\n-\n", now=0.0)
        assert shown(folder.drain(0.0)) == [((1,), "X"), *(((0, 1), text) for text in "-A-B-C-")]
        folder.feed(0, "stdout", "-\nA\n-\nB\nC\n", now=1.0)
        folder.feed(1, "stdout", "-\nA\n-\nY\nB\nC\n", now=1.0)
        folder.feed(0, "stdout", "-\n", now=1.0)
        folder.feed(1, "stdout", "Z\n-\n", now=1.0)
        assert [text for ranks, text in shown(folder.finish(1.0)) if ranks != (0, 1)] == ["Y", "Z"]

    def test_few_texts_in_any_order_keep_their_order_beyond_the_look_ahead(self) -> None:
        chance = random.Random(0)
        folder = OutputFolder(range(3), **UNBOUNDED)
        written = [[f"{chance.randrange(20)}" for _ in range(3_000)] for _ in range(3)]
        for rank, texts in enumerate(written):
            folder.feed(rank, "stdout", "\n".join(texts) + "\n", now=0.0)
        lines = folder.finish(0.0)
        for rank, texts in enumerate(written):
            assert [text for _, text in of_rank(lines, rank)] == texts

    def test_shown_lines_take_no_memory(self) -> None:
        folder = OutputFolder(range(2), **UNBOUNDED)
        tracemalloc.start()
        try:
            for tick in range(500):
                for rank in range(2):
                    # Some common lines, some not, and always one that is not due yet.
                    text = "".join(f"{tick}: {i} {'same' if i % 2 else rank}\n" for i in range(20))
                    folder.feed(rank, "stdout", text, now=tick * 0.04)
                folder.drain(tick * 0.04)
            used, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert used < 500_000

    def test_a_line_that_one_rank_lacks_does_not_separate_the_others(self) -> None:
        folder = OutputFolder(range(3))
        folder.feed(0, "stdout", "A\nB\nC\n", now=0.0)
        folder.feed(1, "stdout", "A\nC\n", now=0.0)
        folder.feed(2, "stdout", "A\nB\nC\n", now=0.0)
        assert shown(folder.drain(0.05)) == [((0, 1, 2), "A"), ((0, 2), "B"), ((0, 1, 2), "C")]

    def test_where_lines_cross_the_nearer_partner_wins(self) -> None:
        folder = OutputFolder(range(2))
        folder.feed(0, "stdout", "A\nB\nC\nX\n", now=0.0)
        folder.feed(1, "stdout", "X\nA\nB\nC\n", now=0.0)
        assert shown(folder.finish(0.0)) == [
            ((1,), "X"),
            ((0, 1), "A"),
            ((0, 1), "B"),
            ((0, 1), "C"),
            ((0,), "X"),
        ]

    def test_a_fresh_line_does_not_go_early_for_an_unrelated_one(self) -> None:
        folder = OutputFolder(range(3))
        folder.feed(0, "stdout", "old\n", now=0.0)
        folder.feed(1, "stdout", "fresh\n", now=0.1)
        assert shown(folder.drain(0.16)) == [((0,), "old")]
        assert shown(folder.drain(0.26)) == [((1,), "fresh")]

    def test_equal_text_on_different_streams_is_not_equal(self) -> None:
        folder = OutputFolder(range(2))
        folder.feed(0, "stdout", "a\n", now=0.0)
        folder.feed(1, "stderr", "a\n", now=0.0)
        lines = folder.finish(0.0)
        assert [(line.ranks, line.stream) for line in lines] == [((0,), "stdout"), ((1,), "stderr")]

    def test_lines_far_beyond_the_look_ahead_fold_where_ranks_are_in_step(self) -> None:
        folder = OutputFolder(range(2), **UNBOUNDED)
        text = "".join(f"step {i}\n" for i in range(5_000))
        folder.feed(0, "stdout", text, now=0.0)
        folder.feed(1, "stdout", "hello\n" + text, now=0.0)
        assert shown(folder.drain(1.0)) == [((1,), "hello"), *(((0, 1), f"step {i}") for i in range(5_000))]

    def test_raw_shows_every_line_separately_as_it_arrives(self) -> None:
        folder = OutputFolder(range(2), raw=True)
        folder.feed(1, "stdout", "a\nb\n", now=0.0)
        folder.feed(0, "stdout", "a\n", now=0.0)
        assert shown(folder.drain(0.0)) == [((1,), "a"), ((1,), "b"), ((0,), "a")]

    def test_the_oldest_lines_pass_without_waiting_when_too_much_is_held(self) -> None:
        folder = OutputFolder(range(2), max_lines=10)
        folder.feed(0, "stdout", "".join(f"{i}\n" for i in range(11)), now=0.0)
        assert shown(folder.drain(0.0)) == [((0,), str(i)) for i in range(11)]
        folder = OutputFolder(range(2), max_nbytes=100)
        folder.feed(0, "stdout", "x" * 101 + "\n", now=0.0)
        assert len(folder.drain(0.0)) == 1

    @pytest.mark.parametrize("common", [1.0, 0.7, 0.0])
    def test_many_lines_are_merged_in_linear_time(self, common: float) -> None:
        """100,000 lines take about 0.05 to 0.4 s of a core; scanning the queues for each line would take minutes."""
        chance = random.Random(0)
        folder = OutputFolder(range(4))
        start = time.process_time()
        for rank in range(4):
            lines = (f"{i}\n" if chance.random() < common else f"{rank}: {i}\n" for i in range(25_000))
            folder.feed(rank, "stdout", "".join(lines), now=0.0)
        folder.finish(0.0)
        assert time.process_time() - start < 4

    def test_an_unknown_rank_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"rank 7 is not one of \[0-1\]"):
            OutputFolder(range(2)).feed(7, "stdout", "a\n", now=0.0)


class TestLines:
    def test_chunks_are_assembled_per_rank_and_stream(self) -> None:
        folder = OutputFolder(range(2))
        for chunk in ("a", " 0", "\n"):
            folder.feed(0, "stdout", chunk, now=0.0)
            folder.feed(0, "stderr", chunk.upper(), now=0.0)
            folder.feed(1, "stdout", chunk, now=0.0)
        assert [(line.ranks, line.stream, line.text) for line in folder.finish(0.0)] == [
            ((0, 1), "stdout", "a 0"),
            ((0,), "stderr", "A 0"),
        ]

    def test_an_unterminated_line_waits_until_finish(self) -> None:
        folder = OutputFolder([0])
        folder.feed(0, "stdout", "a\n> ", now=0.0)
        assert shown(folder.drain(9.0)) == [((0,), "a")]
        assert not folder.pending
        assert shown(folder.finish(9.0)) == [((0,), "> ")]
        assert folder.finish(9.0) == []

    @pytest.mark.parametrize(
        ("text", "seen"),
        [
            ("10%\r20%\r30%\n", "30%"),
            ("10%\r20%\r", "20%"),
            ("10%\rdone\r\n", "done"),
            ("dos\r\n", "dos"),
            ("\rbar", "bar"),
            ("\r\n", ""),
        ],
    )
    def test_a_progress_bar_shows_its_last_state(self, text: str, seen: str) -> None:
        for size in (1, 2, 100):
            folder = OutputFolder([0])
            for i in range(0, len(text), size):
                folder.feed(0, "stdout", text[i : i + size], now=0.0)
            assert shown(folder.finish(0.0)) == [((0,), seen)]

    def test_a_progress_bar_that_clears_itself_leaves_nothing(self) -> None:
        folder = OutputFolder([0])
        folder.feed(0, "stderr", "50%\r   \r", now=0.0)
        assert folder.finish(0.0) == []

    @pytest.mark.parametrize("piece", ["\r" + "#" * 100, "x" * 101])
    def test_an_endless_line_takes_bounded_memory(self, piece: str) -> None:
        folder = OutputFolder([0])
        tracemalloc.start()
        try:
            for _ in range(5_000):
                folder.feed(0, "stdout", piece, now=0.0)
            used, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert used < 200_000

    @pytest.mark.parametrize("size", [1_000, 40_000, 100_000])
    def test_a_long_line_is_cut_in_the_middle_and_says_how_much(self, size: int) -> None:
        text = "".join(f"{i:09d}," for i in range(10_000))
        folder = OutputFolder([0])
        for i in range(0, len(text), size):
            folder.feed(0, "stdout", text[i : i + size], now=0.0)
        folder.feed(0, "stdout", "\nnext\n", now=0.0)
        (line, after) = folder.drain(0.0)
        assert line.text == text[:5_000] + " … 90,000 characters left out here … " + text[-5_000:]
        assert after.text == "next"

    def test_an_update_of_a_long_bar_discards_the_cut_text(self) -> None:
        folder = OutputFolder([0])
        folder.feed(0, "stdout", "x" * 50_000, now=0.0)
        folder.feed(0, "stdout", "\rdone", now=0.0)
        folder.feed(0, "stdout", "\n", now=0.0)
        assert shown(folder.finish(0.0)) == [((0,), "done")]


class TestFlood:
    def test_first_and_last_lines_are_shown_and_the_rest_counted(self) -> None:
        folder = OutputFolder(range(4))
        for rank in range(4):
            folder.feed(rank, "stdout", "".join(f"{rank}: {i}\n" for i in range(25_000)), now=0.0)
        lines = folder.drain(0.06) + folder.finish(0.06)
        texts = [line.text for line in lines if not line.note]
        assert len(texts) == 100 + 100
        assert texts[:100] == [f"0: {i}" for i in range(100)]
        assert texts[-25:] == [f"3: {i}" for i in range(24_975, 25_000)]
        notes = [line for line in lines if line.note]
        assert [note.text for note in notes] == [
            "… 99,800 lines left out here (rank 0: 24,875, ranks 1-3: 24,975 each; shown: the first and the last)"
        ]
        assert notes[0].ranks == (0, 1, 2, 3)
        assert folder.left_out == {0: 24_875, 1: 24_975, 2: 24_975, 3: 24_975}

    @pytest.mark.parametrize(("lasts_s", "notes"), [(3, 1), (10, 2), (25, 3), (100, 5)])
    def test_a_flood_is_its_first_and_last_lines_and_one_gap_as_long_as_it_is_short(
        self, lasts_s: int, notes: int
    ) -> None:
        folder = OutputFolder(range(2))
        lines = []
        for tick in range(lasts_s * 20):
            now = tick * 0.05
            for rank in range(2):
                folder.feed(rank, "stdout", "".join(f"{tick} {i}\n" for i in range(500)), now)
            lines += folder.drain(now)
        lines += folder.finish(now)
        texts = [line.text for line in lines if not line.note]
        assert texts[:100] == [f"0 {i}" for i in range(100)]
        assert texts[-100:] == [f"{tick} {i}" for i in range(400, 500)]
        assert len(lines) - len(texts) == notes
        assert len(texts) == 100 * (notes + 1)

    def test_lines_that_are_no_flood_pass_at_the_average_rate(self) -> None:
        folder = OutputFolder([0])
        for tick in range(200):
            now = tick * 0.05
            folder.feed(0, "stdout", "".join(f"{tick} {i}\n" for i in range(19)), now)
            lines = folder.drain(now)
            assert [line.text for line in lines] == [f"{tick} {i}" for i in range(19)]
        assert not folder.finish(now)

    def test_up_to_a_thousand_lines_at_once_are_shown_whole(self) -> None:
        for at_the_end in (False, True):
            folder = OutputFolder([0])
            folder.feed(0, "stdout", "".join(f"{i}\n" for i in range(1_000)), now=0.0)
            lines = folder.drain(0.0)
            assert len(lines) == 100
            lines += folder.finish(0.1) if at_the_end else folder.drain(0.3)
            assert [line.text for line in lines] == [str(i) for i in range(1_000)]

    def test_lines_after_a_flood_pass_as_before(self) -> None:
        folder = OutputFolder([0])
        folder.feed(0, "stdout", "".join(f"{i}\n" for i in range(10_000)), now=0.0)
        lines = [line for tick in range(50) for line in folder.drain(tick * 0.05)]
        folder.feed(0, "stdout", "calm\n", now=3.0)
        assert [line.text for line in folder.drain(3.0)] == ["calm"]
        assert sum(line.note for line in lines) == 1
        assert len(lines) == 201

    def test_long_lines_are_bounded_by_bytes(self) -> None:
        folder = OutputFolder([0])
        for tick in range(100):
            folder.feed(0, "stdout", ("é" * 4_000 + "\n") * 20, tick * 0.05)
            folder.drain(tick * 0.05)
        rendered = render(folder.finish(5.0))
        assert sum(len(text.encode()) for _, text in rendered) < 1_000_000

    def test_waiting_lines_are_shown_after_a_flood_without_finish(self) -> None:
        folder = OutputFolder([0])
        folder.feed(0, "stdout", "".join(f"{i}\n" for i in range(10_000)), now=0.0)
        lines = folder.drain(0.0)
        now = 0.0
        while folder.pending and now < 60:
            now += 0.05
            lines += folder.drain(now)
        assert not folder.pending
        assert lines[-1].text == "9999"
        assert now < 5

    def test_a_burst_above_the_rate_loses_nothing_if_it_fits(self) -> None:
        folder = OutputFolder([0])
        folder.feed(0, "stdout", "".join(f"{i}\n" for i in range(1_500)), now=0.0)
        lines = [line for tick in range(100) for line in folder.drain(tick * 0.05)]
        assert [line.text for line in lines] == [str(i) for i in range(1_500)]

    def test_lines_of_some_ranks_between_common_lines_make_at_most_two_notes(self) -> None:
        folder = OutputFolder(range(4))
        for rank in range(4):
            lines = (f"common {i}\n{'' if rank == 0 else f'own {i} of {rank}' + chr(10)}" for i in range(3_000))
            folder.feed(rank, "stdout", "".join(lines), now=0.0)
        shown = folder.drain(1.0) + folder.finish(1.0)
        assert sum(isinstance(item, FoldedLine) and item.note for item in shown) <= 2
        assert len(shown) <= 220
        for rank in range(4):
            mine = [
                item.text for item in shown if isinstance(item, FoldedLine) and rank in item.ranks and not item.note
            ]
            assert len(mine) + folder.left_out[rank] == (3_000 if rank == 0 else 6_000)
            assert len([text for text in mine[-25:] if int(text.split()[1]) >= 2_975]) == 25

    def test_a_note_follows_a_common_line_that_is_kept_for_another_rank(self) -> None:
        folder = OutputFolder(range(2), burst_lines=3, last_lines=2, lines_per_s=1e-9)
        for rank in range(2):
            folder.feed(rank, "stdout", "1\n2\n3\ncommon\n", now=0.0)
        folder.feed(1, "stdout", "a\nb\nc\nd\n", now=0.0)
        assert [(line.ranks, line.text.split(";")[0]) for line in folder.finish(0.0)] == [
            *(((0, 1), text) for text in ("1", "2", "3", "common")),
            ((1,), "… 2 lines left out here (rank 1: 2"),
            ((1,), "c"),
            ((1,), "d"),
        ]

    def test_lines_that_the_agent_dropped_are_noted_at_their_place(self) -> None:
        folder = OutputFolder(range(2))
        folder.feed(0, "stdout", "a\nb", now=0.0)
        folder.feed(0, "stdout", "c\n", now=0.0, dropped_lines=7)
        lines = folder.drain(0.2)
        assert [line.text for line in lines] == [
            "a",
            "b",
            "… 7 lines left out here (rank 0: 7; shown: the first and the last)",
            "c",
        ]
        assert [line.note for line in lines] == [False, False, True, False]
        assert folder.left_out == {0: 7}

    def test_a_flood_that_the_agent_has_bounded_is_one_gap_at_first(self) -> None:
        folder = OutputFolder([0])
        lines = []
        for tick in range(100):
            folder.feed(0, "stdout", f"{tick}\n" * 10, tick * 0.05, dropped_lines=1_000)
            lines += folder.drain(tick * 0.05)
        assert [line.note for line in lines].count(True) <= 2
        assert int(lines[-1].text) >= 75, "shown lines are recent"
        lines += folder.finish(5.0)
        assert lines[-1].text == "99"
        assert sum(line.note for line in lines) <= 3
        assert len(of_rank(lines, 0)) + folder.left_out[0] == 100 * 1_010

    def test_notes_of_one_line_and_of_many_ranks(self) -> None:
        folder = OutputFolder(range(20))
        for rank in range(20):
            folder.feed(rank, "stdout", "", now=0.0, dropped_lines=rank + 1)
        (note,) = folder.finish(0.0)
        assert note.text.startswith("… 210 lines left out here (rank 0: 1, rank 1: 2, ")
        assert "rank 7: 8, and 12 more ranks; shown" in note.text
        folder.feed(3, "stdout", "", now=0.0, dropped_lines=1)
        assert "… 1 line left out here (rank 3: 1;" in folder.finish(0.0)[0].text


class TestRender:
    def test_lines_of_one_stream_are_one_chunk(self) -> None:
        lines = [
            FoldedLine((0, 1, 2, 3), "stdout", "a"),
            FoldedLine((0, 2), "stdout", ""),
            FoldedLine((1,), "stderr", "b"),
            FoldedLine((0,), "stdout", "… 2 lines left out here", note=True),
        ]
        assert render(lines) == [
            ("stdout", "[0-3] a\n[0,2]\n"),
            ("stderr", "[1] b\n"),
            ("stdout", "… 2 lines left out here\n"),
        ]
        assert render(lines[:1] + lines[2:3], width_of_label=6)[1] == ("stderr", "[1]    b\n")
        assert render([]) == []

    @pytest.mark.parametrize(
        ("text", "end"),
        [
            ("\x1b[31mred", "\x1b[0m"),
            ("\x1b[1;31mred\x1b[0m", ""),
            ("\x1b[31mred\x1b[m", ""),
            ("\x1b[0;31mred", "\x1b[0m"),
        ],
    )
    def test_colors_end_with_their_line(self, text: str, end: str) -> None:
        assert render([FoldedLine((0,), "stdout", text)]) == [("stdout", f"[0] {text}{end}\n")]


# Few distinct texts, so that lines of different ranks are often equal, cross and repeat.
texts = st.text(alphabet="ab", max_size=2)
written = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["stdout", "stderr"]), texts), max_size=60)


def feed_in_chunks(folder: OutputFolder, events: Events, data: st.DataObject) -> list[FoldedLine]:
    """Feed each event's line in one to three pieces, drain at random times, and finish."""
    lines: list[FoldedLine] = []
    now = 0.0
    for rank, stream, text in events:
        line = text + "\n"
        cut = data.draw(st.integers(0, len(line)))
        for piece in (line[:cut], line[cut:]):
            folder.feed(rank, stream, piece, now)
            now += data.draw(st.sampled_from([0.0, 0.0, 0.01, 0.1]))
            if data.draw(st.booleans()):
                lines += folder.drain(now)
    return lines + folder.finish(now)


def said(note: FoldedLine) -> Counter[int]:
    """Read the number of left-out lines from a note, by rank."""
    counts: Counter[int] = Counter()
    for ranks, n in re.findall(r"ranks? ([\d,-]+): ([\d,]+)(?:,| each|;)", note.text):
        for span in ranks.split(","):
            low, _, high = span.partition("-")
            counts.update(dict.fromkeys(range(int(low), int(high or low) + 1), int(n.replace(",", ""))))
    return counts


class TestProperties:
    @given(events=written, data=st.data())
    def test_each_rank_keeps_its_lines_and_their_order(self, events: Events, data: st.DataObject) -> None:
        lines = feed_in_chunks(OutputFolder(range(3), **UNBOUNDED), events, data)
        assert not any(line.note for line in lines)
        for rank in range(3):
            assert of_rank(lines, rank) == [(stream, text) for r, stream, text in events if r == rank]

    @given(events=written, data=st.data())
    def test_with_limits_shown_and_left_out_lines_add_up_to_fed_lines(
        self, events: Events, data: st.DataObject
    ) -> None:
        folder = OutputFolder(range(3), lines_per_s=10, burst_lines=4, burst_nbytes=100, nbytes_per_s=100, last_lines=3)
        # Unique on each rank, to identify its position; equal on ranks that write the same.
        count: Counter[int] = Counter()
        numbered: Events = []
        for rank, stream, text in events:
            numbered.append((rank, stream, f"{count[rank]}{text}"))
            count[rank] += 1
        lines = feed_in_chunks(folder, numbered, data)
        for rank in range(3):
            fed = [(stream, text) for r, stream, text in numbered if r == rank]
            position = 0
            for line in lines:
                if line.note:
                    position += said(line).get(rank, 0)
                elif rank in line.ranks:
                    assert fed[position] == (line.stream, line.text), "notes are where lines are left out"
                    position += 1
            assert position == len(fed)
            kept = of_rank(lines, rank)
            assert len(kept) + folder.left_out.get(rank, 0) == len(fed)
            assert kept[-3:] == fed[-3:]

    @given(st.lists(texts, max_size=30), st.integers(1, 5), st.data())
    def test_equal_output_at_the_same_time_is_shown_exactly_once(
        self, output: list[str], n_ranks: int, data: st.DataObject
    ) -> None:
        folder = OutputFolder(range(n_ranks), **UNBOUNDED)
        for rank in range(n_ranks):
            text = "".join(f"{line}\n" for line in output)
            cut = data.draw(st.integers(0, len(text)))
            folder.feed(rank, "stdout", text[:cut], now=0.0)
            folder.feed(rank, "stdout", text[cut:], now=0.0)
        assert shown(folder.drain(0.0)) == [(tuple(range(n_ranks)), line) for line in output]

    @given(st.integers(2, 5), st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=2, max_size=5))
    def test_own_lines_do_not_separate_common_lines(self, n_common: int, own: list[list[int]]) -> None:
        """Each rank writes the common lines in order, and its own lines before, between and after them."""
        folder = OutputFolder(range(len(own)), **UNBOUNDED)
        for rank, places in enumerate(own):
            lines = [f"common {i}" for i in range(n_common)]
            for i, place in enumerate(places):
                lines.insert(place % (len(lines) + 1), f"rank {rank} line {i}")
            folder.feed(rank, "stdout", "".join(f"{line}\n" for line in lines), now=0.0)
        merged = [line for line in folder.finish(0.0) if line.text.startswith("common")]
        assert shown(merged) == [(tuple(range(len(own))), f"common {i}") for i in range(n_common)]


class TestItems:
    def test_an_item_keeps_its_place_among_the_lines(self) -> None:
        folder = OutputFolder(range(2))
        for rank in range(2):
            folder.feed(rank, "stdout", "before\n", now=0.0)
            folder.feed_item(rank, "figure", now=0.0)
            folder.feed(rank, "stdout", "after\n", now=0.0)
        assert folder.drain(0.0) == [
            FoldedLine((0, 1), "stdout", "before"),
            FoldedItem((0, 1), "figure"),
            FoldedLine((0, 1), "stdout", "after"),
        ]

    def test_an_item_keeps_its_place_among_lines_that_wait(self) -> None:
        folder = OutputFolder([0])
        folder.feed(0, "stdout", "line\n" * 300, now=0.0)
        folder.feed_item(0, "figure", now=0.0)
        folder.feed(0, "stdout", "after\n", now=0.0)
        found = folder.drain(0.0) + folder.drain(0.5)
        assert [getattr(each, "text", None) for each in found] == ["line"] * 300 + [None, "after"]

    def test_an_item_waits_longer_than_a_line(self) -> None:
        folder = OutputFolder(range(2), window_s=0.05, item_window_s=0.3)
        folder.feed_item(0, "figure", now=0.0)
        assert folder.drain(0.25) == []
        folder.feed_item(1, "figure", now=0.25)
        assert folder.drain(0.25) == [FoldedItem((0, 1), "figure")]
        folder.feed_item(0, "other", now=1.0)
        assert folder.drain(1.31) == [FoldedItem((0,), "other")]

    def test_a_flood_of_lines_leaves_out_no_item(self) -> None:
        folder = OutputFolder([0], burst_lines=10, lines_per_s=1)
        for i in range(1_000):
            folder.feed(0, "stdout", f"{i}\n" * 10, now=0.0)
            folder.feed_item(0, str(i), now=0.0)
        found = folder.drain(0.0) + folder.finish(0.0)
        assert [item.key for item in found if isinstance(item, FoldedItem)] == [str(i) for i in range(1_000)]

    def test_lines_that_look_like_marked_entries_stay_lines(self) -> None:
        folder = OutputFolder([0])
        folder.feed(0, "stdout", "ifigure\nbo100%\ng5\n", now=0.0)
        folder.feed_item(0, "stdout", now=0.0)
        assert [getattr(each, "text", None) for each in folder.finish(0.0)] == ["ifigure", "bo100%", "g5", None]
