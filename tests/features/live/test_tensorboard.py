"""Logs of loops are written for TensorBoard: each step once, as the mean of the ranks that were in the loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.features.live.loops import LoopBook
from monarch_kernel.features.live.tensorboard import TensorBoardJournal
from monarch_kernel.net.wire.messages import Knob, Logged, LoopLeft, LoopReport, LoopStarted
from monarch_kernel.testing import rank_spec
from tests.support.boards import scalars
from tests.support.waiting import wait_until


class Board:
    """Loops of two ranks, and the folder that they are written to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.book = LoopBook()
        self.journal = TensorBoardJournal(folder, "t")
        self.book.journals["t"] = self.journal

    def begin(self, rank: int, request: int = 4, **more: object) -> None:
        spec = rank_spec(10 + rank, rank=rank, world_size=2, mesh="t")
        self.book.started(spec, "cell [5]", LoopStarted(request, 1, 100, **more), 0.0)  # type: ignore[arg-type]

    def report(self, rank: int, values: dict[int, float], request: int = 4) -> None:
        logged = tuple(
            Logged(step, value if math.isfinite(value) else 0.0, int(math.isfinite(value)), value)
            for step, value in values.items()
        )
        reached = max(values) + 1
        self.book.reported(10 + rank, LoopReport(request, 1, reached, 0.5, {"loss": logged}, (Knob("lr", 0.25),)), 1.0)

    def leave(self, rank: int, steps: int, request: int = 4) -> None:
        self.book.left(10 + rank, LoopLeft(request, 1, steps), 2.0)

    def loss(self, loop: int = 0) -> list[tuple[int, float]]:
        return scalars(self.folder / f"loop_{loop}", "loss")


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    board = Board(tmp_path / "runs" / "gpt")
    yield board
    board.journal.close()
    assert not board.journal._thread.is_alive()


def test_a_step_is_written_when_all_ranks_have_reported_it(board: Board) -> None:
    board.begin(0)
    board.begin(1)
    board.report(0, {0: 1.0, 1: 2.0, 2: 3.0})
    board.report(1, {0: 3.0, 1: 6.0})
    wait_until(lambda: board.loss() == [(0, 2.0), (1, 4.0)], "the steps that both have told of")
    board.report(1, {2: math.nan})  # the mean is that of the other rank
    board.leave(0, 3)
    board.leave(1, 3)
    board.journal.close()
    assert board.loss() == [(0, 2.0), (1, 4.0), (2, 3.0)]
    run = board.folder / "loop_0"
    assert {value for _, value in scalars(run, "speed/step_s")} == {0.5}
    assert {value for _, value in scalars(run, "knobs/lr")} == {0.25}


def test_a_lost_rank_is_not_waited_for(board: Board) -> None:
    board.begin(0)
    board.begin(1)
    board.report(0, {0: 1.0, 1: 2.0})
    board.book.gone(11)
    wait_until(lambda: board.loss() == [(0, 1.0), (1, 2.0)], "the steps of the other")


def test_a_rank_that_joins_late_counts_in_steps_that_are_not_written_yet(board: Board) -> None:
    board.begin(0)
    board.report(0, {0: 1.0, 1: 2.0})
    wait_until(lambda: board.loss() == [(0, 1.0), (1, 2.0)], "the steps of the first")
    board.begin(1)
    board.report(1, {0: 3.0, 1: 4.0, 2: 5.0})
    board.report(0, {2: 1.0})
    board.leave(0, 3)
    board.leave(1, 3)
    board.journal.close()
    assert board.loss() == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_a_rank_that_joins_an_ended_loop_writes_nothing_twice(board: Board) -> None:
    board.begin(0)
    board.report(0, {0: 1.0, 1: 2.0})
    board.leave(0, 2)
    wait_until(lambda: board.loss() == [(0, 1.0), (1, 2.0)], "the steps of the first")
    wait_until(lambda: not board.journal._runs, "its file to be closed")
    board.begin(1)
    board.report(1, {0: 3.0, 1: 4.0, 2: 5.0})
    board.leave(1, 3)
    board.journal.close()
    assert board.loss() == [(0, 1.0), (1, 2.0), (2, 5.0)]


