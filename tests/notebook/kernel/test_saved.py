"""What a saved notebook shows of meshes: their last state, when that was, and curves; and nothing that nbconvert can't show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter

from tests.notebook.kernel.conftest import WIDGET, Cell, Notebook

WAITS = """
import os, time
from monarch_kernel.actor import Actor, endpoint
class Waits(Actor):
    @endpoint
    def wait(self, path):
        while not os.path.exists(path):
            time.sleep(0.02)
actor = t.spawn("waits", Waits)
"""
MOMENT = r"\(as of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+\)"


TIMES = "from monarch_kernel.notebook.magics import bring_up\n"


@pytest.fixture
def at_once(notebook: Notebook) -> Iterator[Notebook]:
    """A notebook where meshes show no progress, however long they take to come up."""
    notebook.ok(f"{TIMES}first_word_s, bring_up._FIRST_WORD_S = bring_up._FIRST_WORD_S, 1e9")
    yield notebook
    notebook.ok("bring_up._FIRST_WORD_S = first_word_s")


def outputs(*cells: Cell) -> list[dict[str, Any]]:
    """The rich outputs of cells as a frontend saves them: MIME type -> data, with updates applied."""
    found: dict[str, dict[str, Any]] = {}
    for message in (each for cell in cells for each in cell.of_type("display_data", "update_display_data")):
        id = message["content"].get("transient", {}).get("display_id", str(len(found)))
        if message["msg_type"] == "display_data" or id in found:
            found[id] = message["content"]["data"]
    return list(found.values())


def tables(*cells: Cell) -> list[str]:
    return [data["text/html"] for data in outputs(*cells) if "<table" in data.get("text/html", "")]


def test_the_last_state_its_time_and_the_curves_are_saved(notebook: Notebook) -> None:
    up = notebook.ok("%mesh up u -n 1 --device cpu")
    loop = notebook.ok("%%remote u\nfor step in live.loop(3):\n    live.log(loss=4 - step)")
    (table,) = tables(up, loop)
    assert "step 3 of 3" in table
    assert re.search(MOMENT, table)
    assert 'alt="loss from step 0 to 2' in table
    shown = notebook.ok("%mesh show u")
    down = notebook.ok("%mesh down u")
    first, second = tables(up, loop, shown, down)
    assert "idle" in first
    assert "stopped" in second
    assert all('alt="loss from step 0 to 2' in each for each in (first, second))
    notes = [data["text/plain"] for data in outputs(up, loop, shown, down) if "<table" not in data["text/html"]]
    assert notes == [
        "The live view of u has moved to a later cell (%mesh show).",
        "u was ended by %mesh down. The table shows its last state.",
    ]


def page(*cells: Cell) -> str:
    """The page that nbconvert makes of the outputs; a warning of it is an error."""
    saved = [nbformat.v4.new_output("display_data", data) for data in outputs(*cells)]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=saved)])
    return str(HTMLExporter(template_name="basic").from_notebook_node(notebook)[0])


def test_nbconvert_shows_all_outputs_without_a_warning(at_once: Notebook) -> None:
    notebook = at_once
    up = notebook.ok("%mesh up u -n 1 --device cpu")
    assert "The live view of u needs its kernel." in page(up)
    (widget,) = (data for data in outputs(up) if WIDGET in data)
    assert "text/plain" not in widget  # a terminal would print it below the table
    down = notebook.ok("%%capture captured\n%mesh down u")
    assert "u was ended by %mesh down." in page(up, down)
    assert not any(WIDGET in data for data in outputs(up, down))
    assert notebook.value("captured.outputs") == []


def test_the_table_is_at_rest_when_the_cell_is(notebook: Notebook, tmp_path: Path) -> None:
    shown = notebook.ok(f"%mesh show t\n{WAITS}")
    goes_on = tmp_path / "goes on"
    cell = notebook.send(f"actor.wait.call({str(goes_on)!r}).get()")
    cell.wait_for(lambda cell: "running" in str(tables(shown, cell)))
    goes_on.touch()
    cell.wait()
    (table,) = tables(shown, cell)
    assert "running" not in table
    assert "2 idle" in table


LINE = r"u: gpus=1, 1 rank \(1 idle\), local, up for \S+ s"


def test_a_terminal_shows_a_line_for_a_mesh_that_comes_up_and_a_table_when_asked(at_once: Notebook) -> None:
    up = at_once.ok("%mesh up u -n 1 --device cpu")
    assert re.fullmatch(LINE, up.plain)
    assert "rank  state" in at_once.ok("%mesh show u").plain
    at_once.ok("%mesh down u")


def test_a_terminal_that_showed_the_progress_shows_that_the_mesh_is_up(notebook: Notebook) -> None:
    notebook.ok(
        f"{TIMES}times = bring_up._FIRST_WORD_S, bring_up._PUMP_S\nbring_up._FIRST_WORD_S = bring_up._PUMP_S = 0.001"
    )
    up = notebook.ok("%mesh up u -n 1 --device cpu")
    first, last = (message["content"]["data"]["text/plain"] for message in up.of_type("display_data"))
    assert first.startswith("u: waiting for ranks to start (0 of 1 are up")
    assert re.fullmatch(LINE, last)
    notebook.ok("%mesh down u\nbring_up._FIRST_WORD_S, bring_up._PUMP_S = times")
