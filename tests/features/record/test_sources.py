"""Files that a data set reads are found by its attributes, and have fingerprints."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from monarch_kernel.features.record.differences import compare
from monarch_kernel.features.record.messages import DataFile, Noted
from monarch_kernel.features.record.reading import RecordReader
from monarch_kernel.features.record.recorder import Recorder
from monarch_kernel.features.record.sources import MOST_FILES, files_of, fingerprint
from tests.features.record.runs import loop_of


class Rows(Dataset[Any]):
    def __init__(self, *things: Any) -> None:
        self.things = things

    def __getitem__(self, at: int) -> int:
        return at

    def __len__(self) -> int:
        return 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(range(256)) * 16)
    return path


def test_paths_in_many_places_are_found(path: Path) -> None:
    mapped = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    for things in (
        (str(path),),
        (path,),
        ({"train": [path]},),
        (mapped,),
        (mapped[10:20],),
        (SimpleNamespace(cache_files=[{"filename": str(path)}]),),
    ):
        assert files_of(Rows(*things)) == [str(path)], things
    assert files_of(Subset(ConcatDataset([Rows(path), Rows(path)]), [0, 1])) == [str(path)]


def test_what_is_no_file_is_left_out(path: Path, tmp_path: Path) -> None:
    assert files_of(Rows("text", "", "x" * 5000, "a\0b", str(tmp_path), 7, None, Rows, len)) == []
    circle: list[Any] = [path]
    circle.append(circle)
    assert files_of(Rows(circle)) == [str(path)]


def test_the_number_of_files_is_limited(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(MOST_FILES + 10)]
    for path in paths:
        path.touch()
    assert files_of(Rows(paths)) == [str(path) for path in paths[:MOST_FILES]]


def test_a_fingerprint_tells_the_ends_of_files_apart(tmp_path: Path) -> None:
    path = tmp_path / "large"
    data = bytearray(os.urandom(3 << 20))
    hashes = set()
    for at in (None, 0, (1 << 20) - 1, 2 << 20, -1):
        if at is not None:
            data[at] ^= 1
        path.write_bytes(data)
        found = fingerprint(str(path))
        assert found is not None
        assert (found.path, found.nbytes) == (str(path), 3 << 20)
        hashes.add(found.hash)
    assert len(hashes) == 5
    assert fingerprint(str(tmp_path / "missing")) is None


def test_a_data_file_that_has_changed_is_the_first_difference(path: Path, tmp_path: Path) -> None:
    for name, hashed in (("old", "a" * 32), ("new", "b" * 32)):
        recorder = Recorder(tmp_path / name)
        loop = loop_of()
        recorder.loop_started(loop)
        recorder.noted(0, Noted(*loop.key, (), data_files=(DataFile(str(path), 4096, 1.5, hashed),)))
        recorder.close()
    old, new = RecordReader(tmp_path / "old"), RecordReader(tmp_path / "new")
    assert [(each.loop, each.path, each.nbytes, each.hash) for each in old.data_files] == [
        (1, str(path), 4096, "a" * 32)
    ]
    assert str(compare(old, new).first) == f"the data file {path} has changed"
    assert compare(old, old).first is None
