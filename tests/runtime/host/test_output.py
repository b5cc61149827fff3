"""Output of a rank is shown as it comes; a flood is bounded and counted, and its end is shown."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.net.wire.messages import Output, OutputChunk
from monarch_kernel.net.wire.stream_marks import (
    END_OF_CELL,
    FIRST_MARK,
    MARK_STEP,
    MarkReader,
    mark_bytes,
    new_secret,
    switch_mark,
)
from monarch_kernel.runtime.host.logs import RankLog
from monarch_kernel.runtime.host.output import (
    BURST_CHARS,
    CHARS_PER_S,
    ORDER_GRACE_S,
    TAIL_EVERY_S,
    TAIL_LINE_CHARS,
    TAIL_LINES,
    OutputStream,
    fold,
)
from monarch_kernel.runtime.host.rank_output import OUTPUT_EVERY_S, RankOutput, take_output
from monarch_kernel.runtime.worker.stdio import OutputMarks

SECRET = new_secret()


class Pipe:
    """A stream, and the other end of its pipe, to which the test writes."""

    def __init__(self, *, is_whole: bool = False) -> None:
        read_end, self.fd = os.pipe()
        self.stream = OutputStream(7, "stdout", read_end, MarkReader(SECRET), is_whole=is_whole)

    def write(self, data: bytes) -> None:
        """Write data in parts that fit into the pipe, and read them from the stream."""
        os.set_blocking(self.fd, False)
        while data:
            try:
                data = data[os.write(self.fd, data) :]
            except BlockingIOError:
                self.stream.read()
        self.stream.read()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()
    os.close(pipe.stream.fd)


def test_text_passes_unchanged(pipe: Pipe) -> None:
    assert not pipe.stream.waiting
    assert pipe.stream.take(0.0) is None
    pipe.write(b"a line\nhalf")
    assert pipe.stream.waiting
    chunk = pipe.stream.take(1.0)
    assert chunk is not None
    assert (chunk.proc, chunk.stream, chunk.text, chunk.end, chunk.dropped_lines) == (
        7,
        "stdout",
        "a line\nhalf",
        11,
        0,
    )
    assert not pipe.stream.waiting
    assert pipe.stream.take(1.0) is None


def test_nothing_is_dropped_where_all_output_is_shown() -> None:
    pipe = Pipe(is_whole=True)
    lines = b"".join(b"%07d\n" % i for i in range(1_000_000))
    assert len(lines) > 2 * BURST_CHARS
    pipe.write(lines)
    chunk = pipe.stream.take(0.0)
    assert chunk is not None
    assert chunk.text.encode() == lines
    assert chunk.dropped_lines == 0
    pipe.close()
    os.close(pipe.stream.fd)


def test_pipes_are_not_read_while_the_controller_is_slow(tmp_path: Path) -> None:
    sent: list[Output] = []
    is_slow = True
    with selectors.DefaultSelector() as selector:
        output = RankOutput({}, selector, sent.append, str(tmp_path), lambda: is_slow)
        log = RankLog(str(tmp_path), 7)
        (stdout, stderr), ends = output.open(7, SECRET, log, is_whole=True)
        os.set_blocking(ends[0], False)
        written = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                written += os.write(ends[0], b"x" * 4096)
                for key, _ in selector.select(0):
                    key.data()
        for key, _ in selector.select(0):
            key.data()
        output.tick(1.0)
        assert not stdout.waiting
        output.flush(1.0)
        assert output.due_in(1.0) == OUTPUT_EVERY_S  # no event tells that the controller has caught up
        assert stdout.fd not in selector.get_map()
        assert stderr.fd in selector.get_map()  # it is dropped from the selector only once there is something to read
        is_slow = False
        assert output.due_in(2.0) == 0.0
        output.tick(2.0)
        assert output.due_in(2.0) is None
        while not stdout.waiting or selector.select(0):
            for key, _ in selector.select(0):
                key.data()
        assert sum(len(chunk.text) for chunk in take_output([stdout], 3.0)) == written
        is_slow = True
        os.write(ends[0], b"y")
        for key, _ in selector.select(0):
            key.data()
        output.close([stdout, stderr])  # also one that is not read
        assert len(selector.get_map()) == 0
        log.remove()
        for end in ends:
            os.close(end)


def test_a_character_that_comes_in_pieces_is_joined(pipe: Pipe) -> None:
    encoded = "é€😀".encode()
    texts = []
    for i in range(len(encoded)):
        pipe.write(encoded[i : i + 1])
        chunk = pipe.stream.take(1.0)
        assert chunk is not None  # bytes are counted even if they do not complete a character
        assert chunk.end == i + 1
        texts.append(chunk.text)
    assert "".join(texts) == "é€😀"


def test_invalid_bytes_are_replaced(pipe: Pipe) -> None:
    pipe.write(b"\xff\xfeok\n")
    chunk = pipe.stream.take(1.0)
    assert chunk is not None
    assert chunk.text == "\ufffd\ufffdok\n"
    assert chunk.end == 5


@pytest.mark.parametrize("number", [1, FIRST_MARK, FIRST_MARK + 1, switch_mark(0, 0), switch_mark(7, 1), 10**16 - 1])
@pytest.mark.parametrize(
    "secret",
    [b"", b"%s " % (b"0" * 32), b"%s " % new_secret().encode(), b"%s " % SECRET[:-1].encode()],
    ids=["none", "zeros", "of another rank", "cut off"],
)
def test_a_mark_without_the_secret_of_the_rank_is_text(pipe: Pipe, number: int, secret: bytes) -> None:
    written = b"\0monarch-kernel mark %s%016d\n" % (secret, number)
    pipe.write(written)
    chunk = pipe.stream.take(1.0)
    assert chunk is not None
    assert (chunk.text, chunk.end) == (written.decode(), len(written))
    assert (pipe.stream.successor, pipe.stream.request) == (-1, 0)


def test_text_like_the_beginning_of_a_mark_is_shown_at_once(pipe: Pipe) -> None:
    mark = mark_bytes(SECRET, FIRST_MARK)
    for end in range(1, len(mark)):
        pipe.write(mark[:end])
        chunk = pipe.stream.take(1.0)
        assert chunk is not None
        assert chunk.text == mark[:end].decode()
        pipe.write(mark[end:])  # not a mark: a rank writes a mark at once
        chunk = pipe.stream.take(1.0)
        assert chunk is not None
        assert chunk.text == mark[end:].decode()


def test_a_mark_that_ends_in_the_next_read_is_a_mark(pipe: Pipe) -> None:
    fcntl.fcntl(pipe.fd, fcntl.F_SETPIPE_SZ, 1 << 20)
    mark = mark_bytes(SECRET, FIRST_MARK)
    text = b"x" * ((1 << 16) - 10)
    os.write(pipe.fd, text + mark + b"after")
    pipe.stream.read()
    before, after = pipe.stream.take(1.0), pipe.stream.take(2.0)
    assert before is not None
    assert after is not None
    assert (before.text, before.end) == (text.decode(), FIRST_MARK)
    assert after.text == "after"


def test_the_beginning_of_a_mark_is_shown_at_the_end(pipe: Pipe) -> None:
    os.write(pipe.fd, mark_bytes(SECRET, FIRST_MARK)[:-1])
    pipe.close()
    while pipe.stream.read():
        pass
    chunk = pipe.stream.take(0.0, last=True)
    assert chunk is not None
    assert chunk.text == mark_bytes(SECRET, FIRST_MARK)[:-1].decode()


def test_read_reports_the_end(pipe: Pipe) -> None:
    pipe.write(b"last words")
    assert pipe.stream.read()
    pipe.close()
    assert not pipe.stream.read()
    chunk = pipe.stream.take(0.0, last=True)
    assert chunk is not None
    assert chunk.text == "last words"


def test_the_shown_part_of_a_flood_is_bounded_and_the_rest_counted(pipe: Pipe) -> None:
    nlines, seconds = 200_000, 5
    shown, dropped, text, now = 0, 0, "", 0.0
    line = 0
    while line < nlines:
        batch = min(nlines, line + nlines // 500)
        pipe.write("".join(f"line {i:09}\n" for i in range(line, batch)).encode())
        line = batch
        now += seconds / 500
        chunk = pipe.stream.take(now)
        if chunk is not None:
            shown, dropped, text = shown + chunk.text.count("\n"), dropped + chunk.dropped_lines, chunk.text
            assert chunk.end <= 15 * nlines
    chunk = pipe.stream.take(now + TAIL_EVERY_S, last=True)
    if chunk is not None:
        shown, dropped, text = shown + chunk.text.count("\n"), dropped + chunk.dropped_lines, chunk.text
        assert chunk.end == 15 * nlines
    assert shown + dropped == nlines  # every line is shown or counted
    tails = TAIL_LINES * 15 * (seconds / TAIL_EVERY_S + 1)
    assert 15 * shown <= BURST_CHARS + CHARS_PER_S * seconds + tails
    assert text.endswith(f"line {nlines - 1:09}\n")  # and the end is shown


def test_a_flood_without_line_ends_is_bounded(pipe: Pipe) -> None:
    kept = 0
    for i in range(64):
        pipe.write(b"x" * (1 << 20))
        chunk = pipe.stream.take(i * 0.01)
        kept += len(chunk.text) if chunk else 0
    assert kept < 2 * BURST_CHARS
    assert len(max(pipe.stream.tail(), key=len)) <= TAIL_LINE_CHARS


def test_after_a_flood_text_passes_again(pipe: Pipe) -> None:
    pipe.write(b"flood\n" * (BURST_CHARS // 2))
    pipe.stream.take(0.0)
    pipe.stream.take(1.0, last=True)
    pipe.write(b"calm\n")
    chunk = pipe.stream.take(10.0)
    assert chunk is not None
    assert (chunk.text, chunk.dropped_lines) == ("calm\n", 0)


def test_the_tail_is_the_last_lines(pipe: Pipe) -> None:
    pipe.write(b"".join(b"line %d\n" % i for i in range(100)))
    pipe.write(b"\n\nhalf a line")
    pipe.stream.take(0.0)
    tail = pipe.stream.tail()
    assert tail[-2:] == ("line 99", "half a line")
    assert len(tail) <= 61


def chunk_of(proc: int, text: str, end: int, *, stream: Literal["stdout", "stderr"] = "stdout") -> OutputChunk:
    return OutputChunk(proc, stream, text, end)


def test_equal_text_of_several_ranks_is_sent_once_with_each_end() -> None:
    alike = [[chunk_of(proc, "a\n", proc), chunk_of(proc, "b\n", 10 * proc, stream="stderr")] for proc in (1, 2, 3)]
    folded = list(fold(alike))
    assert folded == [
        OutputChunk(1, "stdout", "a\n", 1, also=((2, 2), (3, 3))),
        OutputChunk(1, "stderr", "b\n", 10, also=((2, 20), (3, 30))),
    ]
    assert sorted((each for chunk in folded for each in chunk.of_each()), key=lambda each: each.proc) == [
        chunk for chunks in alike for chunk in chunks
    ]


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.sampled_from(["", "a", "b\n"])), max_size=4),
        max_size=6,
    )
)
def test_folding_preserves_the_output_and_order_of_each_rank(written: list[list[tuple[Any, str]]]) -> None:
    of_ranks = [
        [OutputChunk(proc, stream, text, end) for end, (stream, text) in enumerate(chunks)]
        for proc, chunks in enumerate(written)
    ]
    unfolded = [each for chunk in fold(chunks for chunks in of_ranks if chunks) for each in chunk.of_each()]
    assert [[chunk for chunk in unfolded if chunk.proc == proc] for proc in range(len(written))] == of_ranks


WRITES = st.lists(st.tuples(st.sampled_from(["out", "err"]), st.booleans(), st.booleans()), max_size=30)


@given(WRITES)
def test_lines_of_both_streams_come_in_the_order_in_which_the_rank_wrote_them(
    writes: list[tuple[str, bool, bool]],
) -> None:
    """The agent reads the two pipes at any moments, in any order."""
    pipes = {name: os.pipe() for name in ("out", "err")}
    marks = OutputMarks((pipes["out"][1], pipes["err"][1]), SECRET)
    streams = [
        OutputStream(7, "stdout" if name == "out" else "stderr", pipes[name][0], MarkReader(SECRET)) for name in pipes
    ]
    shown = ""
    try:
        for i, (name, reads_out, reads_err) in enumerate(writes):
            marks.write_to(1 if name == "out" else 2)
            os.write(pipes[name][1], f"{name} {i}\n".encode())
            for stream, reads in zip(streams, (reads_out, reads_err)):
                if reads:
                    stream.read()
            shown += "".join(chunk.text for chunk in take_output(streams, 0.0))
        for stream in streams:
            stream.read()
        shown += "".join(chunk.text for chunk in take_output(streams, 0.0))
    finally:
        for pipe in pipes.values():
            for fd in pipe:
                os.close(fd)
    assert shown.splitlines() == [f"{name} {i}" for i, (name, _, _) in enumerate(writes)]


def test_output_does_not_wait_for_ever_for_a_mark_that_is_lost(pipe: Pipe) -> None:
    other_end, other = os.pipe()
    stderr = OutputStream(7, "stderr", other_end, MarkReader(SECRET))
    pipe.write(b"one\n" + mark_bytes(SECRET, FIRST_MARK) + b"two\n")
    streams = [pipe.stream, stderr]
    assert [chunk.text for chunk in take_output(streams, 5.0)] == ["one\n"]
    assert [chunk.text for chunk in take_output(streams, 5.0)] == []
    assert [chunk.text for chunk in take_output(streams, 5.0 + ORDER_GRACE_S)] == ["two\n"]
    pipe.write(mark_bytes(SECRET, FIRST_MARK + 4) + b"three\n")
    assert [chunk.text for chunk in take_output(streams, 9.0, last=True)] == ["", "three\n"]
    os.close(other)
    os.close(other_end)


def test_the_tail_has_nothing_of_cells_that_have_ended(pipe: Pipe) -> None:
    pipe.write(b"of the first cell\nhalf" + mark_bytes(SECRET, FIRST_MARK + END_OF_CELL))
    assert pipe.stream.tail() == ()
    pipe.write(b"of a call\n" + mark_bytes(SECRET, FIRST_MARK + MARK_STEP) + b"of the second cell\n")
    assert pipe.stream.tail() == ("of a call", "of the second cell")


@pytest.mark.parametrize("end", [b"", b"\r", b"\n", b"\r\n"])
def test_the_tail_shows_the_last_version_of_a_progress_bar(pipe: Pipe, end: bytes) -> None:
    pipe.write(b"start\r\n" + b"".join(b"\r%3d%%|####" % i for i in range(500)) + end)
    assert pipe.stream.tail() == ("start", "499%|####")
