"""Tests that the completer of JupyterLab shows names of ranks with their kinds, each on one line."""

from __future__ import annotations

import pytest

from tests.lab.conftest import OLDEST_TOO, UP, Lab, Server

pytest.importorskip("playwright")
pytestmark = pytest.mark.slow

NAMES = """%%remote t
import torch
alpha_tensor = torch.zeros(1024, 1024, 3)
alpha_model = torch.nn.TransformerEncoderLayer(8, 2)
alpha_number = 5"""
FIT = """(list) => Array.from(list.querySelectorAll(".jp-Completer-typeExtended")).map((kind) => {
    const [box, room] = [kind.getBoundingClientRect(), list.getBoundingClientRect()];
    return [kind.textContent, kind.scrollHeight <= kind.clientHeight, box.right <= room.right];
})"""


@OLDEST_TOO
def test_kinds_are_on_one_line_and_inside_the_list(lab: Lab, server: Server) -> None:
    lab.load(server.write("a.ipynb", UP, NAMES, "%%remote t\nalpha"))
    lab.run(0)
    lab.run(1)
    lab.cell(2).locator(".cm-content").click()
    lab.page.keyboard.press("Control+End")
    lab.page.keyboard.press("Tab")
    completer = lab.page.locator(".jp-Completer")
    completer.get_by_text("alpha_tensor").wait_for()
    lab.shot("completer")
    shown = completer.evaluate(FIT)
    assert [fits for _, *fits in shown] == [[True, True]] * 3
    assert "tensor[1024,\N{NO-BREAK SPACE}1024,\N{NO-BREAK SPACE}3]\N{NO-BREAK SPACE}float32" in {
        kind.lower() for kind, *_ in shown
    }
