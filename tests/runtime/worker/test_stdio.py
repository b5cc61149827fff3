"""Marks in the output of a rank: any chunking preserves them, and the rest of the output is unchanged."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.net.wire.stream_marks import FIRST_MARK, MARK_STEP, MarkReader, mark_bytes, new_secret
from monarch_kernel.runtime.worker.stdio import OutputMarks

SECRET = new_secret()
LIKE_MARKS = [
    b"\0",
    b"\0monarch-kernel",
    b"\0monarch-kernel mark 4503599627370496\n",
    mark_bytes(new_secret(), FIRST_MARK),
    mark_bytes(SECRET, FIRST_MARK)[:-1],
    mark_bytes(SECRET, FIRST_MARK)[:-1] + b"x",
]
WRITTEN = st.one_of(st.binary(max_size=30), st.sampled_from(LIKE_MARKS))


def text_of(pieces: list[tuple[bytes, int]]) -> bytes:
    return b"".join(piece for piece, _ in pieces)


@given(st.lists(WRITTEN, max_size=6), st.data())
def test_marks_come_through_any_chunking(pieces: list[bytes], data: st.DataObject) -> None:
    read, write = os.pipe()
    try:
        marks = OutputMarks((write, write), SECRET)
        number = 0
        for piece in pieces:
            os.write(write, piece)
            number = marks.set()[0]
        os.write(write, b"the end")
        stream = os.read(read, 1 << 16)
    finally:
        os.close(read)
        os.close(write)
    reader = MarkReader(SECRET)
    shown = b""
    while stream:
        n = data.draw(st.integers(1, len(stream)))
        shown += text_of(reader.feed(stream[:n]))
        stream = stream[n:]
    assert shown == b"".join(pieces) + b"the end"
    assert reader.last == number


def test_an_unfinished_mark_is_not_reported() -> None:
    read, write = os.pipe()
    try:
        os.write(write, b"before")
        number, _ = OutputMarks((write, -1), SECRET).set()
        data = os.read(read, 1 << 16)
    finally:
        os.close(read)
        os.close(write)
    reader = MarkReader(SECRET)
    assert (reader.feed(data[:-1]), reader.last) == ([(b"before", 0)], 0)
    assert (reader.feed(data[-1:]), reader.last) == ([(b"", number), (b"", 0)], number)


def test_a_closed_stream_does_no_harm() -> None:
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    assert OutputMarks((write, write), SECRET).set()[0] > 0


def test_a_mark_separates_output_before_it_from_output_after_it() -> None:
    read, write = os.pipe()
    try:
        marks = OutputMarks((write, -1), SECRET)
        os.write(write, b"one")
        first, _ = marks.set()
        second, _ = marks.set()
        os.write(write, b"two")
        data = os.read(read, 1 << 16)
    finally:
        os.close(read)
        os.close(write)
    assert MarkReader(SECRET).feed(data) == [(b"one", first), (b"", second), (b"two", 0)]


def test_a_fork_of_a_rank_sets_no_marks_and_knows_no_secret() -> None:
    code = (
        "import os; from monarch_kernel.runtime.worker.stdio import install_streams\n"
        "before = len(os.listdir('/proc/self/fd')); marks = install_streams('s'); marks.set()\n"
        "pid = os.fork()\n"
        "count = lambda: len(os.listdir('/proc/self/fd'))\n"
        "if not pid: marks.set(display=True); print('child', count() - before, vars(marks)['_secret']); "
        "os._exit(0)\n"
        "os.waitpid(pid, 0); print('rank'); marks.set()"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    reader = MarkReader("s")
    (_, first), (text, second), _ = reader.feed(said)
    assert text == b"child 0 \nrank\n"
    assert (first, second) == (FIRST_MARK, FIRST_MARK + MARK_STEP)
