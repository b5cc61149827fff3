"""Marks between what a rank writes: they come through any chunking, and nothing else is touched."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.agent.streams import MarkReader, OutputMarks

WRITTEN = st.one_of(
    st.binary(max_size=30), st.sampled_from([b"\0", b"\0monarch-kernel", b"\0monarch-kernel mark 12 x"])
)


@given(st.lists(WRITTEN, max_size=6), st.data())
def test_marks_come_through_any_chunking(pieces: list[bytes], data: st.DataObject) -> None:
    read, write = os.pipe()
    try:
        marks = OutputMarks((write, write))
        number = 0
        for piece in pieces:
            os.write(write, piece)
            number = marks.set()[0]
        os.write(write, b"the end")
        stream = os.read(read, 1 << 16)
    finally:
        os.close(read)
        os.close(write)
    reader = MarkReader()
    shown = b""
    while stream:
        n = data.draw(st.integers(1, len(stream)))
        shown += reader.feed(stream[:n])
        stream = stream[n:]
    assert shown == b"".join(pieces) + b"the end"
    assert reader.last == number


def test_an_unfinished_mark_is_not_told() -> None:
    read, write = os.pipe()
    try:
        os.write(write, b"before")
        number, _ = OutputMarks((write, -1)).set()
        data = os.read(read, 1 << 16)
    finally:
        os.close(read)
        os.close(write)
    reader = MarkReader()
    assert (reader.feed(data[:-1]), reader.last) == (b"before", 0)
    assert (reader.feed(data[-1:]), reader.last) == (b"", number)


def test_a_closed_stream_harms_nobody() -> None:
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    assert OutputMarks((write, write)).set()[0] > 0
