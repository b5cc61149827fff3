"""F23: a rank that is slower than the others is also found where FSDP2 gathers and scatters all the time."""

from __future__ import annotations

import pytest

from tests.failures.cells import Cells

pytestmark = pytest.mark.slow  # imports FSDP2
N = 3
MODEL = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
nn = torch.nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)])
gpus = init_device_mesh("cpu", (3,))
for block in model: fully_shard(block, mesh=gpus)
fully_shard(model, mesh=gpus)
optimizer = torch.optim.SGD(model.parameters())
def augment(rows):
    if rank == 1: time.sleep(0.4)
    return rows
"""
LOOP = """
from monarch_kernel import live
for step in live.loop():
    model(augment(torch.randn(8, 256))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_late_rank_of_fsdp_is_named(cells: Cells) -> None:
    cells.ok(MODEL)
    defined = cells.number
    cells.number += 1
    future = cells.mesh.run_cell(LOOP, cell=cells.number)
    try:
        found = cells.mesh.profile(6, seconds=100.0)
    finally:
        cells.mesh.loop.stop()
        future.get()
    straggler = found.findings.straggler
    assert straggler is not None, str(found)
    assert (straggler.rank, straggler.place) == (1, (f"<remote cell [{defined}]>", 11, "augment"))
