"""Shift-Tab and ``x?`` in code that will run on ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook
    from tests.support.timing import Bar

pytestmark = pytest.mark.timeout(120)

DEFINES = """%%remote
import torch
class Model(torch.nn.Module):
    "A model."
    def forward(self, x, scale: float = 1.0):
        "Scale it."
        return x
model = Model()
def train(steps, rate=0.1):
    "Train it."
    return steps
data = torch.zeros(4, 3 + (rank == 1))
class Plain: pass
plain = Plain()
if rank == 1: odd = 1
"""


@pytest.fixture(scope="module")
def ready(notebook: Notebook) -> Notebook:
    """A notebook whose ranks have objects with the same names as different objects in the notebook."""
    notebook.ok(DEFINES)
    notebook.ok("def train(local): 'The local one.'\ndef here(): 'Only here.'")
    return notebook


def inspect(notebook: Notebook, code: str, detail: int = 0) -> str:
    """The text of Shift-Tab at ``|``; empty if nothing was found."""
    cursor = code.index("|")
    reply = notebook.ask(notebook.client.inspect(code.replace("|", ""), cursor, detail))
    assert reply["found"] == bool(reply["data"])
    return re.sub(r"\x1b\[\d+m", "", reply["data"].get("text/plain", ""))


def test_inspection_of_objects(ready: Notebook) -> None:
    text = inspect(ready, "%%remote\ntrain|")
    assert text == (
        "Signature: train(steps, rate=0.1)\n"
        "Type:      function\n"
        "File:      <remote cell [2]>, line 9\n"
        "Ranks:     [0-1]\n"
        "Docstring: Train it."
    )
    assert "return steps" in inspect(ready, "%%remote\ntrain|", 1)
    assert inspect(ready, "%%remote\ntrain(1, ra|") == text, "inside a call it is about the function"
    text = inspect(ready, "%remote t model|")
    assert "Call signature: (x, scale: float = 1.0)" in text
    assert "A model." in text
    text = inspect(ready, "%%remote\nmodel.forward|")
    assert "Scale it." in text
    assert "[0] was asked" in text


def test_ranks_with_different_objects(ready: Notebook) -> None:
    assert "Tensor[4, 3] float32 on [0], Tensor[4, 4] float32 on [1]" in inspect(ready, "%%remote\ndata|")
    assert "Ranks: [1]" in inspect(ready, "%%remote t[1]\nodd|")


def test_unknown_names_and_local_ones(ready: Notebook, bar: Bar) -> None:
    with bar.below(1.5, "three answers"):
        assert inspect(ready, "%%remote\nnothing|") == ""
        assert inspect(ready, "%%remote\nhere|") == ""
        assert inspect(ready, "%%remote\n|") == ""
    assert "Only here." in inspect(ready, "here|")
    assert "The local one." in inspect(ready, "train|")
    assert "Prints the values" in inspect(ready, "%%remote\nprint|")


def test_while_the_ranks_are_busy(ready: Notebook) -> None:
    cell = ready.send("%%remote --background\nprint('go', flush=True)\nwhile True: pass")
    cell.wait_for(lambda cell: len(cell.lines()) == 2)
    cell.wait()
    try:
        assert "Train it." in inspect(ready, "%%remote\ntrain|")
    finally:
        ready.ok("%mesh interrupt t")


@pytest.mark.parametrize(
    ("code", "says"),
    {
        "train?": ["Signature: train(steps, rate=0.1)", "Docstring: Train it.", "<remote cell [2]>"],
        "train??": ["return steps"],
        "plain?": ["<__main__.Plain object at 0x…>"],
        "nothing?": ["Object `nothing` not found."],
    }.items(),
)
def test_help_is_shown_once_for_all_ranks(ready: Notebook, code: str, says: list[str]) -> None:
    shown = ready.ok("%%remote\n" + code).text
    assert shown.count("[0-1]") == 1, shown
    assert "[0]" not in shown
    assert all(text in shown for text in says), shown


def test_help_beside_a_value_and_before_an_error(ready: Notebook) -> None:
    cell = ready.ok("%%remote\nget_ipython().run_line_magic('pinfo', 'train')\nrank + 40")
    assert "Train it." in cell.plain
    assert cell.plain.endswith("[0] 40\n[1] 41")
    failed = ready.run("%%remote\n%pinfo train\n1 / 0")
    assert "Train it." in failed.plain
    assert failed.ename == "RemoteError"


@pytest.mark.slow
def test_in_the_stock_kernel_help_works_and_shift_tab_is_local(new_notebook: Callable[..., Notebook]) -> None:
    notebook = new_notebook("python3")
    notebook.ok("%load_ext monarch_kernel")
    notebook.ok("%mesh up t -n 2 --device cpu", 60)
    notebook.ok(DEFINES)
    assert "[0-1] Signature: train" in notebook.ok("%%remote\ntrain?").plain
    assert inspect(notebook, "%%remote\ntrain|") == ""


@pytest.mark.parametrize("line", ["train?", "t train?", "t[0] train??", "--targets 0 train?"])
def test_help_in_a_line(ready: Notebook, line: str) -> None:
    text = ready.ok(f"%remote {line}").plain
    assert "train(steps, rate=0.1)" in text
    assert ("return steps" in text) == line.endswith("??")


@pytest.mark.slow  # the notebook imports torch
def test_a_distributed_tensor_is_completed_and_described_in_the_notebook(ready: Notebook) -> None:
    ready.ok("import torch\nwith t.activate(): weights = torch.ones(2, 3)")
    assert [each.removeprefix("weights") for each in ready.complete("weights.placements")] == ["placements_picture"]
    text = inspect(ready, "weights|")
    assert "DistributedTensor(shape=(2, 3), dtype=float32" in text
    assert "each rank of a mesh has a part" in text
    assert "dims: An axis of the mesh or several" in inspect(ready, "weights.reduce|")
    ready.ok("del weights")
