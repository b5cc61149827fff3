"""Cells in the background: their state and its duration, as the notebook shows them."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.notebook.cells import background as background_module
from monarch_kernel.notebook.cells.background import Background, BackgroundCell


class Cell(SimpleNamespace):
    """Stands for a cell on ranks that waits for its turn, and is over in the poll in which that comes.

    Args:
        is_sent: whether the ranks get it, or it ends without that.
    """

    def __init__(self, is_sent: bool) -> None:
        sink = SimpleNamespace(pin=lambda: None)
        super().__init__(mesh=SimpleNamespace(name="t"), ranks=(0, 1), number=3, output=SimpleNamespace(sink=sink))
        self.stage, self.sent_at, self.is_sent = "waiting", None, is_sent
        self.its_turn = threading.Event()

    def poll(self, now: float) -> None:
        if self.its_turn.is_set():
            self.sent_at = now if self.is_sent else None
            self.stage = "over"

    def result(self) -> Any:
        return None


@pytest.mark.parametrize("is_sent", [True, False])
def test_the_time_in_the_queue_does_not_count_for_a_cell_that_is_over_at_once(
    is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(background_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    background = Background(lambda now: None)
    cell: Any = Cell(is_sent)
    shown = BackgroundCell(cell, background, lambda result: result, lambda cell: None)
    clock[0] += 7
    assert repr(shown) == "cell [3] on t[0-1]: queued for 7.0 s"
    cell.its_turn.set()
    background.close()  # polls once
    assert re.fullmatch(rf"cell \[3\] on t\[0-1\]: done after {'0' if is_sent else '7'}\S* \w*", repr(shown))
