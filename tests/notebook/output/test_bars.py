"""Tests progress bars: one live block, one line per kind of bar, each shown once, for output of real tools."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.notebook.output.bars import MAX_LINES, BarBlock
from monarch_kernel.notebook.output.folding import OutputFolder

UP = "\x1b[A"


class Shown:
    """A folder and the outputs of a notebook: lines in order, and each block at the place of its first state."""

    def __init__(self, n_ranks: int, **options: Any) -> None:
        self.folder = OutputFolder(range(n_ranks), **options)
        self.now = 0.0
        self.outputs: list[Any] = []
        self.n_updates = 0

    def write(self, texts: dict[int, str], stream: Any = "stderr") -> None:
        for rank, text in texts.items():
            self.folder.feed(rank, stream, text, self.now)

    def wait(self, seconds: float) -> None:
        """Let time pass, in steps of 50 ms."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.05
            self._take(self.folder.drain(self.now), self.folder.bars(self.now))

    def finish(self) -> None:
        self._take(self.folder.finish(self.now), self.folder.bars(self.now, last=True))

    def _take(self, lines: list[Any], blocks: list[BarBlock]) -> None:
        self.outputs += [(line.ranks, line.text) for line in lines]
        for block in blocks:
            self.n_updates += 1
            for i, output in enumerate(self.outputs):
                if isinstance(output, BarBlock) and output.number == block.number:
                    self.outputs[i] = block
                    break
            else:
                self.outputs.append(block)

    @property
    def blocks(self) -> list[str]:
        return [output.text for output in self.outputs if isinstance(output, BarBlock)]

    @property
    def lines(self) -> list[Any]:
        return [output for output in self.outputs if not isinstance(output, BarBlock)]


def tqdm_line(n: int, rate: float = 10.0, desc: str = "") -> str:
    return f"\r{desc}{n:3}%|{'█' * (n // 10):10}| {n}/100 [00:01<00:02, {rate:.2f}it/s]"


def test_a_live_bar_is_shown_for_all_ranks_in_one_line_and_stays_once() -> None:
    shown = Shown(4)
    for n in range(0, 101, 10):
        shown.write({rank: tqdm_line(n, 10 + rank) for rank in range(4)})
        shown.wait(0.1)
        if n == 50:
            assert shown.blocks[0].startswith(("[0-3]  50%|█████", "[0-3]  40%"))
    shown.write(dict.fromkeys(range(4), "\n"))
    shown.wait(0.3)
    assert shown.blocks == ["[0-3] 100%|██████████| 100/100 [00:01<00:02, 10.00it/s]"]
    shown.finish()
    assert shown.lines == []
    assert len(shown.outputs) == 1
    assert shown.n_updates <= 1.5 / 0.2


def test_a_bar_shows_the_slowest_rank_and_the_progress_of_the_fastest() -> None:
    shown = Shown(64)
    shown.write({rank: tqdm_line(90 if rank == 7 else 20 if rank == 9 else 45) for rank in range(64)})
    shown.wait(0.3)
    (block,) = shown.blocks
    assert block == "[0-63]  20%|██        | 20/100 [00:01<00:02, 10.00it/s]  (slowest: [9], fastest: [7] 90%)"


def test_the_longest_of_ended_bars_is_shown() -> None:
    shown = Shown(3)
    times = ["00:09", "1:00:02", "59:30"]
    shown.write({rank: f"\r100%|##| 9/9 [{times[rank]}<00:00]" for rank in range(3)})
    shown.wait(0.3)
    assert shown.blocks == ["[0-2] 100%|##| 9/9 [1:00:02<00:00]"]


def test_bars_with_different_descriptions_have_different_lines() -> None:
    shown = Shown(2)
    shown.write({0: tqdm_line(10, desc="load:"), 1: tqdm_line(10, desc="train:")})
    shown.wait(0.3)
    assert [line[:10] for line in shown.blocks[0].split("\n")] == ["[0] load: ", "[1] train:"]


def counting(n: int | str, desc: str = "stream: ", unit: str = "it", elapsed: str = "00:01") -> str:
    """As tqdm writes it without a total."""
    return f"\r{desc}{n}{unit} [{elapsed}, 31.92{unit}/s]"


def test_bars_without_a_total_are_one_line_with_the_least_and_the_greatest_count() -> None:
    shown = Shown(4)
    for step in range(1, 4):
        shown.write({rank: counting(20 * step + 10 * rank) for rank in range(4)})
        shown.wait(0.3)
    assert shown.blocks == ["[0-3] stream: 60it [00:01, 31.92it/s]  (fewest: [0], most: [3] 90it)"]
    shown.write(dict.fromkeys(range(4), "\n"))
    shown.finish()
    assert shown.blocks == ["[0-3] stream: 60it [00:01, 31.92it/s]  (fewest: [0], most: [3] 90it)"]
    assert shown.lines == []


