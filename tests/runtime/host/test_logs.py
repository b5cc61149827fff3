"""The log keeps the newest part of a rank's output, and can be read while it is written."""

from __future__ import annotations

import os
from pathlib import Path

from monarch_kernel.runtime.host.logs import RankLog, read_log


def text_of(directory: Path, proc: int = 1) -> str:
    return "".join(record.text for record in read_log(directory, proc))


def test_both_streams_are_kept_in_the_order_in_which_they_were_read(tmp_path: Path) -> None:
    log = RankLog(str(tmp_path), 1)
    log.write("stdout", b"one\n")
    log.write("stderr", b"two\n")
    log.write("stdout", b"three\n")
    records = read_log(tmp_path, 1)
    log.close()
    assert [(record.stream, record.text) for record in records] == [
        ("stdout", "one\n"),
        ("stderr", "two\n"),
        ("stdout", "three\n"),
    ]
    assert records[0].at <= records[1].at <= records[2].at
    assert read_log(tmp_path, 2) == [], "another rank has written nothing"


def test_a_character_split_around_the_other_stream_is_joined(tmp_path: Path) -> None:
    log = RankLog(str(tmp_path), 1)
    euro = "€".encode()
    log.write("stdout", euro[:1])
    log.write("stderr", b"x")
    log.write("stdout", euro[1:])
    log.close()
    assert [(record.stream, record.text) for record in read_log(tmp_path, 1)] == [("stderr", "x"), ("stdout", "€")]


def test_the_newest_part_is_kept_and_the_size_is_bounded(tmp_path: Path) -> None:
    log = RankLog(str(tmp_path), 1, file_nbytes=1_000)
    for i in range(1_000):
        log.write("stdout", b"line %d\n" % i)
        assert text_of(tmp_path).endswith(f"line {i}\n")
    log.close()
    kept = text_of(tmp_path).splitlines()
    assert kept == [f"line {i}" for i in range(1_000 - len(kept), 1_000)]
    assert len(kept) > 40, "at least one whole file is kept"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2_200


def test_a_frame_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    log = RankLog(str(tmp_path), 1)
    log.write("stdout", b"whole\n")
    log.write("stdout", b"torn\n")
    log.close()
    (path,) = tmp_path.iterdir()
    size = path.stat().st_size
    for n in range(1, 10):
        os.truncate(path, size - n)
        assert text_of(tmp_path) == "whole\n"


def test_remove_leaves_no_files(tmp_path: Path) -> None:
    log = RankLog(str(tmp_path), 1, file_nbytes=10)
    for _ in range(3):
        log.write("stdout", b"some text\n")
    log.write("stdout", b"x")
    log.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_replacement_process_appends_to_the_log(tmp_path: Path) -> None:
    for i, appends in enumerate([False, True, True]):
        log = RankLog(str(tmp_path), 1, file_nbytes=60, appends=appends)
        log.write("stdout", b"process %d\n" % i)
        log.close()
    assert text_of(tmp_path) == "process 0\nprocess 1\nprocess 2\n"
    for _ in range(10):
        log.write("stdout", b"and so on\n")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 180, "the size is bounded as before"
    log.close()
    RankLog(str(tmp_path), 1).write("stdout", b"another mesh\n")
    assert text_of(tmp_path).endswith("another mesh\n")


def test_a_log_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    log = RankLog(str(tmp_path / "is not there"), 1)
    log.write("stdout", b"text\n")
    log.write("stdout", b"text\n")
    log.remove()
    assert read_log(tmp_path / "is not there", 1) == []
