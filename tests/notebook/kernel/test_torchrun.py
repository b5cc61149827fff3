"""``%mesh torchrun`` runs scripts for torchrun in the ranks of a mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook

TRAIN = """
import argparse, json, os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--out")
options = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(options.steps):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
dist.all_reduce(loss := loss.detach())
print(f"loss {loss.item():.6f} of {dist.get_world_size()}")
if options.out and dist.get_rank() == 0:
    with open(options.out, "w") as file:
        json.dump(dict(os.environ), file)
dist.destroy_process_group()
"""
# The variables that torchrun sets, and we do not: the first is about NCCL's groups, which ranks have already, and the second is
# set where a rank gets its threads.
NOT_OURS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""What torchrun sets for itself, or for the machine; the last one says which signals torchrun handles."""
OF_THE_COMPILER = {"TORCHINDUCTOR_CACHE_DIR"}
"""What torch's compiler sets in the first process that asks where its files are; ranks may have asked before, or never."""


def test_a_script_runs_twice_and_an_error_names_its_line(notebook: Notebook, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    first, second = (notebook.ok(f"%mesh torchrun t {script} --steps 3") for _ in range(2))
    assert first.stdout.startswith("[0-1] loss ")
    assert first.stdout.endswith(" of 2\n")
    assert second.stdout == first.stdout

    script.write_text(TRAIN.replace("parse_args()", "parse_args()\nif os.environ['RANK'] == '1': 1 / 0"))
    failed = notebook.run(f"%mesh torchrun t {script}")
    assert "[1] ZeroDivisionError" in failed.error
    assert "train.py, line 10" in failed.error
    assert "run_script" not in failed.error
    missing = notebook.run(f"%mesh torchrun {tmp_path}/none.py")
    assert missing.evalue.endswith("none.py can't be read: No such file or directory")
    misspelt = notebook.run(f"%mesh torchrun tt {script}")
    assert "%mesh torchrun: 'tt' is neither a mesh (t) nor a script" in misspelt.evalue
    assert "write t, without an index" in notebook.run(f"%mesh torchrun t[0] {script}").evalue


@pytest.mark.slow
def test_the_variables_are_those_of_torchrun(notebook: Notebook, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    notebook.ok(f"%mesh torchrun t {script} --out {tmp_path}/ours.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    environment = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    subprocess.run([*command, "--out", f"{tmp_path}/theirs.json"], check=True, env=environment, timeout=100)
    ours, theirs = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("ours", "theirs"))
    assert set(theirs) - set(environment) - set(ours) <= NOT_OURS | OF_THE_COMPILER
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
    )
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
