"""JupyterLab shows the cells that waited behind an interrupted one as it does with ipykernel's own kernel."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.conftest import SLOW_MS, Lab, Server

pytest.importorskip("playwright")
from playwright.sync_api import expect

pytestmark = pytest.mark.slow
expect.set_options(timeout=SLOW_MS)

LOOK = """() => [...document.querySelectorAll('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell')].map(cell => ({
    prompt: cell.querySelector('.jp-InputPrompt').textContent,
    hasNoOutput: cell.classList.contains('jp-mod-noOutputs'),
    opacity: getComputedStyle(cell).opacity,
    outputs: [...cell.querySelectorAll('.jp-OutputArea-output')].map(output => output.innerText),
}))"""


def interrupted_at_input(lab: Lab, server: Server, kernel: str) -> list[dict[str, Any]]:
    """Interrupt the first of four cells while it waits for input, and return what all of them show."""
    lab.load(server.write(f"{kernel}.ipynb", "print('go')\ninput()", "2", "3", "print(4)", kernel=kernel))
    lab.command("notebook:run-all-cells")
    lab.page.locator(".jp-Stdin-input").wait_for()
    for i in range(4):
        expect(lab.prompt(i)).to_have_text("[*]:")
    lab.command("notebook:interrupt-kernel")
    expect(lab.cell(0)).to_contain_text("KeyboardInterrupt")
    for i in range(1, 4):
        expect(lab.prompt(i)).to_have_text("[ ]:")
    expect(lab.prompt(0)).to_have_text("[1]:")
    shown: list[dict[str, Any]] = lab.page.evaluate(LOOK)
    return shown


def test_cells_behind_an_interrupted_input_look_as_with_a_plain_kernel(lab: Lab, server: Server) -> None:
    plain = interrupted_at_input(lab, server, "plain")
    lab.save()  # else the page asks whether to leave
    assert interrupted_at_input(lab, server, "monarch") == plain
