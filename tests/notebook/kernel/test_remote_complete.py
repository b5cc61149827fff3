"""Tab in code for ranks: it offers the names of the ranks, even while they are busy, and not those of the notebook."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook
    from tests.support.timing import Bar

pytestmark = pytest.mark.timeout(120)

DEFINES = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
cfg = {"lr": 1, "layers": {"deep": 2}, "odd'": 3}
weights = torch.zeros(4, 3)
def train(steps, rate=0.1): "Train it."
_hidden = 1
"""
TRIES = 10


@pytest.fixture(scope="module")
def ready(notebook: Notebook) -> Notebook:
    """A notebook with other variables than its ranks; completions wait for the answers of ranks."""
    notebook.ok("from monarch_kernel.notebook.magics import remote_names as _names; cap_s = _names.CAP_S")
    notebook.wait_for_answers()
    notebook.ok("%%remote" + DEFINES)
    notebook.ok("model_here = 1\nlocal_only = 2")
    return notebook


class Offer(dict[str, str]):
    """The completions of Tab: text -> kind, in order; ``written`` is the text that they replace."""

    written = ""


def tab(notebook: Notebook, code: str, subshell: str = "") -> Offer:
    """Press Tab at ``|``, or at the end."""
    cursor = code.find("|") if "|" in code else len(code)
    code = code.replace("|", "")
    message = notebook.client.session.msg("complete_request", {"code": code, "cursor_pos": cursor})
    if subshell:
        message["header"]["subshell_id"] = subshell
    notebook.client.shell_channel.send(message)
    reply: dict[str, Any] = notebook.ask(message["header"]["msg_id"])
    kinds = [(each["text"], each["type"]) for each in reply["metadata"]["_jupyter_types_experimental"]]
    assert not any(" " in kind for _, kind in kinds)  # a list of completions may wrap them there
    offer = Offer((text, kind.replace("\N{NO-BREAK SPACE}", " ")) for text, kind in kinds)
    assert list(offer) == list(dict.fromkeys(reply["matches"]))
    offer.written = code[reply["cursor_start"] : reply["cursor_end"]]
    return offer


@pytest.fixture
def busy(ready: Notebook) -> Iterator[Callable[[str], Notebook]]:
    """Run code on all ranks in the background, until the end of the test."""

    def run(code: str) -> Notebook:
        cell = ready.send(f"%%remote --background\nprint('go', flush=True)\n{code}")
        cell.wait_for(lambda cell: len(cell.lines()) == 2)
        cell.wait()
        return ready

    yield run
    ready.ok("%mesh interrupt t")
    cell = ready.run("%remote 1")
    assert cell.ok, cell.text


def test_names_with_their_kinds(ready: Notebook) -> None:
    assert tab(ready, "%%remote\nmod") == {"model": "Sequential"}
    assert tab(ready, "%%remote t[0] --raw\nx = wei|\ny = 1") == {"weights": "Tensor[4, 3] float32"}
    assert tab(ready, "%remote tr")["train"] == "function"
    assert tab(ready, "%remote t wor") == {"world_size": "int"}
    assert "_hidden" not in tab(ready, "%%remote\n")


def test_names_of_ranks_come_before_builtins(ready: Notebook) -> None:
    offer = list(tab(ready, "%%remote\nt"))
    assert offer.index("torch") < offer.index("train") < offer.index("try") < offer.index("tuple")
    assert tab(ready, "%%remote\nwhi") == {"while": "keyword"}
    assert "%timeit" in tab(ready, "%%remote\n%time")


def test_names_of_the_notebook_are_not_offered(ready: Notebook) -> None:
    assert tab(ready, "%%remote\nlocal_o") == {}
    assert tab(ready, "%%remote\nmodel_here.") == {}
    assert tab(ready, "%%remote\n# about loc") == {}
    assert "local_only" in tab(ready, "local_o")
    assert "weights" not in tab(ready, "wei")