def test_steps_that_a_rank_combines_are_written_as_one(board: Board) -> None:
    board.begin(0)
    board.begin(1)

    def report(rank: int, *groups: tuple[int, int, int]) -> None:
        """Report ranges of steps, each combined into one value; the loss of a rank is its number."""
        logged = tuple(
            Logged(last, float(rank) * (last - first + 1), last - first + 1, float(rank), size)
            for first, last, size in groups
        )
        board.book.reported(10 + rank, LoopReport(4, 1, groups[-1][1] + 1, 0.001, {"loss": logged}), 1.0)

    report(0, (0, 1, 2), (2, 2, 2))
    report(1, (0, 3, 4), (4, 5, 4))
    report(0, (3, 3, 1), (4, 5, 2), (6, 7, 2))
    report(1, (6, 7, 2))
    board.leave(0, 8)
    board.leave(1, 8)
    board.journal.close()
    assert board.loss() == [(3, 0.5), (7, 0.5)]


def test_ranks_that_are_in_a_short_loop_one_after_the_other_are_one_run(board: Board) -> None:
    for rank in range(2):
        board.begin(rank)
        board.report(rank, {0: 1.0 + rank, 1: 2.0 + rank})
        board.leave(rank, 2)
    board.journal.close()
    assert sorted(board.folder.iterdir()) == [board.folder / "loop_0"]
    assert board.loss() == [(0, 1.5), (1, 2.5)]


def test_a_recovered_loop_is_the_same_run_and_a_rollback_starts_another(
    board: Board,
) -> None:
    board.begin(0)
    board.report(0, dict.fromkeys(range(6), 1.0))
    board.begin(0, request=5, step=4, horizon=5, follows=4, is_recovery=True)
    board.report(0, {6: 1.0})  # of the loop that another one continues
    board.leave(0, 6)
    board.report(0, dict.fromkeys(range(4, 8), 2.0), request=5)
    board.leave(0, 8, request=5)
    board.begin(0, request=6, step=2, horizon=3, follows=5, is_recovery=False)
    board.report(0, dict.fromkeys(range(2, 5), 3.0), request=6)
    board.leave(0, 5, request=6)
    board.journal.close()
    assert board.loss() == [(step, 1.0 if step < 4 else 2.0) for step in range(8)]
    assert len(list((board.folder / "loop_0").iterdir())) == 1, "of two files of one second, either may be read first"
    assert board.loss(1) == [(step, 3.0) for step in range(2, 5)]


def test_another_run_in_the_same_folder_keeps_existing_files(tmp_path: Path) -> None:
    (tmp_path / "loop_0").mkdir()
    (tmp_path / "loop_7").write_text("somebody's")
    board = Board(tmp_path)
    board.begin(0)
    board.report(0, {0: 1.0})
    board.journal.close()
    assert board.loss(8) == [(0, 1.0)]


def test_a_write_error_is_reported_and_the_loop_continues(board: Board, capsys: pytest.CaptureFixture[str]) -> None:
    board.folder.rmdir()
    board.folder.write_text("not a folder")
    board.begin(0)
    board.report(0, {0: 1.0})
    board.report(0, {1: 1.0})
    board.journal.close()
    board.report(0, {2: 1.0})
    said = capsys.readouterr().err
    assert said.startswith(f"t: loops are no longer written to TensorBoard in {board.folder}: [Errno ")
    assert len(said.splitlines()) == 1


def test_a_folder_that_can_not_be_created_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file"):
        TensorBoardJournal(tmp_path / "file" / "runs", "t")
    with pytest.raises(OSError, match=r"home directory"):
        TensorBoardJournal("~nobody-of-this-name/runs", "t")


def test_without_its_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'monarch_kernel\[tensorboard\]'"):
        TensorBoardJournal(tmp_path / "runs", "t")
    assert not (tmp_path / "runs").exists()
