"""Output of ranks outside of cells: ranks that wrote the same share a line."""

from __future__ import annotations

import pytest

from monarch_kernel.base.events import OutputEvent
from monarch_kernel.runtime.controller.effects import RichEvent
from monarch_kernel.runtime.controller.printer import LINE_WAITS, OutputPrinter


def wrote(rank: int, text: str, *, request: int = 1, stream: str = "stdout", dropped: int = 0) -> OutputEvent:
    return OutputEvent(request, rank, stream, text, dropped, "trainers")  # type: ignore[arg-type]


def test_ranks_that_wrote_the_same_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    printer = OutputPrinter()
    for rank in (2, 0, 1):
        printer.take(wrote(rank, "hel"))
        printer.take(wrote(rank, "lo\nworld\n" if rank else "lo\n"))
    printer.flush()
    printer.flush()
    assert capsys.readouterr().out == "trainers[0] hello\ntrainers[1-2] hello\ntrainers[1-2] world\n"


def test_streams_are_kept_apart_and_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    printer = OutputPrinter()
    printer.take(wrote(0, "out"))
    printer.take(wrote(0, "careful\n", stream="stderr", dropped=1200))
    printer.flush(everything=True)
    written = capsys.readouterr()
    assert written.out == "trainers[0] out\n"
    assert (
        written.err
        == "trainers[0] … 1,200 lines left out here; more: %mesh logs trainers --lines 2000\ntrainers[0] careful\n"
    )


def test_a_line_that_arrives_in_pieces_is_printed_once_complete(capsys: pytest.CaptureFixture[str]) -> None:
    printer = OutputPrinter()
    pieces = ["one\ntw", "", "o\nthr", "e", "e\r", "\nfour\n"]
    for piece in pieces:
        printer.take(wrote(0, piece))
        printer.take(wrote(0, f"{len(piece)}\n", stream="stderr"))
        printer.flush()
    written = capsys.readouterr()
    assert written.out == "".join(f"trainers[0] {line}\n" for line in ("one", "two", "three", "four"))
    assert written.err == "".join(f"trainers[0] {len(piece)}\n" for piece in pieces)


def test_an_incomplete_line_is_printed_when_its_request_ends_or_nothing_follows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printer = OutputPrinter()
    printer.take(wrote(0, "of the first", request=1))
    printer.take(wrote(1, "of the second", request=2))
    assert printer.holds(1)
    printer.flush(1)
    assert capsys.readouterr().out == "trainers[0] of the first\n"
    assert not printer.holds(1)
    assert printer.holds(2)
    for _ in range(LINE_WAITS):
        assert not capsys.readouterr().out
        printer.flush()
    assert capsys.readouterr().out == "trainers[1] of the second\n"
    assert not printer.holds(2)


def test_displays_are_printed_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    printer = OutputPrinter()
    for rank in (0, 1):
        printer.take(RichEvent(1, rank, {"text/plain": "a figure", "image/png": "..."}, {}, "trainers"))
    printer.take(RichEvent(1, 0, {"image/png": "..."}, {}, "trainers"))
    printer.flush()
    assert capsys.readouterr().out == "trainers[0-1] a figure\n"
