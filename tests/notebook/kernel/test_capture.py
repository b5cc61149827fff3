"""``%%capture`` in the notebook captures exactly what a remote cell shows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Cell, Notebook

pytestmark = pytest.mark.timeout(120)


def test_capture_takes_all_output_of_a_remote_cell(notebook: Notebook) -> None:
    cell = notebook.ok("%%capture got\n%remote print('text') or display('shown') or 6 * 7")
    assert not cell.shown
    assert not cell.stdout
    assert notebook.value("got.stdout") == "[0-1] text\n"
    plain = notebook.value("[each.data['text/plain'] for each in got.outputs]")
    assert plain == ["[0-1] 'shown'", "[0-1] 42"]


def test_capture_leaves_the_table_of_the_mesh_alive(notebook: Notebook, tmp_path: Path) -> None:
    shown = notebook.ok("%mesh show t")
    table = shown.of_type("display_data")[0]["content"]["transient"]["display_id"]
    gate = tmp_path / "gate"
    cell = notebook.send(
        f"%%capture got\n%remote while not __import__('os').path.exists({str(gate)!r}): __import__('time').sleep(0.01)"
    )

    def is_drawn(cell: Cell) -> bool:
        updates = [m["content"] for m in cell.of_type("update_display_data")]
        texts = [each["data"]["text/plain"] for each in updates if each["transient"]["display_id"] == table]
        return any("running" in text for text in texts)

    cell.wait_for(is_drawn)
    gate.touch()
    assert cell.wait().ok, cell.text
    assert notebook.value("len(got.outputs)") == 0


def test_capture_takes_nothing_for_none(notebook: Notebook) -> None:
    assert not notebook.ok("%%capture got\n%remote None").shown
    assert notebook.value("len(got.outputs)") == 0
