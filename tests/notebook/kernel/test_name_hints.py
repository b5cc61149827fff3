"""Names that exist only on the other side: the error says where the name is, and how to push or pull it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Cell, Notebook

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", params=["monarch", pytest.param("python3", marks=pytest.mark.slow)])
def ready(request: pytest.FixtureRequest) -> Notebook:
    """This kernel or the stock one, where the notebook and the ranks have different names."""
    notebook = request.getfixturevalue("notebook" if request.param == "monarch" else "stock")
    notebook.ok("import json\nx = [1]\ndef double(a): return 2 * a\n_private = 1")
    notebook.ok("%%remote\nmodel = 1\nif rank: odd = 1")
    return notebook


def last_line(cell: Cell) -> str:
    return cell.error.rstrip().rpartition("\n")[2].strip()


def test_names_of_the_notebook(ready: Notebook) -> None:
    cell = ready.run("%%remote\nx + [2]")
    assert cell.ename == "RemoteError"
    assert last_line(cell) == 'x is in this notebook (list), not on the ranks: t["x"] = x pushes it'
    ready.ok('t["x"] = x')
    ready.ok("%%remote\nx + [2]\ndel x")

    cell = ready.run("%remote double(2)")
    assert last_line(cell).endswith('define it in a %%remote cell, or push it: t["double"] = double')
    ready.ok('t["double"] = double')
    assert ready.ok("%remote double(2)\n%remote del double").plain

    assert last_line(ready.run("%remote json.dumps(1)")).endswith("import it in a %%remote cell")
    assert (
        last_line(ready.run("%remote len(t)"))
        == 't is in this notebook (ProcMesh), not on the ranks: t["t"] = t pushes it'
    )
    ready.ok('t["t"] = t')
    assert ready.ok("%remote len(t)\n%remote del t").plain
    assert last_line(ready.run('t["x"]')).endswith('t["x"] = x pushes it')


def test_names_of_other_ranks(ready: Notebook) -> None:
    assert last_line(ready.run("%%remote\nodd + 1")) == "odd is on [1] of t only"


def test_names_of_the_ranks(ready: Notebook) -> None:
    for code in ("model + 1", "def use(): return model\nuse()"):
        cell = ready.run(code)
        assert (cell.ename, cell.evalue) == ("NameError", "name 'model' is not defined")
        assert "Traceback (most recent call last)" in cell.error
        assert "NameError: name 'model' is not defined" in cell.error
        assert last_line(cell) == (
            'model is on [0-1] of t, not in this notebook: t["model"] pulls it, a %%remote t cell runs there'
        )
    assert last_line(ready.run("odd")).endswith('t[[1]]["odd"] pulls it, a %%remote t[[1]] cell runs there')
    assert ready.value('t[[1]]["odd"].values()') == (1,)
    assert ready.value("__import__('sys').last_value.__dict__") == {}, "the error is left as it was"


@pytest.mark.parametrize(
    ("code", "says"),
    {
        "nowhere": "NameError: name 'nowhere' is not defined",
        "%remote nowhere": "----> 1 nowhere",
        "%remote _private": "----> 1 _private",
        "def f():\n    x += 1\nf()": "UnboundLocalError: ",
        "raise NameError('model is odd')": "NameError: model is odd",
    }.items(),
)
def test_no_hint_for_unknown_names(ready: Notebook, code: str, says: str) -> None:
    assert last_line(ready.run(code)).startswith(says)


def test_hints_in_background_cells(ready: Notebook) -> None:
    cell = ready.run("%%remote --background\nx + [2]")
    cell.wait_for(lambda cell: "pushes it" in cell.text)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (
            "rank == 1",
            "the GPU context of this rank is unusable until %mesh restart t[1]; the cause may be an earlier line",
        ),
        ("True", "the GPU contexts of [0-1] are unusable until %mesh restart t[0:2]; the cause may be an earlier line"),
    ],
)
def test_a_gpu_context_that_is_lost_has_a_hint(ready: Notebook, ranks: str, says: str) -> None:
    text = "CUDA error: device-side assert triggered\\nCUDA kernel errors might be asynchronously reported"
    assert last_line(ready.run(f"%%remote\nif {ranks}: raise RuntimeError('{text}')")) == says
    caused = (
        f"%%remote\ntry: raise RuntimeError('{text}')\nexcept RuntimeError as error: raise ValueError('x') from error"
    )
    assert "unusable until %mesh restart t[0:2]" in last_line(ready.run(caused))


def test_other_errors_of_cuda_have_no_such_hint(ready: Notebook) -> None:
    assert "unusable" not in ready.run("%%remote\nraise RuntimeError('CUDA error: invalid device ordinal')").error