def test_names_that_the_cell_defines(ready: Notebook) -> None:
    code = "%%remote\nimport collections as cc\nnew_a, new_b = 1, 2\nfor new_i in range(3):\n    def new_f(): pass\n"
    assert set(tab(ready, code + "new_")) == {"new_a", "new_b", "new_i", "new_f"}
    assert tab(ready, code + "cc.OrderedD") == {"OrderedDict": "class"}
    assert tab(ready, "%%remote\nfrom torch.nn import Linear, ReL")["ReLU"] == "class"
    assert "json" in tab(ready, "%%remote\nimport jso")


def test_attributes_keys_and_arguments(ready: Notebook) -> None:
    offer = tab(ready, "%%remote\nloss = model[0].")
    assert offer["weight"] == "Parameter[2, 2] float32"
    assert offer["forward"] == "function"
    assert list(offer).index("weight") < list(offer).index("apply")
    assert "__init__" not in offer
    assert "__init__" in tab(ready, "%%remote\nmodel.__")
    offer = tab(ready, "%%remote\nif True:\n    y = model[0].weight.sha|\n    z = 1")
    assert (offer["shape"], offer.written) == ("property", "sha")
    assert tab(ready, "%%remote\ncfg['l") == {"lr": "int", "layers": "dict"}
    assert tab(ready, "%%remote\ncfg[") == {'"lr"': "int", '"layers"': "dict"}
    assert tab(ready, '%%remote\ncfg["layers"]["') == {"deep": "int"}
    assert tab(ready, "%%remote\ntrain(ste") == {"steps=": "param"}
    assert next(iter(tab(ready, "%%remote\ntrain(steps=1, "))) == "rate="
    assert tab(ready, "%%remote\nmodel.nothing") == {}


def test_options_are_completed(ready: Notebook) -> None:
    assert tab(ready, "%%remote --o") == {"--out": "option"}
    assert {"t", "--raw"} <= set(tab(ready, "%%remote "))
    assert tab(ready, "%remote t")["t"] == "mesh"
    assert tab(ready, "%mesh u") == {"up": "command"}


def test_names_that_a_running_cell_has_defined(busy: Callable[[str], Notebook]) -> None:
    notebook = busy("defined_just_now = 1\nimport time\ntime.sleep(600)")
    offer = wait_until(lambda: tab(notebook, "%%remote\ndefined_j"), "the name to be offered")
    assert offer == {"defined_just_now": "int"}


def test_push_and_del_change_the_names(ready: Notebook) -> None:
    ready.ok("t['pushed_x'] = 'text'")
    assert tab(ready, "%%remote\npushed") == {"pushed_x": "str"}
    ready.ok("%%remote\npushed_x = 2.0")
    assert tab(ready, "%%remote\npushed") == {"pushed_x": "float"}
    ready.ok("%%remote\ndel pushed_x\n1 / (rank < 9)")
    assert tab(ready, "%%remote\npushed") == {}
    assert ready.run("%%remote\npushed_y = 1\n1 / 0").ename == "RemoteError"
    assert tab(ready, "%%remote\npushed") == {"pushed_y": "int"}, "of a cell that failed, too"


def test_only_names_of_the_selected_ranks(ready: Notebook) -> None:
    ready.ok("%%remote t[1]\nonly_on_one = 1")
    assert tab(ready, "%%remote t[1]\nonly_on") == {"only_on_one": "int"}
    assert tab(ready, "%%remote t[0]\nonly_on") == {}


def test_by_targets(ready: Notebook) -> None:
    ready.ok("%%remote t[1]\nonly_on_two = 1")
    assert tab(ready, "%%remote t --targets 1\nonly_on_t") == {"only_on_two": "int"}
    assert tab(ready, "%%remote t --targets 0\nonly_on_t") == {}
    assert tab(ready, "%remote t --targets 1 only_on_t") == {"only_on_two": "int"}


