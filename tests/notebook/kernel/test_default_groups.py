"""The default process group of a mesh, after cells and calls that leave some of its ranks with another one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook

pytestmark = pytest.mark.timeout(120)

SUM = "%%remote\nimport torch, torch.distributed as dist\nx = torch.ones(1); dist.all_reduce(x); print(int(x))"
OWN = """%%remote t[0:1]
import torch, torch.distributed as dist
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(1); dist.all_reduce(x); print(int(x))"""
TRAINER = """
import torch, torch.distributed as dist
from monarch_kernel.actor import Actor, current_rank, endpoint

class Trainer(Actor):
    @endpoint
    def step(self, path):
        if current_rank().rank == 1: open(path, "w").close()
        while current_rank().rank == 1: pass
        dist.all_reduce(torch.ones(4))

    @endpoint
    def mix(self):
        dist.all_reduce(torch.ones(4, dtype=(torch.float32, torch.int32)[current_rank().rank]))

trainer = t.spawn("trainer", Trainer)
trainer.initialized.get()
"""


def test_a_part_of_the_mesh_makes_its_own_default_group(notebook: Notebook) -> None:
    assert notebook.ok(SUM).lines() == {0: ["2"], 1: ["2"]}
    assert notebook.ok(OWN).lines() == {0: ["1"]}
    assert notebook.ok("%%remote t[0:1]\nprint(dist.get_world_size())").lines() == {0: ["1"]}  # it keeps it
    assert notebook.ok(SUM).lines() == {0: ["2"], 1: ["2"]}


def test_a_part_of_the_mesh_destroys_its_default_group(notebook: Notebook) -> None:
    notebook.ok(SUM)
    notebook.ok("%%remote t[0:1]\ndist.destroy_process_group()")
    assert notebook.ok(SUM).lines() == {0: ["2"], 1: ["2"]}


def test_a_call_of_an_actor_is_interrupted_in_a_collective(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok(SUM)
    notebook.ok(TRAINER)
    notebook.ok(f"step = trainer.step.call({str(tmp_path / 'started')!r})")
    wait_until((tmp_path / "started").exists, "rank 1 to begin")
    wait_until(lambda: notebook.value("len(t.doing().get()[0].collectives)"), "rank 0 to wait for it")
    cell = notebook.send("step.get(warn_after_s=0.4)")
    cell.wait_for(lambda cell: "no answer" in cell.stderr)
    assert re.search(r"\n  \[0\] waits for [\d.]+ s in all_reduce #", cell.stderr), cell.stderr
    place = r"actor trainer: notebook cell \[\d+\], line 8, in step: while "
    assert re.search(rf"; \[1\] has not started it: {place}", cell.stderr), cell.stderr
    notebook.interrupt()
    assert cell.wait().ename == "RemoteInterrupt"
    assert cell.evalue.startswith("the wait for trainer.step was interrupted, and so is what the ranks run for it")
    assert notebook.ok(SUM).lines() == {0: ["2"], 1: ["2"]}


def test_a_collective_of_an_actor_that_is_refused_has_the_number_of_its_cell(notebook: Notebook) -> None:
    notebook.ok(SUM)
    notebook.ok(TRAINER)
    cell = notebook.run("trainer.mix.call().get()")
    for rank, dtype in enumerate(("float32", "int32")):
        line = rf"\[{rank}\] all_reduce of {dtype} \(4\), sum: notebook cell \[\d+\], line 13\n"
        assert re.search(line, cell.error), cell.error
    assert "ipykernel_" not in cell.error


FULL = """%%remote
import resource, torch, torch.distributed as dist
files, limits = [], resource.getrlimit(resource.RLIMIT_NOFILE)
if rank:
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, limits[1]))
    while True: files.append(open("/dev/null"))
dist.recv(torch.ones(1), 1)"""
EMPTY = "%%remote t[1]\nfiles.clear(); resource.setrlimit(resource.RLIMIT_NOFILE, limits); rank"


def test_a_cell_on_a_slice_can_remove_what_keeps_the_group_from_being_formed(notebook: Notebook) -> None:
    """Such as a rank that has no file descriptor left: only code on this rank can close some."""
    assert "[1] OSError: [Errno 24] Too many open files: '/dev/null'" in notebook.run(FULL).error
    assert "forming the process group of t failed" in notebook.run(SUM).error
    part = notebook.ok(EMPTY)
    assert part.plain == "[1] 1"
    assert "the process group of t could not be formed, and this cell runs without it: [1] " in part.stderr
    assert notebook.ok(SUM).stdout == "[0-1] 2\n"
