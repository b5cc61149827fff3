"""F42: a bit of a gradient flips on one rank; the check of the loop names the step, the parameter and the rank."""

from __future__ import annotations

from tests.failures.cells import Cells

N = 4
LOOP = """
from monarch_kernel import live
torch.manual_seed(0)
net = torch.nn.Linear(8, 3)
for step in live.loop(8):
    net.zero_grad()
    net(torch.ones(2, 8) * (rank + 1)).sum().backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
    if (rank, step) == (3, 5):
        net.weight.grad.view(torch.int32)[2, 4] ^= 1 << 12
    live.check(net=net, every=1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad
"""


def test_the_step_the_parameter_and_the_rank_are_named(cells: Cells) -> None:
    text = cells.fails(LOOP)
    assert (
        "[0-3] DriftError: step 5: the replicas differ: the gradient of net.weight: [3] differs from [0-2], at [2, 4]: "
        in text
    )
    assert "1 of 24 elements differs; all ranks have stopped here" in text
    assert cells.ok("step") == (5, 5, 5, 5)


REPEATS = """
from monarch_kernel import live
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Dropout(0.2)))
calls = 0
def flip(gradient):
    if (rank, calls) == (2, 12):  # the second run of step 8
        gradient.view(torch.int32)[1, 2] ^= 1 << 12
net.module[0].weight.register_hook(flip)
def backward():
    global calls
    calls += 1
    loss = net(torch.ones(2, 8) * (rank + 1)).pow(2).sum()
    loss.backward()
    return loss.item()
for step in live.loop(12):
    net.zero_grad()
    loss = live.repeat(backward, every=4, net=net)
    live.check(net=net, every=1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad
"""


def test_a_bit_that_flips_before_the_ranks_exchange_gradients_is_found_by_a_second_run(cells: Cells) -> None:
    text = cells.fails(REPEATS)
    assert (
        "[0-3] DriftError: step 8: the gradient of net.0.weight is another one when forward and backward run twice, "
        "on [2]. Usual causes: " in text
    )
    assert cells.ok("step, calls") == ((8, 12),) * 4