def test_a_completion_does_not_register_a_mesh(ready: Notebook) -> None:
    ready.ok("from monarch_kernel.actor import this_host\nmine = this_host().spawn_procs({'r': 1}, device='cpu')")
    ready.ok("mine.run('seen = 1').get()")
    assert tab(ready, "%%remote mine\nsee") == {"seen": "int"}
    assert "procs" not in ready.ok("%mesh").stdout
    ready.ok("mine.stop().get()")


def test_names_that_a_mapped_function_defines(ready: Notebook) -> None:
    ready.ok("def define(): import __main__; __main__.mapped_name = 1\nt.map(define).get()")
    assert tab(ready, "%%remote\nmapped_n") == {"mapped_name": "int"}


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(600)"])
def test_while_all_ranks_are_busy(busy: Callable[[str], Notebook], code: str, bar: Bar) -> None:
    notebook = busy(code)
    took = []
    for _ in range(TRIES):
        begin = time.monotonic()
        assert "weight" in tab(notebook, "%%remote\nmodel[0].we")
        took.append(time.monotonic() - begin)
    bar.check(statistics.median(took), 0.3, "an answer, the median")
    assert notebook.value("t.view().ranks[0].activity").startswith("cell"), "a completion does not count as activity"


# PyDLL, unlike CDLL, keeps the GIL, so no Python code runs on the rank meanwhile.
HOLDS_GIL = "import ctypes; ctypes.PyDLL(None).sleep(3)"


@contextmanager
def hasty(notebook: Notebook) -> Iterator[None]:
    """Set the time that Tab waits for ranks back to the default."""
    notebook.ok("_names.CAP_S, cap_s = cap_s, _names.CAP_S")
    try:
        yield
    finally:
        notebook.ok("_names.CAP_S, cap_s = cap_s, _names.CAP_S")


def until_silent(notebook: Notebook, mesh: str) -> None:
    """Wait until the ranks don't answer; each request is a new one, so that no cached answer counts."""
    wait_until(lambda: not tab(notebook, f"%%remote {mesh}\n'{time.monotonic_ns()}'.upp"), "the ranks to be silent")


def test_ranks_that_hold_the_gil_delay_only_a_moment(
    busy: Callable[[str], Notebook], ready: Notebook, bar: Bar
) -> None:
    assert "lr" in tab(ready, "%%remote\ncfg['")
    notebook = busy(HOLDS_GIL)
    with hasty(notebook):
        until_silent(notebook, "t")
        with bar.below(1, "the answers"):
            assert "lr" in tab(notebook, "%%remote\ncfg['"), "the last answer that is known"
            assert tab(notebook, "%%remote\nmod") == {"model": "Sequential"}


def test_another_rank_answers_for_a_stuck_one(busy: Callable[[str], Notebook], bar: Bar) -> None:
    notebook = busy(f"while rank == 1: pass\n{HOLDS_GIL}")
    with hasty(notebook):
        until_silent(notebook, "t[0]")
    for code in ("model[0].we", "model[1].inp"):
        with bar.below(1, "the answers"):
            assert tab(notebook, f"%%remote\n{code}")


def test_an_idle_rank_is_asked_first(ready: Notebook) -> None:
    ready.ok("%%remote\nown = {f'of_{rank}': 1}")
    ready.ok("%%remote t[0] --background\nwhile True: pass")
    try:
        wait_until(lambda: ready.value("t.view().ranks[0].state") == "running", "rank 0 to be busy")
        assert [tab(ready, "%%remote\nown['") for _ in range(5)] == [{"of_1": "int"}] * 5
    finally:
        ready.ok("%mesh interrupt t")


