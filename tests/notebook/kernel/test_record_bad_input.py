"""What a cell may do to a record: the disk fills up, outputs are huge, can't be pickled or are no text. Training goes on."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

from monarch_kernel.features.record.tables import FILE, VERSION
from monarch_kernel.train.record import open as open_record
from tests.notebook.kernel.conftest import Notebook

LOOP = """%%remote t
for step in live.loop(20):
    live.log(loss=1 / (step + 1))
print(f"trained for {step + 1} steps")
"""
LIMIT = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails, as on a full disk
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, hard))
"""
UNLIMIT = "resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))"


def test_a_disk_that_is_full_ends_the_record_and_training_goes_on(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok(f"%mesh record {tmp_path / 'run'}")
    notebook.ok("first = 1")
    notebook.ok("%mesh record")  # which commits
    said = notebook.ok(LIMIT).text
    try:
        for number in range(40):
            said += notebook.ok(f"n = {number}  # {'x' * 50_000}\n%mesh record").text
            if "stopped" in said:
                break
        trained = notebook.ok(LOOP)
        shown = notebook.ok("%mesh show t").text
    finally:
        notebook.ok(UNLIMIT)
    assert re.search(r"record .*run: stopped \(.*(full|disk I/O error|File too large)", said), said[-2000:]
    assert "trained for 20 steps" in trained.stdout
    assert "stopped" in shown
    assert "stopped" in notebook.ok("%mesh record close").stdout
    with open_record(tmp_path / "run") as record:
        assert "first = 1" in [cell.code for cell in record.cells]
        assert not record.damage
        assert "no end" in record.text()
    notebook.ok(f"%mesh record {tmp_path / 'next'}")
    notebook.ok(LOOP)
    notebook.ok("%mesh record close")
    with open_record(tmp_path / "next") as record:
        assert len(record.metrics) == 20


def test_outputs_of_all_kinds_are_recorded_and_training_goes_on(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok(f"%mesh record {tmp_path / 'run'}")
    notebook.ok("%%remote t\nimport os\nn = os.write(1, b'\\xff\\xfe bytes\\n')\nprint('\\udcff surrogate')")
    notebook.ok("%%remote t\nimport threading\n(threading.Lock(), lambda: 0, (x for x in ()))")
    notebook.ok("%%remote t\nfor _ in range(200): print('y' * 5000)")
    notebook.ok("'z' * 10**6")
    notebook.run("%%remote t\nclass Odd:\n    def __repr__(self): raise ValueError('no text')\nOdd()")
    notebook.ok(LOOP)
    notebook.ok("%mesh record close")
    with open_record(tmp_path / "run") as record:
        odd, locked, huge, _, trained = (cell for cell in record.cells if cell.mesh)
        assert "bytes" in odd.output
        assert "surrogate" in odd.output
        odd.output.encode()  # is UTF-8
        assert locked.outcome == "ok"
        assert "lock" in locked.output
        assert huge.outcome == "ok"
        assert len(huge.output) < 100_000 < huge.output_nbytes  # the notebook leaves lines of a flood out, too
        assert "characters are not in the record" in huge.output
        assert "trained for 20 steps" in trained.output
        assert len(record.metrics) == 20
        assert not record.damage


def test_a_folder_that_holds_something_else_is_refused_in_one_line(notebook: Notebook, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    notebook.ok(f"%mesh record {folder}")
    notebook.ok("%mesh record close")
    again = notebook.run(f"%mesh record {folder}")
    assert "holds the record of another run; choose another folder" in again.text
    with sqlite3.connect(folder / FILE) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    newer = notebook.run(f"from monarch_kernel import record\nrecord.open({str(folder)!r})")
    assert "newer version of monarch_kernel" in newer.error
    assert "update monarch_kernel" in newer.error
    assert "trained for 20 steps" in notebook.ok(LOOP).stdout
