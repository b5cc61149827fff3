"""F52: an interrupt arrives while some or all ranks make a DistributedDataParallel, whose constructor runs collectives."""

from __future__ import annotations

import random
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Future, ProcMesh
from monarch_kernel.errors import RanksError, RemoteInterrupt
from monarch_kernel.runtime.diagnostics.stacks import Doing
from tests.failures.cells import Cells
from tests.support.waiting import LONG_S, wait_until

N = 4
MOMENTS = 14
SEED = 5

PREPARE = """
import pathlib
from torch.nn.parallel import DistributedDataParallel as DDP
class Stopwatch:
    lines = 0
    def __init__(self, at, stops): self.at, self.stops = at, stops
    def __call__(self, frame, event, argument):
        if event == "line":
            self.lines += 1
            if self.lines == self.at: self.stops()
        return self
def make(at=0, stops=None):
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    watch = Stopwatch(at, stops)
    sys.settrace(watch)
    try: DDP(net)
    finally: sys.settrace(None)
    return watch.lines
make(); make()
"""
STOPS = """
def stops():
    if rank in {ranks}:
        pathlib.Path({folder!r}, f"at{{rank}}").touch()
        while True: time.sleep(0.001)
make({at}, stops)
stops()  # a rank that has executed fewer lines this time
"""
WORKS = """
net = DDP(torch.nn.Linear(4, 1))
net(torch.ones(2, 4)).sum().backward()
x = torch.full((1,), float(rank)); dist.all_reduce(x)
int(x), float(net.module.weight.grad.sum())
"""
RANKS: dict[str, Collection[int]] = {"one": (1,), "some": (0, 2), "all": range(N)}


def check_next(cells: Cells, last: Future[Any], what: str) -> None:
    """Check that the next cell works; like the notebook, form the process group again only if the last cell has broken it."""
    with pytest.raises((RanksError, RemoteInterrupt)):
        last.get(LONG_S)
    if not last.in_step:
        cells.form()
    assert cells.ok(WORKS) == ((6, 8.0),) * N, what


def have_stopped(mesh: ProcMesh, folder: Path, ranks: Collection[int]) -> bool:
    """Whether ranks are at their line, or wait in a collective for one that is.

    Ranks do not execute the same number of lines before a collective: how often calls are compared and counted depends on time.
    """
    there = [rank for rank in ranks if (folder / f"at{rank}").exists()]
    if len(there) < len(ranks):
        doing = mesh.doing().get(LONG_S)
        others = [doing[rank] for rank in ranks if rank not in there]
        return bool(there) and all(isinstance(each, Doing) and bool(each.collectives) for each in others)
    return True


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("which", RANKS)
def test_an_interrupt_at_any_line_of_the_constructor_leaves_a_mesh_that_works(
    cells: Cells, which: str, tmp_path: Path
) -> None:
    """The ranks stop at a line, so that the interrupt arrives there; others may wait for them in a collective."""
    dice, ranks = random.Random(SEED), tuple(RANKS[which])
    lines = min(cells.ok(f"{PREPARE}make()"))
    assert lines > 100
    pids = [rank.pid for rank in cells.mesh.view().ranks]
    for turn in range(MOMENTS):
        at, folder = dice.randrange(1, lines), tmp_path / str(turn)
        folder.mkdir()
        future = cells.mesh.run_cell(STOPS.format(ranks=ranks, at=at, folder=str(folder)), cell=100 + turn)
        wait_until(partial(have_stopped, cells.mesh, folder, ranks), f"the ranks to stop at line {at} of {lines}")
        cells.mesh[list(ranks)].interrupt()
        check_next(cells, future, f"after an interrupt at line {at} of {lines}, of {ranks}")
    assert [rank.pid for rank in cells.mesh.view().ranks] == pids


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_interrupt_at_any_time_of_the_constructor_leaves_a_mesh_that_works(cells: Cells) -> None:
    """The interrupt hits whatever runs then, also native code; the constructor may have ended before."""
    dice = random.Random(SEED)
    cells.ok(PREPARE)
    pids = [rank.pid for rank in cells.mesh.view().ranks]
    for turn in range(20):
        future = cells.mesh.run_cell("for _ in range(200): make()", cell=200 + turn)
        future.wait(dice.random() * 0.2)
        part = cells.mesh if turn % 2 else cells.mesh[[dice.randrange(N)]]
        part.interrupt()
        check_next(cells, future, f"after an interrupt in turn {turn}")
    assert [rank.pid for rank in cells.mesh.view().ranks] == pids
