"""A run of a real kernel is recorded, shown, closed, and repeated with equal results."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

from monarch_kernel.train.record import open as open_record
from tests.notebook.kernel.conftest import Notebook
from tests.support.waiting import wait_for_files

BUILD = """%%remote t
import pathlib, time, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.arange(160.0).reshape(40, 4) / 160), batch_size=1, shuffle=True)
"""
TRAIN = """%%remote t --background --out done
for step, (x,) in zip(live.loop(40), loader):
    if step == 12:
        pathlib.Path(FOLDER, f"here{rank}").touch()
        while not pathlib.Path(FOLDER, "go").exists(): time.sleep(0.01)
    optimizer.param_groups[0]["lr"] = live.knob("lr", 1e-4)
    loss = model(x).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    live.log(loss=loss)
    time.sleep(0.01)
print(f"trained for {step + 1} steps")
"""


def test_a_run_is_recorded_and_repeated(notebook: Notebook, tmp_path: Path) -> None:
    assert "no record runs" in notebook.ok("%mesh record").stdout
    folder = tmp_path / "run"
    assert f"recording into {folder}" in notebook.ok(f"%mesh record {folder}").stdout
    assert "a record runs already" in notebook.run(f"%mesh record {tmp_path / 'other'}").text
    notebook.ok(BUILD)
    notebook.ok(TRAIN.replace("FOLDER", repr(str(tmp_path))))
    wait_for_files(tmp_path, "here0", "here1")  # the loop waits, so that it can't be over before the knob is set
    turned = notebook.value("t.loop.set('lr', 1e-3)")
    (tmp_path / "go").touch()
    notebook.ok("done.result()")
    assert notebook.value("t.view().record").startswith(f"record {folder}: ")
    failed = notebook.run("%%remote t\nraise ValueError('wrong')")
    assert not failed.ok
    status = notebook.ok("%mesh record").stdout
    assert re.search(r"\d+ cells, 1 loop, 1 change of knobs, 1 metric", status), status
    assert "runs in the kernel, so a replay leaves it out" in status
    notebook.ok("%mesh record close")
    assert notebook.value("t.view().record") == ""

    with open_record(folder) as record:
        build, train, wrong = (cell for cell in record.cells if cell.mesh)
        assert (build.outcome, train.outcome, wrong.outcome) == ("ok", "ok", "failed")
        assert train.output == "[0-1] trained for 40 steps\n"
        assert "ValueError" in wrong.error
        assert [(knob.step, knob.value) for knob in record.knobs if not knob.is_default] == [(turned, 1e-3)]
        assert [(each.step, each.ranks) for each in record.metrics] == [(step, 2) for step in range(40)]
        assert [each.step for each in record.batches] == list(range(40))
        assert len({each.digests for each in record.batches}) == 40
        ends = [check for check in record.checks if check.kind == "parameters"]
        assert [check.step for check in ends] == [0, 40]
        assert record.sources == [(1, "TensorDataset, 40 rows, RandomSampler, batches of 1")]
        assert not record.damage
        typed = {cell.number: cell.code for cell in record.cells if not cell.mesh}
        for cell in (build, train, wrong):
            assert typed[cell.number].strip().endswith(cell.code.strip())
        record.notebook(tmp_path / "run.ipynb")
    shown = {cell.source: cell.outputs for cell in nbformat.read(tmp_path / "run.ipynb", 4).cells}
    assert shown["done.result()"] == []
    assert [each.evalue for each in shown["%%remote t\nraise ValueError('wrong')"]] == [
        f"cell [{wrong.number}] failed on t"
    ]

    again = notebook.ok(
        f"from monarch_kernel import record\nfound = record.open({str(folder)!r}).replay(t)\nprint(found)", 120
    )
    assert "all results that were compared are equal" in again.stdout, again.text
    assert (
        "compared: 3 cells, 40 batches, 40 metrics, 2 generators, 2 sets of parameters; no difference" in again.stdout
    )
    code = train.code.replace("1e-4", "1e-2")
    notebook.ok(f"found = record.open({str(folder)!r}).replay(t, 20, changed={{{train.number}: {code!r}}})", 120)
    assert notebook.value("str(found.first)").startswith(f"cell [{train.number}] differs: -    optimizer.param_groups")
    assert notebook.value("found.are_equal") is False


def test_misuse_is_one_line(notebook: Notebook, tmp_path: Path) -> None:
    assert "takes a folder, such as runs/gpt (or close)" in notebook.run("%mesh record a b").text
    (tmp_path / "file").touch()
    assert "can't make the folder" in notebook.run(f"%mesh record {tmp_path / 'file'}/x").text
    assert notebook.ok("%mesh record close").stdout == "no record runs\n"
    missing = notebook.run(f"from monarch_kernel import record\nrecord.open({str(tmp_path)!r})")
    assert "holds no record: there is no record.sqlite" in missing.error
