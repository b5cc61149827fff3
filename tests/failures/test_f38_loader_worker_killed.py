"""F38: a worker of a DataLoader is killed; the error has the rank, the worker, the signal and the memory."""

from __future__ import annotations

import re
from pathlib import Path

from monarch_kernel.notebook.view.stacks import stacks_text
from tests.failures.cells import Cells
from tests.support.waiting import LONG_S

PREPARE = """
import signal
from torch.utils.data import DataLoader
class Rows:
    def __len__(self): return 8
    def __getitem__(self, i):
        if i == 7 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else os._exit(3)
        return i
how = "killed"
"""
LOOP = "for batch in DataLoader(Rows(), batch_size=4, num_workers=2): pass"


def test_the_worker_and_the_signal_are_named(cells: Cells) -> None:
    cells.ok(PREPARE)
    text = cells.fails(LOOP)
    assert "[1] RuntimeError: DataLoader worker" in text
    assert re.search(r"worker 1 of 2 \(pid \d+\) was killed by SIGKILL", text)
    assert re.search(r"the process held .*; the machine had .* free when this was reported", text)
    assert "[0] finished" in text
    cells.ok("None")  # the rank drops the error, which holds the loader and its other worker


def test_the_exit_code_of_a_worker_is_named(cells: Cells) -> None:
    cells.ok("how = 'exits'")
    text = cells.fails(LOOP)
    assert re.search(r"worker 1 of 2 \(pid \d+\) ended with exit code 3", text)
    assert "with num_workers=0 the rank itself raises the error" in text
    cells.ok("None")


HANGS = """
class Stuck(Rows):
    def __getitem__(self, i):
        while rank == 1 and not os.path.exists({go!r}):
            time.sleep(0.01)
        return i
batches = iter(DataLoader(Stuck(), batch_size=4, num_workers=1))
try:
    next(batches)
    dist.all_reduce(torch.ones(4))
finally:
    open({go!r}, "w").close()
    batches = None
"""


def test_a_worker_that_hangs_is_named_with_its_line(cells: Cells, tmp_path: Path) -> None:
    says = ("[1] has not started it: ", "it waits for worker 0 of a DataLoader, which is at ")
    with cells.waits(HANGS.format(go=str(tmp_path / "go")), says=says) as line:
        assert re.search(
            r"next\(batches\); it waits for worker 0 of a DataLoader, which is at cell \[\d+\], line [45]", line
        )
        assert ", in __getitem__: " in line
        answers = cells.mesh.doing().get(LONG_S)
        assert "    waits for worker 0 of a DataLoader, which is at " in stacks_text(cells.mesh.view(), answers)
    cells.ok("None")  # the rank drops the interrupt, which holds the loader
