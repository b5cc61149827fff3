"""A flood of displays does not fill the memory of the notebook: those that wait are bounded, and the last one is shown."""

from __future__ import annotations

import types
from typing import Any

from monarch_kernel.notebook.cells.output import CellOutput
from monarch_kernel.notebook.output.mime import nbytes
from monarch_kernel.notebook.output.rich import OUR_METADATA, RichSlots
from monarch_kernel.runtime.controller.effects import RichEvent


class Page:
    """A sink that keeps what is shown."""

    can_update = True

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.clears = 0

    def write(self, stream: str, text: str) -> None:
        self.shown.append(text)

    def display(self, data: Any, metadata: Any = None, display_id: str = "", update: bool = False) -> None:
        self.shown.append(str(data.get("text/plain")))

    def clear(self, wait: bool) -> None:
        self.clears += 1


def output_on(page: Page) -> CellOutput:
    mesh: Any = types.SimpleNamespace(ranks=[0], name="t")
    return CellOutput(mesh, page, RichSlots("prefix"), raw=False)  # type: ignore[arg-type]


def event(text: str, size: int = 0, **about: Any) -> RichEvent:
    data: dict[str, object] = {"text/plain": text, "text/html": "x" * size} if text else {}
    return RichEvent(7, 0, data, {OUR_METADATA: about} if about else {}, "t")


def test_displays_that_wait_are_bounded_and_the_last_is_shown() -> None:
    page = Page()
    output = output_on(page)
    for i in range(300):
        output.handle(event(f"number {i}", 1_000_000))
    assert sum(nbytes(waiting.event.data) for waiting in output._events) < 70_000_000
    output.finish(1.0)
    assert "number 299" in page.shown
    assert any("left out here" in text for text in page.shown)
    assert not output.is_open


def test_one_large_display_is_shown() -> None:
    page = Page()
    output = output_on(page)
    output.handle(event("large", 80_000_000))
    output.finish(1.0)
    assert "large" in page.shown


def test_updates_and_clears_that_wait_keep_their_meaning() -> None:
    page = Page()
    output = output_on(page)
    for i in range(100):
        output.handle(event(f"state {i}", 1_000_000, display_id="a", update=i > 0))
    output.handle(event("", clear_output=False))
    for i in range(100):
        output.handle(event(f"after {i}", 1_000_000))
    output.finish(1.0)
    assert page.clears == 1
    assert page.shown[-1] == "after 99"