@pytest.mark.parametrize("unit", ["it", " examples", "B"])
def test_counts_with_units_and_thousands_are_compared_as_numbers(unit: str) -> None:
    shown = Shown(3)
    counts = ["999", "1.20k", "1.10M"]
    shown.write({rank: counting(counts[rank], "", unit) for rank in range(3)})
    shown.wait(0.3)
    assert shown.blocks[0].startswith(f"[0-2] 999{unit} [")
    assert shown.blocks[0].endswith(f"(fewest: [0], most: [2] 1.10M{unit})")


def test_of_equal_counts_the_longest_is_shown() -> None:
    shown = Shown(2)
    shown.write({rank: counting(9, elapsed=("00:09", "1:00:02")[rank]) for rank in range(2)})
    shown.wait(0.3)
    assert shown.blocks == ["[0-1] stream: 9it [1:00:02, 31.92it/s]"]


def test_short_bars_with_different_counts_stay_apart() -> None:
    shown = Shown(3)
    shown.write({rank: counting(0) + counting(5 if rank < 2 else 7, elapsed=f"00:0{rank}") + "\n" for rank in range(3)})
    shown.finish()
    assert [(ranks, text[:11]) for ranks, text in shown.lines] == [((0, 1), "stream: 5it"), ((2,), "stream: 7it")]


def test_titles_that_differ_in_a_changing_loss_are_one() -> None:
    shown = Shown(3)
    for step in (1, 2, 3):
        shown.write({r: tqdm_line(20 * step, desc=f"epoch 1 loss {1 / (step + r):.4f}: ") for r in range(3)})
        shown.wait(0.3)
    assert shown.blocks[0].startswith("[0-2] epoch 1 loss 0.3333:  60%")
    shown.write(dict.fromkeys(range(3), "\n"))
    shown.finish()
    assert "\n" not in shown.blocks[0]


def test_titles_with_numbers_that_stay_are_different() -> None:
    shown = Shown(3)
    for step in (1, 2, 3):
        shown.write({r: tqdm_line(20 * step, desc=f"lr {0.1**r:.3f}: ") for r in range(3)})
        shown.wait(0.3)
    assert [line[:12] for line in shown.blocks[0].split("\n")] == ["[0] lr 1.000", "[1] lr 0.100", "[2] lr 0.010"]


def test_a_bar_in_the_place_of_one_that_cleared_itself_has_another_title() -> None:
    shown = Shown(2)
    for title in ("lr 0.1: ", "lr 0.2: "):
        shown.write({0: tqdm_line(50, desc=title), 1: tqdm_line(50, desc="lr 0.2: ")})
        shown.wait(0.3)
        if title == "lr 0.1: ":
            shown.write(dict.fromkeys(range(2), f"\r{' ' * 60}\r"))
            shown.wait(0.3)
    assert shown.blocks[0].startswith("[0-1] lr 0.2: ")
    shown.write({1: tqdm_line(60, desc="lr 0.3: ")})  # the title of this one changes, that of rank 0 does not
    shown.wait(0.3)
    assert len(shown.blocks[0].split("\n")) == 2


def test_a_short_bar_becomes_an_ordinary_line_once_for_all_ranks() -> None:
    shown = Shown(3)
    for rank in range(3):
        shown.write({rank: "before\n"}, "stdout")
        shown.write({rank: tqdm_line(0) + tqdm_line(100, 10 + rank) + "\nafter\n"}, "stdout")
    shown.finish()
    assert shown.blocks == []
    assert [text[:20] for ranks, text in shown.lines if ranks == (0, 1, 2)] == [
        "before",
        "100%|██████████| 100",
        "after",
    ]


def test_nested_bars_rewrite_their_own_rows() -> None:
    shown = Shown(1)
    for outer in range(3):
        shown.write({0: tqdm_line(outer * 10, desc="outer")})
        for inner in range(0, 101, 25):
            shown.write({0: f"\n{tqdm_line(inner, desc='inner')}{UP}"})
            shown.wait(0.1)
        if outer == 1:
            first, second = shown.blocks[0].split("\n")
            assert first.startswith("[0] outer 10%")
            assert second.startswith("[0] inner")
        shown.write({0: f"\n\r{' ' * 80}\r{UP}"})  # leave=False
    shown.write({0: tqdm_line(100, desc="outer") + "\n"})
    shown.finish()
    assert shown.lines == []
    assert [line[:14] for line in shown.blocks[0].split("\n")] == ["[0] outer100%|"]


def test_lines_between_updates_go_below_the_bar_which_continues_in_place() -> None:
    shown = Shown(2)
    for n in range(0, 100, 20):
        shown.write(dict.fromkeys(range(2), tqdm_line(n)))
        shown.write(dict.fromkeys(range(2), f"step {n}\n"), "stdout")
        shown.wait(0.2)
    shown.finish()
    assert len(shown.blocks) == 1
    assert shown.blocks[0].startswith("[0-1]  80%")
    assert shown.lines == [((0, 1), f"step {n}") for n in range(0, 100, 20)]


