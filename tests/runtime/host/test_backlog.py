"""The backlog keeps the output of ranks without a controller, in order; of too much output it keeps the last part."""

from __future__ import annotations

from monarch_kernel.net.wire.messages import OutputChunk
from monarch_kernel.runtime.host.backlog import BACKLOG_CHARS, OutputBacklog


def take(backlog: OutputBacklog) -> list[tuple[int, str, str, int]]:
    return [(chunk.proc, chunk.stream, chunk.text, chunk.dropped_lines) for chunk in backlog.take()]


def test_output_is_returned_once_by_rank_in_order() -> None:
    backlog = OutputBacklog()
    backlog.add([OutputChunk(2, "stdout", "a\n", 1), OutputChunk(1, "stdout", "b\n", 1)])
    backlog.add([OutputChunk(2, "stdout", "c\n", 2), OutputChunk(2, "stderr", "d\n", 1)])
    backlog.add([OutputChunk(2, "stdout", "e\n", 3), OutputChunk(1, "stdout", "", 2)])
    assert take(backlog) == [
        (1, "stdout", "b\n", 0),
        (2, "stdout", "a\nc\n", 0),
        (2, "stderr", "d\n", 0),
        (2, "stdout", "e\n", 0),
    ]
    assert take(backlog) == []


def test_dropped_lines_are_counted_at_their_place() -> None:
    backlog = OutputBacklog()
    backlog.add([OutputChunk(1, "stdout", "a\n", 1), OutputChunk(1, "stdout", "z\n", 2, dropped_lines=7)])
    assert take(backlog) == [(1, "stdout", "a\n", 0), (1, "stdout", "z\n", 7)]


def test_the_last_part_of_too_much_output_is_kept_and_the_rest_counted() -> None:
    backlog = OutputBacklog()
    line = "x" * 99 + "\n"
    total = 5 * BACKLOG_CHARS // len(line)
    for number in range(total):
        backlog.add([OutputChunk(1, "stdout", line, number + 1)])
    backlog.add([OutputChunk(1, "stdout", "the end\n", total + 1), OutputChunk(2, "stdout", "other\n", 1)])
    chunks = backlog.take()
    ours = [chunk for chunk in chunks if chunk.proc == 1]
    kept = "".join(chunk.text for chunk in ours)
    assert BACKLOG_CHARS * 0.9 < len(kept) <= BACKLOG_CHARS
    assert kept.endswith("the end\n")
    assert [chunk.dropped_lines > 0 for chunk in ours] == [True, *[False] * (len(ours) - 1)]
    assert ours[0].dropped_lines + kept.count("\n") == total + 1
    assert chunks[-1].text == "other\n"  # the bound is for each rank
