"""``%tb`` and ``%xmode`` after an error of ranks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.notebook.kernel.conftest import Notebook

pytestmark = pytest.mark.timeout(120)

FAILS = """%%remote
import json
json.loads("{rank")
"""


def test_tb_shows_the_last_error_of_ranks_as_it_was_shown(notebook: Notebook) -> None:
    notebook.run("1/0")
    shown = notebook.run(FAILS).error
    assert "(%tb Verbose shows them)" in shown
    again = notebook.ok("%tb")
    assert again.error == shown
    assert "in raw_decode" not in shown

    verbose = notebook.ok("%tb Verbose").error
    assert "in raw_decode" in verbose
    assert "running/" not in verbose
    assert "monarch_kernel" not in verbose
    assert notebook.ok("%tb").error == shown, "the mode was for once"

    notebook.run("1/0")
    assert "ZeroDivisionError" in notebook.ok("%tb").error


def test_tb_keeps_the_line_of_the_local_cell_and_the_hints(notebook: Notebook) -> None:
    notebook.ok("only_here = 1")
    for code, says in (
        ("x = 1\nt['nope']", "at line 2 of this cell"),
        ("%remote only_here", 't["only_here"] = only_here'),
    ):
        shown = notebook.run(code)
        assert says in shown.error
        assert notebook.ok("%tb").error == shown.error


def test_xmode_verbose_shows_all_frames_at_once(notebook: Notebook) -> None:
    notebook.ok("%xmode Verbose")
    try:
        assert "in raw_decode" in notebook.run(FAILS).error
    finally:
        notebook.ok("%xmode Context")
    assert "in raw_decode" not in notebook.run(FAILS).error


def test_tb_shows_the_error_of_a_cell_in_the_background(notebook: Notebook) -> None:
    cell = notebook.run(FAILS.replace("%%remote", "%%remote --background"))
    cell.wait_for(lambda cell: cell.error)
    assert notebook.ok("%tb").error == cell.error
    assert "NoneType" not in notebook.run("%debug").error


def test_a_shown_error_can_be_pickled(notebook: Notebook) -> None:
    notebook.run(FAILS)
    copy = "(pickle := __import__('pickle')).loads(pickle.dumps(__import__('sys').last_value))"
    assert notebook.value(f"[type(e := {copy}).__name__, e.ranks, e.what.partition(' ')[0]]") == [
        "RemoteError",
        (0, 1),
        "cell",
    ]


def test_an_error_of_a_worker_shows_its_last_line_and_the_line_of_the_cell(notebook: Notebook) -> None:
    shown = notebook.run("""%%remote
import torch.multiprocessing as mp
def work(i):
    raise ValueError(f"row {7 + i} is corrupt")
mp.start_processes(work, nprocs=1, start_method="fork")""").error
    assert "ProcessRaisedException: -- Process 0 terminated with the following error:\n" in shown
    assert "    ValueError: row 7 is corrupt\n" in shown
    assert 'raise ValueError(f"row {7 + i} is corrupt")\n' in shown


def test_an_error_shows_its_notes_and_its_cause_with_line_and_notes(notebook: Notebook) -> None:
    shown = notebook.run("""%%remote
def load():
    error = FileNotFoundError(f"shard-{rank}.pt")
    error.__notes__ = ["look at the mount"]
    raise error
try:
    load()
except OSError as missing:
    failed = RuntimeError("step failed")
    failed.__notes__ = ["in step 5"]
    raise failed from missing""").error
    assert "RuntimeError: step failed\n    in step 5\n" in shown
    assert "    caused by, on [0] FileNotFoundError: shard-0.pt (look at the mount); on [1] FileNot" in shown
    assert ", line 5, in load: raise error\n" in f"{shown}\n"


def test_ranks_that_lose_their_connections_to_a_failed_one_are_one_line(notebook: Notebook, tmp_path: Path) -> None:
    shown = notebook.run(f"""%%remote
import datetime, pathlib, time
import torch.distributed as dist
failed = pathlib.Path({str(tmp_path / "failed")!r})
deadline = time.monotonic() + 60
while rank == 1 and not failed.exists() and time.monotonic() < deadline:
    time.sleep(0.01)
try:
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=0.2))
finally:
    failed.touch()""").error
    assert "[0] RuntimeError: " in shown
    assert "failed to pass monitoredBarrier" in shown
    assert re.search(r"\[1\] waited for other ranks at remote cell \[\d+\], line 9, and was released", shown)
    assert "GLHF" not in shown
    assert notebook.ok("%remote dist.all_reduce(__import__('torch').ones(1))").error == ""