def test_each_epoch_has_its_bar_above_its_line() -> None:
    shown = Shown(2)
    for epoch in range(3):
        for n in (0, 50, 100):
            shown.write(dict.fromkeys(range(2), tqdm_line(n, desc=f"epoch {epoch} ")))
            shown.wait(0.2)
        shown.write(dict.fromkeys(range(2), "\n"))
        shown.wait(0.2)
        shown.write(dict.fromkeys(range(2), f"loss {epoch}\n"), "stdout")
        shown.wait(0.2)
    shown.finish()
    order = [output.text[:17] if isinstance(output, BarBlock) else output[1] for output in shown.outputs]
    assert order == [
        "[0-1] epoch 0 100",
        "loss 0",
        "[0-1] epoch 1 100",
        "loss 1",
        "[0-1] epoch 2 100",
        "loss 2",
    ]


def test_bars_without_lines_between_share_a_block_of_bounded_size() -> None:
    shown = Shown(1, more="%mesh logs t")
    for i in range(MAX_LINES * 2):
        shown.write({0: tqdm_line(50, desc=f"{i}:")})
        shown.wait(0.5)
        shown.write({0: tqdm_line(100, desc=f"{i}:") + "\n"})
        shown.wait(0.2)
    shown.finish()
    (block,) = shown.blocks
    lines = block.split("\n")
    assert len(lines) == MAX_LINES
    assert lines[0] == f"… {MAX_LINES + 1} progress bars left out here; all: %mesh logs t"
    assert lines[-1].startswith(f"[0] {MAX_LINES * 2 - 1}:100%")


def test_a_bar_that_clears_itself_leaves_nothing() -> None:
    shown = Shown(2)
    shown.write(dict.fromkeys(range(2), tqdm_line(50)))
    shown.wait(0.3)
    assert shown.blocks != [""]
    shown.write(dict.fromkeys(range(2), f"\r{' ' * 60}\r"))
    shown.finish()
    assert shown.blocks == [""]
    assert shown.lines == []


def test_a_bar_that_never_ends_stays_in_its_last_state() -> None:
    shown = Shown(1)
    shown.write({0: tqdm_line(30)})
    shown.wait(0.3)
    shown.write({0: tqdm_line(60)})
    shown.finish()
    assert shown.blocks[0].startswith("[0]  60%")


def test_a_slow_bar_after_the_end_of_its_cell_stays_one_line() -> None:
    shown = Shown(1)
    for n in range(0, 60, 10):
        shown.write({0: tqdm_line(n)})
        shown.wait(1.0)
        shown._take(shown.folder.finish(shown.now, goes_on=True), shown.folder.bars(shown.now, last=True))
    assert len(shown.blocks) == 1
    assert shown.blocks[0].startswith("[0]  50%")
    assert "\n" not in shown.blocks[0]
    assert shown.lines == []


def test_raw_shows_a_line_per_rank() -> None:
    shown = Shown(3, raw=True)
    shown.write(dict.fromkeys(range(3), tqdm_line(50)))
    shown.wait(0.3)
    assert [line[:8] for line in shown.blocks[0].split("\n")] == ["[0]  50%", "[1]  50%", "[2]  50%"]


def test_windows_line_ends_do_not_make_a_bar() -> None:
    shown = Shown(1)
    for piece in ("one\r", "\ntwo\r\n", "three", "\r", "\n"):
        shown.write({0: piece})
        shown.wait(0.3)
    assert shown.blocks == []
    assert shown.lines == [((0,), "one"), ((0,), "two"), ((0,), "three")]


def test_ordinary_lines_stay_ordinary_after_bars() -> None:
    shown = Shown(1)
    shown.write({0: tqdm_line(50) + "\n"})
    shown.wait(0.3)
    shown.write({0: "a\nb"})
    shown.wait(0.3)
    shown.write({0: "c\n"})
    shown.wait(0.1)
    assert shown.lines[1:] == [((0,), "a"), ((0,), "bc")]


def test_clearing_the_output_starts_a_new_block() -> None:
    shown = Shown(1)
    shown.write({0: tqdm_line(50)})
    shown.wait(0.3)
    shown.folder.cleared()
    shown.outputs.clear()
    shown.write({0: tqdm_line(60)})
    shown.wait(0.3)
    assert len(shown.blocks) == 1


def test_colors_of_a_bar_end_with_it() -> None:
    shown = Shown(1)
    shown.write({0: "\r\x1b[32m 50%|"})
    shown.wait(0.3)
    assert shown.blocks == ["[0] \x1b[32m 50%|\x1b[0m"]


PIECES = st.lists(
    st.sampled_from(["\r", "\n", UP, "10%", "20%", "text", " ", "\r\n", "\x1b[31m"]), min_size=1, max_size=20
)


@given(st.lists(PIECES, min_size=1, max_size=6))
def test_any_control_characters_are_accepted(writes: list[list[str]]) -> None:
    """The folder accepts any mixture of control characters, and shows the last text."""
    shown = Shown(2)
    for i, pieces in enumerate(writes):
        shown.write({i % 2: "".join(pieces)})
        shown.wait(0.1)
    shown.write(dict.fromkeys(range(2), "\nthe end\n"))
    shown.finish()
    assert any("the end" in text for text in [*shown.blocks, *(text for _, text in shown.lines)])
