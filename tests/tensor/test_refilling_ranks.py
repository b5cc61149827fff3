"""Tensors after the death of a rank: what other ranks have comes back, and the rest is named; on real ranks."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monarch_kernel import checkpoint
from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.errors import SupervisionError
from monarch_kernel.tensor import Partial, Replicate, Shard, TensorError, manual_seed
from tests.support.waiting import LONG_S

pytestmark = pytest.mark.slow  # ranks start twice, and form process groups


@pytest.fixture
def mortal(session: None) -> Iterator[ProcMesh]:
    """A mesh whose ranks may die."""
    mesh = this_host().spawn_procs({"dp": 2, "tp": 2}, name="mortal", device="cpu")
    yield mesh
    mesh.stop(grace_s=0).get(LONG_S)


def kill(mesh: ProcMesh, rank: int) -> None:
    mesh.process(rank).run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").exception(LONG_S)


class Trained:
    """A model that trains on a mesh with tensor parallelism."""

    def __init__(self, mesh: ProcMesh) -> None:
        self.mesh = mesh
        with torch.device("meta"):
            self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        manual_seed(0, mesh=mesh)
        mesh.distribute(self.model, {"0": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}})
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def steps(self, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            y = self.mesh.shard(torch.arange(4) % 3, dp=Shard(0))
            loss = F.cross_entropy(self.model(self.mesh.shard(x, dp=Shard(0))), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def test_replicas_bring_back_the_parts_of_a_dead_rank(mortal: ProcMesh) -> None:
    trained = Trained(mortal)
    trained.steps(range(2))
    x = mortal.shard(torch.arange(8.0), dp=Shard(0))
    view = x.detach()
    lost = mortal.shard(torch.arange(16.0).view(4, 4), dp=Shard(0), tp=Shard(1))
    partial = mortal.from_local(mortal.rank_tensor("tp").view(1).float(), tp=Partial())
    sums = mortal.from_local(mortal.rank_tensor("tp").float(), dp=Partial(), tp=Partial())
    own = mortal.rank_tensor("dp") * 2
    equal = mortal.put(torch.ones(2)) * 3
    expected = Trained(mortal)
    expected.steps(range(2))
    losses = expected.steps(range(2, 4))
    trained.optimizer.zero_grad()  # gradients can be Partial, and then no other rank has the same
    del expected
    gc.collect()

    assert "nothing to refill" in repr(mortal.refill())
    kill(mortal, 3)
    with pytest.raises(SupervisionError, match=r"restore what other ranks have with .refill\(\)") as caught:
        x + 1
    assert re.search(r"other ranks have the same parts of \d+; no other rank has those of 2 that no", str(caught.value))
    with pytest.raises(SupervisionError, match=r"can't be refilled: replace its dead ranks with .heal\(\) first"):
        mortal.refill()
    mortal.heal().get(LONG_S)
    done = mortal.refill(same=[equal])
    assert done.ranks == (3,)
    assert done.copied >= 4 + 8 + 2
    assert done.nbytes > 0
    assert "dp=Shard(0)" in repr(x.detach())  # the first operation after all were restored
    assert sum(done.lost.values()) == 3  # `lost`, `sums` and `own`
    assert x.full_tensor().tolist() == list(range(8))
    x.mul_(2)
    assert view.full_tensor().tolist() == [0, 2, 4, 6, 8, 10, 12, 14]  # it still shares memory
    assert partial.redistribute(tp=Replicate()).full_tensor().tolist() == [1]
    assert [each.tolist() for each in mortal.values(equal).values()] == [[3, 3]] * 4
    for each in (lost, sums, own):
        with pytest.raises(
            TensorError, match=r"the part of rank \[3\] of this tensor is lost: make it again, or call mortal"
        ):
            each + 1
        assert "is lost" in repr(each)
    assert trained.steps(range(2, 4)) == pytest.approx(losses, abs=1e-6)
    assert "nothing to refill" in repr(mortal.refill())


def test_a_checkpoint_brings_back_what_no_rank_has(mortal: ProcMesh, tmp_path: Path) -> None:
    x = mortal.shard(torch.arange(16.0).view(4, 4), dp=Shard(0), tp=Shard(1))
    own = mortal.rank_tensor("dp") * 2
    checkpoint.save(tmp_path / "x", state={"x": x})
    kill(mortal, 1)
    mortal.heal().get(LONG_S)

    def fail() -> Any:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        mortal.refill(load=fail)
    with pytest.raises(TensorError, match="is lost"):
        x + 1
    again = mortal.shard(torch.zeros(4, 4), dp=Shard(0), tp=Shard(1))
    kill(mortal, 0)
    mortal.heal().get(LONG_S)
    done = mortal.refill(load=lambda: checkpoint.load(tmp_path / "x", state={"x": again}))
    assert (done.ranks, done.loaded, done.lost) == ((0,), 1, {})
    assert again.full_tensor().flatten().tolist() == list(range(16))
    del own
