"""A rank sets no mark where the last one serves again, and never shows output after the answer that follows it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.net.wire.stream_marks import MarkReader, new_secret
from monarch_kernel.runtime.host.output import OutputStream
from monarch_kernel.runtime.host.read_counts import ReaderOf, ReadFile
from monarch_kernel.runtime.worker.stdio import OutputMarks

PROC = 7


class Rank:
    """The pipes of a rank, with both of their ends."""

    def __init__(self, directory: Path, proc: int = PROC) -> None:
        secret = new_secret()
        self.file = ReadFile(str(directory))
        self.counts = self.file.take_slot(proc, secret)
        assert self.counts is not None
        out, err = os.pipe(), os.pipe()
        self.streams = [
            OutputStream(proc, "stdout", out[0], MarkReader(secret), None, self.counts[0]),
            OutputStream(proc, "stderr", err[0], MarkReader(secret), None, self.counts[1]),
        ]
        self.ends = (out[1], err[1])
        self.marks = OutputMarks(self.ends, secret, ReaderOf(str(directory), proc, secret))

    def read(self) -> None:
        """Let the agent read."""
        for stream in self.streams:
            stream.read()

    def end_cell(self) -> int:
        """End a cell; returns the mark at the end of its output."""
        mark, other = self.marks.set(ends_cell=True)
        assert mark == other
        return mark

    def close(self) -> None:
        for fd in (*self.ends, *(stream.fd for stream in self.streams)):
            os.close(fd)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    rank.end_cell()
    rank.read()
    yield rank
    rank.close()


def test_the_mark_of_the_last_cell_serves_for_silent_ones(rank: Rank) -> None:
    first = rank.end_cell()
    assert [rank.end_cell() for _ in range(3)] == [first] * 3
    for stream in rank.streams:
        with pytest.raises(BlockingIOError):
            os.read(stream.fd, 1)
    assert rank.marks.set() == (first, first)  # another request than a cell


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("is_read", [False, True])
def test_output_of_native_code_needs_a_mark_whether_it_was_read_or_not(rank: Rank, at: int, is_read: bool) -> None:
    first = rank.end_cell()
    os.write(rank.ends[at], b"from C\n")
    if is_read:
        rank.read()
    second = rank.end_cell()
    assert second > first
    rank.read()
    assert rank.end_cell() == second


def test_output_of_python_needs_a_mark(rank: Rank) -> None:
    """Its buffer may have been written to another file than the pipe: that costs a mark, too, and no more."""
    first = rank.end_cell()
    rank.marks.write_to(1)
    assert rank.end_cell() > first


def test_a_mark_that_was_not_read_is_followed_by_another(rank: Rank) -> None:
    os.write(rank.ends[0], b"x")
    first = rank.end_cell()
    assert rank.end_cell() > first


def test_a_rank_sets_a_mark_while_the_agent_reads(rank: Rank) -> None:
    first = rank.end_cell()
    assert rank.counts is not None
    for counts in rank.counts:
        counts.begin()  # and has perhaps taken output out of the pipe
        second = rank.end_cell()
        assert second > first
        rank.read()
        counts.end(second, 0)
        first = second


def test_a_display_needs_a_mark_and_so_does_the_end_of_its_cell(rank: Rank) -> None:
    first = rank.end_cell()
    display, _ = rank.marks.set(display=True)
    rank.read()
    second = rank.end_cell()
    assert first < display < second


def test_a_mark_of_another_request_does_not_end_a_cell(rank: Rank) -> None:
    """The report of a death shows what was written since the last cell ended."""
    os.write(rank.ends[0], b"of an actor\n")
    first, _ = rank.marks.set()
    rank.read()
    assert rank.marks.set() == (first, first)
    assert rank.end_cell() > first
    rank.read()
    assert rank.streams[0].tail() == ()


def test_output_in_new_pipes_needs_a_mark(rank: Rank) -> None:
    first = rank.end_cell()
    rank.marks.begin(left_running=3)
    rank.read()
    new = []
    for stream in rank.streams:
        assert stream.request == 3
        new.append(stream.succeed(os.dup(stream.successor)))
        stream.successor = -1
    os.write(rank.ends[0], b"in the new pipe")  # `begin` has made this descriptor one of the new pipe
    for stream in new:
        stream.read()
    second = rank.end_cell()
    assert second > first
    for stream in new:
        stream.read()
    assert rank.end_cell() == second
    for stream in new:
        os.close(stream.fd)


def test_the_read_ends_of_new_pipes_are_closed_once_the_agent_has_read_a_mark_in_them(rank: Rank) -> None:
    def n_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    rank.end_cell()
    rank.marks.begin(left_running=3)
    rank.read()
    new = []
    for stream in rank.streams:
        new.append(stream.succeed(os.dup(stream.successor)))
        stream.successor = -1
    with_read_ends = n_open()
    rank.marks.begin(left_running=0)
    assert n_open() == with_read_ends, "the agent of a rank may not have opened them yet"
    os.write(rank.ends[0], b"in the new pipe")
    rank.end_cell()
    rank.marks.begin(left_running=0)
    assert n_open() == with_read_ends, "it has not read the marks yet"
    for stream in new:
        stream.read()
    rank.marks.begin(left_running=0)
    assert n_open() == with_read_ends - 2
    for stream in new:
        os.close(stream.fd)


def test_ranks_with_the_same_slot_do_not_read_the_counts_of_each_other(rank: Rank, tmp_path: Path) -> None:
    first = rank.end_cell()
    other = Rank(tmp_path, PROC + (1 << 14))
    other.end_cell()
    other.read()
    assert other.end_cell() == other.end_cell()
    assert rank.end_cell() > first
    rank.read()
    assert rank.end_cell() > rank.marks._last - 8
    other.close()


def test_without_a_file_each_cell_ends_with_a_mark(tmp_path: Path) -> None:
    assert ReadFile(str(tmp_path / "none")).take_slot(PROC, "s") is None
    with pytest.raises(OSError, match="No such file"):
        ReaderOf(str(tmp_path), PROC, "s")
    (tmp_path / "reads").write_bytes(b"")
    with pytest.raises(OSError, match="length"):
        ReaderOf(str(tmp_path), PROC, "s")
    read, write = os.pipe()
    marks = OutputMarks((write, write), "s")
    assert marks.set(ends_cell=True) < marks.set(ends_cell=True)
    os.close(read)
    os.close(write)
