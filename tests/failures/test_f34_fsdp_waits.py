"""F34: the all-gather of FSDP waits, because a rank has left the loop; the line has the place and the missing rank."""

from __future__ import annotations

import pytest

from monarch_kernel.runtime.diagnostics.failures import describe
from tests.failures.cells import Cells

PREPARE = """
from torch.distributed.fsdp import fully_shard
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
fully_shard(net, mesh=mesh)
net(torch.ones(2, 4)).sum().backward()
"""


def test_a_wrapper_of_an_earlier_group_must_be_made_again() -> None:
    text = "Process group <torch.distributed.distributed_c10d.ProcessGroup object at 0x7f> is not initialized in the world "
    notes = " ".join(describe(ValueError(f"{text}group map. Please initialize the group first.")).notes)
    assert "this group was made before the mesh formed its process group again" in notes
    assert "make it again, and all that holds it: device meshes, DDP and FSDP wrappers" in notes
    of_mesh = describe(RuntimeError("Could not resolve the process group registered under the name 1"))
    assert " ".join(of_mesh.notes) == notes


@pytest.mark.slow  # the import of FSDP
def test_the_place_and_the_missing_rank_are_named(cells: Cells) -> None:
    cells.ok(PREPARE)
    with cells.waits("if rank == 0:\n    net(torch.ones(2, 4))", 1) as told:
        assert "[0] waits for" in told
        assert "all_gather" in told
        assert f"cell [{cells.number}], line 2" in told
        assert "[1] has finished the cell" in told
    text = cells.fails("net(torch.ones(2, 4))")
    assert "this group was made before the mesh formed its process group again" in text
    assert "device meshes, DDP and FSDP wrappers" in text
