"""A record becomes a program for torchrun, and a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from monarch_kernel.errors import RecordError
from monarch_kernel.features.record.exporting import notebook_of, script_of, write
from monarch_kernel.features.record.reading import RecordReader
from monarch_kernel.features.record.recorder import Recorder
from tests.features.record.runs import write_run

LOOP = """from monarch_kernel import live
for step in live.loop(6):
    print(f"{rank} {world_size} {step} {live.knob('lr', 0.1)}\\n", end="", flush=True)  # in one write, as ranks share a pipe"""


def test_a_script_has_the_cells_and_the_knobs_as_a_schedule(tmp_path: Path) -> None:
    text = script_of(write_run(tmp_path / "run", code=LOOP), "train.py", "t")
    compile(text, "train.py", "exec")
    assert "torchrun --nproc-per-node 2 train.py" in text
    assert "KNOBS = {1: {'lr': {2: 0.5}}}" in text
    assert text.index("# -- cell [1]\ntorch.manual_seed(0)\n") < text.index(
        "# -- cell [2]\nfrom monarch_kernel import live"
    )


def test_magics_and_slices_do_not_break_a_script(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    for number, (code, ranks) in enumerate((("!ls\nx = 1", "0-1"), ("y = 2", "1"), ("z = !ls", "0-1")), 1):
        recorder.cell_ended(recorder.cell_started(code, number, "t", ranks), "ok")
    recorder.close()
    text = script_of(RecordReader(tmp_path / "run"), "train.py", "t")
    compile(text, "train.py", "exec")
    assert "# -- cell [1], without its magics\npass  # !ls\nx = 1\n" in text
    assert "if rank in (1,):\n    exec(compile('y = 2'" in text
    assert "# -- cell [3]: it is no program of Python, or has magics that a program can't run\n# z = !ls\n" in text


ODD = (
    ("x = (7\n    % 4)", "ok"),
    ("text = '''\n%d\n!\n''' % x", "ok"),
    ("before = 1\nraise ValueError('first try')", "failed"),
    ("def f(:\n  pass", "failed"),
    ("from __future__ import annotations\ndef f(a: Nothing): return a", "ok"),
    ("import asyncio\nawait asyncio.sleep(0)\nlater = 2", "ok"),
    ("with open('/dev/null'):\n    %time inner = 3\n    %matplotlib inline", "ok"),
)


def test_a_script_comes_to_its_end_whatever_the_cells_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path / "run")
    for number, (code, outcome) in enumerate(ODD, 1):
        recorder.cell_ended(recorder.cell_started(code, number, "t", "0-1"), outcome)
    recorder.close()
    text = script_of(RecordReader(tmp_path / "run"), "train.py", "t")
    compile(text, "train.py", "exec")
    begin, end = text.index("# -- cell [1]"), text.index("dist.destroy")
    names: dict[str, object] = {"rank": 0}
    head = text[text.index("def _await") : begin]
    exec(compile(head + text[begin:end], "train.py", "exec"), names)
    assert [names[name] for name in ("x", "text", "before", "later", "inner")] == [3, "\n3\n!\n", 1, 2, 3]
    assert capsys.readouterr().out == "cell [3] failed: ValueError('first try')\n"


def test_a_loop_that_was_interrupted_ends_in_a_script_where_it_was(tmp_path: Path) -> None:
    write_run(tmp_path / "run", code=LOOP, outcome="interrupted", reached=4).close()
    record = RecordReader(tmp_path / "run")
    assert (record.cut_before(1), record.stopped_before(1)) == (4, 4)
    assert "STOPS = {1: 4}" in script_of(record, "train.py", "t")


def test_an_unknown_mesh_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no cell ran on 'u'; meshes: t"):
        script_of(write_run(tmp_path / "run"), "train.py", "u")


@pytest.mark.slow
def test_a_script_runs_with_torchrun(tmp_path: Path) -> None:
    write(tmp_path / "train.py", script_of(write_run(tmp_path / "run", code=LOOP), "train.py", "t"))
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path / "train.py"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.split("\n"))[1:] == [
        f"{rank} 2 {step} {0.1 if step < 2 else 0.5}" for rank in (0, 1) for step in range(6)
    ]


def test_a_notebook_has_what_was_typed_with_the_output_of_the_ranks(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    typed = recorder.cell_started("%%remote t\nprint(rank)", 4)
    ran = recorder.cell_started("\nprint(rank)", 4, "t", "0-1")
    recorder.cell_output(ran, "[0] 0\n[1] 1\n")
    recorder.cell_ended(ran, "failed", "RemoteError: 1 rank failed\nValueError")
    recorder.cell_ended(typed, "failed", "RemoteError: 1 rank failed")
    recorder.cell_ended(recorder.cell_started("x = 1", 5), "ok")
    recorder.close()
    book = nbformat.reads(notebook_of(RecordReader(tmp_path / "run")), as_version=4)
    nbformat.validate(book)
    assert [cell.source for cell in book.cells] == ["%%remote t\nprint(rank)", "x = 1"]
    assert book.cells[0].outputs[0].text == "[0] 0\n[1] 1\n"
    assert book.cells[0].outputs[1].evalue == "RemoteError: 1 rank failed"


def test_each_cell_of_a_notebook_has_its_own_output(tmp_path: Path) -> None:
    """A cell of the kernel may run several on ranks."""
    recorder = Recorder(tmp_path / "run")
    typed = recorder.cell_started("for _ in range(2): run(t)", 4)
    for number in range(2):
        ran = recorder.cell_started("print(rank)", 4, "t", "0-1")
        recorder.cell_output(ran, f"[0-1] {number}\n")
        recorder.cell_ended(ran, "ok")
    recorder.cell_ended(typed, "failed", "ValueError: no")
    recorder.close()
    (cell,) = nbformat.reads(notebook_of(RecordReader(tmp_path / "run")), as_version=4).cells
    assert [each.text for each in cell.outputs[:2]] == ["[0-1] 0\n", "[0-1] 1\n"]
    assert (cell.outputs[2].ename, cell.outputs[2].evalue) == ("failed", "ValueError: no")


def test_a_file_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="can't write"):
        write(tmp_path / "missing" / "train.py", "")
