"""Output of ranks outside of cells: ranks that wrote the same share a line."""

from __future__ import annotations

import pytest

from monarch_kernel.base.events import OutputEvent
from monarch_kernel.runtime.controller.effects import RichEvent
from monarch_kernel.runtime.controller.printer import OutputPrinter


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
    printer.flush()
    written = capsys.readouterr()
    assert written.out == "trainers[0] out\n"
    assert written.err == "trainers[0] … 1,200 lines left out here\ntrainers[0] careful\n"


def test_displays_are_printed_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    printer = OutputPrinter()
    for rank in (0, 1):
        printer.take(RichEvent(1, rank, {"text/plain": "a figure", "image/png": "..."}, {}, "trainers"))
    printer.take(RichEvent(1, 0, {"image/png": "..."}, {}, "trainers"))
    printer.flush()
    assert capsys.readouterr().out == "trainers[0-1] a figure\n"
