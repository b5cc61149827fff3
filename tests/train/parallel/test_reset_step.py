"""After an error cuts off a step, the next steps are those of a model that never started it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.support.ranks import Ranks

pytestmark = pytest.mark.timeout(200)

TRAP = """
class Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if "forward" in traps:
            traps.clear()
            raise ValueError("trapped in the forward")
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        if "backward" in traps:
            traps.clear()
            raise ValueError("trapped in the backward")
        return grad

class Trapped(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
    def forward(self, x):
        return self.inner(Trap.apply(x))

traps = set()
def make():
    torch.manual_seed(1)
    return Net(lambda width: Trapped(width))
"""


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("hsdp", marks=pytest.mark.slow), "ddp", "kept"])
def test_training_continues_as_if_the_step_had_not_started(four: Ranks, two: Ranks, strategy: str, where: str) -> None:
    if strategy != "ddp" and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip(f"torch {torch.__version__} can't reset the step of FSDP: 2.13 can")
    options = {
        "hsdp": "mesh=init_device_mesh('cpu', (2, 2), mesh_dim_names=('copies', 'shards')), strategy='hsdp'",
        "kept": "strategy='fsdp', replicate=['blocks.1.norm.weight']",
    }.get(strategy, f"strategy='{strategy}'")
    ranks = four if strategy == "hsdp" else two
    ranks.run(TRAP)
    ranks.run(
        f"""
model = make()
reference = copy.deepcopy(model)
model = parallelize(model, **{{"mesh": mesh, "example": batch(0, 4), "quiet": True, **dict({options})}})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ours = train(model, world_size, rank, optimizer=optimizer)
traps.add({where!r})
try:
    loss_of(model, batch(77).chunk(world_size)[rank]).backward()
except ValueError as error:
    assert "trapped" in str(error), error
else:
    raise AssertionError("nothing was trapped")
ours = torch.cat([ours, train(model, world_size, rank, optimizer=optimizer)])
optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
alone = torch.cat([train(reference, optimizer=optimizer), train(reference, optimizer=optimizer)])
torch.testing.assert_close(ours, alone, atol=2e-5, rtol=1e-4)
same(model, reference)
"""
    )


def test_a_model_of_an_old_group_says_so(two: Ranks) -> None:
    ranks = two
    ranks.run(TRAP)
    said = ranks.run(
        """
from monarch_kernel.train.parallel.reset_step import forget_step
model = parallelize(make(), mesh, "fsdp", example=batch(0, 4), quiet=True)
forget_step(model)
known = dist.distributed_c10d._world.pg_map
kept, group = dict(known), mesh.get_group()
traps.add("forward")
try:
    model(batch(0, 4))
except ValueError:
    pass
del known[group]
said = ""
try:
    model(batch(0, 4))
except RuntimeError as error:
    said = str(error)
finally:
    known.update(kept)
said
"""
    )
    for value in said:
        assert "run the cells again that create the model" in value


def test_torch_that_can_not_reset_raises_only_after_a_cut_off_step(two: Ranks) -> None:
    """Simulates torch before 2.13."""
    two.run(TRAP)
    for value in two.run(
        """
from torch.distributed.fsdp import FSDPModule
from monarch_kernel.train.parallel.reset_step import forget_step
model = parallelize(make(), mesh, "fsdp", example=batch(0, 4), quiet=True)
train(model, world_size, rank)
reset = getattr(FSDPModule, "reset_iter_state", None)
if reset is not None:
    del FSDPModule.reset_iter_state
said = ""
try:
    forget_step(model)
    train(model, world_size, rank)
    traps.add("backward")
    try:
        loss_of(model, batch(7)).backward()
    except ValueError:
        pass
    forget_step(model)
except RuntimeError as error:
    said = str(error)
finally:
    if reset is not None:
        FSDPModule.reset_iter_state = reset
not traps, said
"""
    ):
        assert value[0]
        assert "an error or an interrupt cut off a step, and FSDP of torch" in value[1]
