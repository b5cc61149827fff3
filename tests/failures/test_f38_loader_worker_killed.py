"""F38: a worker of a DataLoader is killed; the error has the rank, the worker, the signal and the memory."""

from __future__ import annotations

import re

from tests.failures.cells import Cells

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
