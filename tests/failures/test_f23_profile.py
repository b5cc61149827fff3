"""F23: a profile names the rank that is slower than the others, and the line where its time goes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.features.profiling.recording import LOOP, OPTIMIZER
from tests.failures.cells import Cells
from tests.features.profiling.test_merging import check_format
from tests.support.waiting import LONG_S, wait_until

N = 3
LOOP_CELL = """
from monarch_kernel import live
def augment():
    time.sleep(0.05)
for step in live.loop():
    if rank == 2:
        augment()
    torch.randn(200, 200) @ torch.randn(200, 200)
    if rank == 0:
        dist.send(torch.ones(1000), 1)
    if rank == 1:
        dist.recv(torch.ones(1000), 0)
    dist.all_reduce(torch.ones(4))
"""
OPTIMIZER_CELL = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters())
go = torch.ones(1)
while go:
    if rank == 0: time.sleep(0.05)
    optimizer.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    go = torch.tensor(0.0 if os.path.exists({stop!r}) else 1.0)
    dist.broadcast(go, 0)
"""
OWN_PROFILER = """
from torch.profiler import profile
def spin(until):
    while not os.path.exists(until):
        torch.ones(4) + 1
        time.sleep(0.01)
spin({begin!r})
with profile() as own:
    open(f"{go}-{{rank}}", "w").close()
    spin({go!r})
len(own.events()) > 0
"""
IS_IMPORTED = "'torch._inductor' in sys.modules"


class Loader(Actor):
    """Reads until a file exists."""

    @endpoint
    def read(self, stop: str) -> None:
        while not os.path.exists(stop):
            self.wait()

    def wait(self) -> None:
        time.sleep(0.01)


@contextmanager
def running(cells: Cells, code: str) -> Iterator[None]:
    cells.number += 1
    future = cells.mesh.run_cell(code, cell=cells.number)
    try:
        yield
    finally:
        if "live.loop" in code:
            cells.mesh.loop.stop()
        future.get(LONG_S)


def test_a_loop_is_profiled_and_the_late_rank_is_named_with_its_line(cells: Cells, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert cells.ok(IS_IMPORTED) == (False,) * N
    with running(cells, LOOP_CELL):
        found = cells.mesh.profile(8, seconds=60.0, to=path)
        late = wait_until(cells.mesh.lateness, "how late the ranks are")
        view = cells.mesh.view()
    assert {each.unit for each in found.recordings.values()} == {LOOP}
    assert found.findings.steps == 8
    straggler = found.findings.straggler
    assert straggler is not None, str(found)
    assert (straggler.rank, straggler.place) == (2, (f"<remote cell [{cells.number}]>", 4, "augment"))
    assert f"its time is in augment() (cell [{cells.number}], line 4)" in str(found)
    assert late[2].last > 0.7 * late[2].of
    assert view.ranks[2].collectives > 0
    names = {each["name"] for each in check_format(json.loads(path.read_text()))}
    assert {"aten::mm", f"cell [{cells.number}], line 4, in augment", "step 8"} <= names
    assert {"t[0] to t[1]: 3.9 KiB by gloo", "message"} <= names
    assert "\ntransfers: t[0] to t[1] 3.9 KiB a step by gloo, " in str(found)
    assert cells.ok(IS_IMPORTED) == (False,) * N  # to import it breaks an import of torch._dynamo by the user's code


def test_another_profile_follows_one_that_is_interrupted(cells: Cells) -> None:
    with running(cells, LOOP_CELL):
        interrupt = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            cells.mesh.profile(5_000, seconds=600.0)
        interrupt.join()
        found = cells.mesh.profile(2, seconds=60.0)
    assert found.failures == {}
    assert found.findings.steps == 2


def test_a_cell_with_an_optimizer_is_profiled(cells: Cells, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    try:
        cells.number += 1
        future = cells.mesh.run_cell(OPTIMIZER_CELL.format(stop=str(stop)), cell=cells.number)
        found = cells.mesh.profile(8, seconds=60.0, memory=True)
    finally:
        stop.touch()
        future.get(LONG_S)
    assert {each.unit for each in found.recordings.values()} == {OPTIMIZER}
    assert "\nmemory of the processes: " in str(found)
    straggler = found.findings.straggler
    assert straggler is not None, str(found)
    assert straggler.rank == 0
    assert straggler.place == (f"<remote cell [{cells.number}]>", 6, "<module>")


def test_ranks_that_run_nothing_are_not_profiled(cells: Cells) -> None:
    with pytest.raises(RuntimeError, match="t runs nothing: start a cell"):
        cells.mesh.profile()
    with pytest.raises(FileNotFoundError, match="no folder"):
        cells.mesh.profile(to="/nowhere/at/all/trace.json")
    for steps, seconds in ((0, 1.0), (5, 0.0), (5, float("nan"))):
        with pytest.raises(ValueError, match="must be"):
            cells.mesh.profile(steps, seconds=seconds)


def test_code_that_ends_ends_its_profile(cells: Cells) -> None:
    recorded = "import threading\nwhile not any(each.name == 'monarch-profile' for each in threading.enumerate()):"
    with running(cells, f"{recorded} time.sleep(0.01)\ntime.sleep(0.3)"):
        found = cells.mesh.profile(seconds=3000.0)
    assert found.findings.steps == 0
    assert "without steps of live.loop" in str(found)


@pytest.mark.parametrize("starts", ["before", "meanwhile"])
def test_a_profiler_of_the_code_itself_is_left_alone(cells: Cells, tmp_path: Path, starts: str) -> None:
    """Two profilers at once would end the process."""
    go = tmp_path / "go"
    begin = tmp_path / "begin"
    cells.number += 1
    future = cells.mesh.run_cell(OWN_PROFILER.format(begin=str(begin), go=str(go)), cell=cells.number, want_value=True)
    try:
        if starts == "before":
            begin.touch()
            wait_until(lambda: len(list(tmp_path.glob("go-*"))) == N, "the profilers of all ranks")
            found = cells.mesh.profile(seconds=0.2)
        else:
            timer = threading.Timer(0.5, begin.touch)
            timer.start()
            found = cells.mesh.profile(seconds=1.5)
    finally:
        begin.touch()
        go.touch()
        values = [result.value for result in future.get(LONG_S).values()]
    assert values == [True] * N
    assert all("uses torch.profiler itself" in each.problem for each in found.recordings.values())


def test_an_endpoint_is_profiled(cells: Cells, by_value: None, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    loaders = cells.mesh.spawn("loaders", Loader)
    try:
        calls = loaders.read.call(str(stop))
        found = cells.mesh.profile(seconds=0.3)
    finally:
        stop.touch()
        calls.get(LONG_S)
        loaders.stop().get(LONG_S)
    assert [line.place.function for line in found.findings.lines][:1] == ["wait"]
    assert found.findings.straggler is None
