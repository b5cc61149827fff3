"""Frames as text: what a terminal shows of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monarch_kernel.notebook.clients.texts import list_text, mesh_text
from monarch_kernel.notebook.view.frames import STATES, pack_states, unpack_states

GOLDEN = Path(__file__).parents[1] / "view" / "golden"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_each_golden_frame_has_a_text_without_controls(path: Path) -> None:
    frame = json.loads(path.read_text())
    for mesh in frame.get("meshes", ()):
        text = mesh_text(mesh, frame["at"])
        assert text.startswith(f"{mesh['name']}: ")
        assert text.isprintable() or set(text) - {"\n"} <= {each for each in text if each.isprintable()}
        for rank in mesh.get("ranks", ()):
            assert rank.get("error", "") in text


def test_a_list_names_the_kernel_of_each_mesh() -> None:
    mesh = {"name": "t", "axes": [["gpus", 2]], "counts": {"idle": 1, "dead": 1}, "where": "local", "since": 1.0}
    kernels = [
        {"id": "aaa", "notebook": "/n/a.ipynb", "meshes": [mesh]},
        {"id": "bbb", "notebook": "", "meshes": []},
    ]
    lines = [line.split() for line in list_text(kernels).splitlines()]
    assert lines[1:] == [["t", "gpus=2", "1", "idle,", "1", "dead", "local", "aaa", "/n/a.ipynb"], ["-", "bbb"]]
    assert "start a notebook with the kernel Python (Monarch)" in list_text([])


@pytest.mark.parametrize("count", [0, 1, 2, 35])
def test_packed_states_are_read_back(count: int) -> None:
    states = [STATES[i % len(STATES)] for i in range(count)]
    assert unpack_states(pack_states(states), count) == states
