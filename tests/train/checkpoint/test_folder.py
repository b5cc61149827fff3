"""Checkpoints can be replaced or removed while a program looks at them."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monarch_kernel.errors import CheckpointError
from monarch_kernel.train.checkpoint.atomic_directory import begin, describe, finish, latest, previous

CONTENTS = {"names": {}, "tensors": {}, "ranks": 1, "torch": "2"}
N_LOOKS = 3000


def save(path: Path) -> None:
    making = begin(path)
    for number in range(4):
        (making / f"{number}.distcp").touch()
    finish(making, path, CONTENTS)


@contextmanager
def meanwhile(do: Callable[[int], None]) -> Iterator[None]:
    """Call a function with 0, 1, 2 and so on, on another thread."""
    over = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        number = 0
        try:
            while not over.is_set():
                do(number)
                number += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failures


def test_a_checkpoint_exists_while_another_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "last"
    save(path)
    with meanwhile(lambda number: save(path)):
        for _ in range(N_LOOKS):
            assert describe(path).ranks == 1
            assert latest(path.parent) == path


def test_a_killed_save_leaves_the_previous_checkpoint_findable(tmp_path: Path) -> None:
    save(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / ".a.last-0123abcd")  # the save was about to replace it
    assert latest(tmp_path) == tmp_path / "a"
    assert describe(tmp_path / "a").path == tmp_path / ".a.last-0123abcd"


def test_a_folder_that_is_removed_while_it_is_read_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    scandir = os.scandir

    def removing(path: str) -> Iterator[os.DirEntry[str]]:
        monkeypatch.undo()
        (tmp_path / "a").rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", lambda path: removing(path) if Path(path).name == "a" else scandir(path))
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        describe(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_removed_checkpoint_is_not_the_latest(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    save(folder / "best")

    def save_and_remove(number: int) -> None:
        save(folder / f"step-{number}")
        shutil.rmtree(folder / f"step-{number}")

    with meanwhile(save_and_remove):
        for _ in range(N_LOOKS):
            assert latest(folder) is not None


def test_a_damaged_checkpoint_is_an_error_of_latest(tmp_path: Path) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b")
    (tmp_path / "b" / "monarch.json").write_text("{")
    with pytest.raises(CheckpointError, match="can't be read"):
        latest(tmp_path)


def test_a_previous_checkpoint_is_promised_only_where_there_is_one(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    none = f"there is no earlier checkpoint in {folder}"
    assert previous(folder / "a") == none
    begin(folder / "a")  # a save that did not end
    assert previous(folder / "a") == none
    save(folder / "a")
    assert previous(folder / "a") == previous(folder / "b") == "the previous checkpoint is intact"


def test_a_missing_folder_has_no_latest_checkpoint(tmp_path: Path) -> None:
    assert latest(tmp_path / "runs") is None
    (tmp_path / "file").touch()
    assert latest(tmp_path / "file") is None