def test_in_a_subshell_while_a_cell_runs(ready: Notebook, bar: Bar, tmp_path: Path) -> None:
    control = ready.client.control_channel
    control.send(ready.client.session.msg("create_subshell_request"))
    subshell = control.get_msg(timeout=10)["content"]["subshell_id"]
    assert tab(ready, "%%remote\nmod", subshell) == {"model": "Sequential"}
    cell = ready.send(f"%%remote\n{waits(tmp_path)}")
    cell.wait_for(lambda cell: len(cell.lines()) == 2)
    took = []
    for code in ("model[0].we", "cfg['", "mod") * 2:
        begin = time.monotonic()
        assert tab(ready, "%%remote\n" + code, subshell)
        took.append(time.monotonic() - begin)
    assert not cell.reply, "the cell must still run at this point"
    (tmp_path / "gate").touch()
    bar.check(statistics.median(took), 0.3, "an answer, the median")
    assert cell.wait().ok, cell.text
    control.send(ready.client.session.msg("delete_subshell_request", {"subshell_id": subshell}))
    assert control.get_msg(timeout=10)["content"]["status"] == "ok"


def waits(folder: Path) -> str:
    """Code that prints "go", and waits for a file."""
    gate = str(folder / "gate")
    return f"import os, time\nprint('go', flush=True)\nwhile not os.path.exists({gate!r}): time.sleep(0.01)"


@pytest.mark.parametrize("runs", ["%%remote\n", ""])
def test_while_the_notebook_runs_a_cell(ready: Notebook, runs: str, bar: Bar, tmp_path: Path) -> None:
    cell = ready.send(f"{runs}{waits(tmp_path)}")
    cell.wait_for(lambda cell: "go" in cell.stdout)
    took = []
    for code in ("model[0].we", "cfg['", "mod", "from torch.nn import Lin") * 2:
        begin = time.monotonic()
        assert tab(ready, "%%remote\n" + code)
        took.append(time.monotonic() - begin)
    described = ready.ask(ready.client.inspect("%%remote\ntrain", 12))
    assert "Train it." in described["data"]["text/plain"]
    assert not cell.reply, "the cell must still run at this point"
    (tmp_path / "gate").touch()
    bar.check(statistics.median(took), 0.3, "an answer, the median")
    assert cell.wait().ok, cell.text
    assert "local_only" in tab(ready, "local_o")


@pytest.mark.slow
def test_before_the_first_cell_and_without_a_mesh(new_notebook: Callable[..., Notebook]) -> None:
    notebook = new_notebook("python3")
    notebook.ok("%load_ext monarch_kernel\nlocal_only = 1")
    assert "local_only" in tab(notebook, "%%remote\nlocal_o"), "without a mesh nothing is known"
    notebook.ok("%mesh up t -n 2 --device cpu", 60)
    assert tab(notebook, "%%remote\nwor") == {"world_size": "int"}
    assert tab(notebook, "%%remote\nimport torch\ntorch.nn.Line")["Linear"] == "class"
    offered = {
        name for name, kind in tab(notebook, "%%remote\n").items() if kind not in ("keyword", "function", "class")
    }
    notebook.ok("%%remote" + DEFINES)
    assert offered - {"mesh", "rank", "world_size", "local_rank", "device"} <= set(dir(__builtins__)) | set(
        tab(notebook, "%%remote\n")
    )
    assert {"mesh", "rank", "world_size", "local_rank", "device"} <= set(tab(notebook, "%%remote\n"))
    assert tab(notebook, "%%remote\nlocal_o") == {}
    assert tab(notebook, "%%remote\nmodel[0].we") == {"weight": "Parameter[2, 2] float32"}
    assert tab(notebook, "%%remote\ncfg['l") == {"lr": "int", "layers": "dict"}
    notebook.ok("%mesh down t")
    assert "local_only" in tab(notebook, "%%remote\nlocal_o")


def test_in_autoremote_mode_every_cell_is_for_the_ranks(ready: Notebook) -> None:
    ready.ok("%autoremote t")
    try:
        assert tab(ready, "mod") == {"model": "Sequential"}
        assert "local_only" not in tab(ready, "local_")
        assert "local_only" in tab(ready, "%%local\nlocal_")
    finally:
        ready.ok("%autoremote off")
    assert "local_only" in tab(ready, "local_")
