"""A DDP model that is restored from a snapshot goes on with equal bits: it sums gradients in the order that it had."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks

pytestmark = pytest.mark.timeout(200)

SETUP = """
from torch.nn.parallel import DistributedDataParallel
from torch.distributed._composable.replicate import replicate
from monarch_kernel.train.parallel import ddp_buckets
from monarch_kernel.train.parallel.reset_step import ddp_of
from monarch_kernel.train.snapshots.capture import capture, put_back, set_random_state

def make(how):
    torch.manual_seed(1)
    model = Net(width=24, blocks=2)
    if how == "replicate":
        replicate(model)
        return model
    return DistributedDataParallel(model, bucket_cap_mb=0.01 if how == "small buckets" else 25)

def steps(model, optimizer, first, last):
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, batch(step, 16).chunk(world_size)[rank]).backward()
        optimizer.step()

def bits(model):
    return torch.cat([param.detach().reshape(-1).view(torch.int32) for param in model.parameters()])

def whole_and_restored(how, at, last=8):
    model = make(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, 0, at)
    captured = capture({"model": model, "optimizer": optimizer})
    steps(model, optimizer, at, last)
    again = make(how)
    other = torch.optim.AdamW(again.parameters(), lr=1e-2)
    put_back({"model": again, "optimizer": other}, captured)
    assert all(param.grad is None for param in again.parameters())
    steps(again, other, at, last)
    return bits(model), bits(again)
"""


@pytest.mark.parametrize("at", [0, 1, 2, 5])
@pytest.mark.parametrize("how", ["one bucket", "small buckets", "replicate"])
def test_a_restored_model_goes_on_with_equal_bits(four: Ranks, how: str, at: int) -> None:
    four.run(SETUP)
    four.run(
        f"""
ours, restored = whole_and_restored({how!r}, {at})
assert torch.equal(ours, restored), f"{{int((ours != restored).sum())}} of {{len(ours)}} parameters differ"
"""
    )


def test_without_the_order_of_the_buckets_the_last_bits_differ(four: Ranks) -> None:
    """So the test above can fail, and this is the reason."""
    four.run(SETUP)
    four.run(
        """
import monarch_kernel.train.snapshots.capture as module
kept = module.set_order_of_buckets
module.set_order_of_buckets = lambda ddp, order: False
try:
    ours, restored = whole_and_restored("one bucket", 5)
finally:
    module.set_order_of_buckets = kept
assert not torch.equal(ours, restored)
torch.testing.assert_close(ours.view(torch.float32), restored.view(torch.float32), atol=1e-3, rtol=1e-2)
"""
    )


def test_a_model_in_which_gradients_start_code_is_left_alone(four: Ranks) -> None:
    four.run(SETUP)
    four.run(
        """
model = make("one bucket")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
steps(model, optimizer, 0, 2)
order = ddp_buckets.order_of_buckets(model)
assert len(order) == len(list(model.module.parameters())) and set(order) == dict(model.module.named_parameters()).keys()
again = make("one bucket")
called = []
next(again.parameters()).register_post_accumulate_grad_hook(called.append)
assert not ddp_buckets.set_order_of_buckets(again, order)
assert not called
unused = DistributedDataParallel(Net(), find_unused_parameters=True)
assert ddp_buckets.order_of_buckets(unused) == []
assert not ddp_buckets.set_order_of_buckets(unused, order)
assert not ddp_buckets.set_order_of_buckets(make("one bucket"), [])
assert not ddp_buckets.set_order_of_buckets(make("one bucket"), order[1:])
assert ddp_buckets.set_order_of_buckets(make("one bucket"), order)
"""
    )
