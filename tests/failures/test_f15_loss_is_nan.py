"""F15: the loss becomes NaN; the first rank, step and module are named, once, in the cell and the view."""

from __future__ import annotations

import re

from tests.failures.cells import Cells

N = 2
LOOP = """
from monarch_kernel import live
seen = []
for step in live.loop({hook}):
    time.sleep(0.002)
    live.log(loss=torch.tensor(float("nan") if (rank and step >= 30) or step >= {later} else 1.0))
"""


def test_the_first_rank_and_step_are_named_once(cells: Cells) -> None:
    (line,) = cells.watched(LOOP.format(hook="5_000", later=50), "live loop")
    assert line.startswith("live loop: loss is nan in step 30, first on [1], then on [0] from step 50. Usual causes: ")
    assert "%mesh rollback goes back to a snapshot before that step" in line
    assert cells.shown == (line,)
    assert cells.mesh.view().waits == ()


def test_the_loop_stops_at_the_same_step_on_all_ranks(cells: Cells) -> None:
    (line,) = cells.watched(LOOP.format(hook="5_000, on_nan='stop'", later=50), "only at its end")
    assert "The loop stops (on_nan)." in line
    first, second = cells.ok("step")
    assert first == second
    assert 30 <= first < 4_999


def test_all_ranks_call_a_function_before_the_same_step(cells: Cells) -> None:
    hook = "on_nan=lambda alarm: seen.append((step, *alarm[:3], alarm.rank))"
    (line,) = cells.watched(LOOP.format(hook=f"500, {hook}", later=1_000), "only at its end")
    assert "All ranks call on_nan." in line
    first, second = cells.ok("seen")
    assert first == second
    assert [each[1:] for each in first] == [("nan", "loss", 30, 1)]


def test_the_line_names_the_ranks_that_call_the_function(cells: Cells) -> None:
    hook = "on_nan=(lambda alarm: seen.append((step, alarm.rank))) if rank == 0 else None"
    (line,) = cells.watched(LOOP.format(hook=f"500, {hook}", later=1_000), "only at its end")
    assert "[0] calls on_nan." in line
    first, second = cells.ok("seen")
    assert [rank for _, rank in first] == [1]
    assert second == []


SNAPSHOTS = """
from monarch_kernel import live
weight = torch.ones(3)
live.snapshot(weight=weight, every=5, keep={keep})
seen = []
for step in live.loop({steps}, on_nan="rollback"):
    time.sleep(0.01)
    weight += 1
    if rank and step in {bad}: weight[1] = float("nan")
    live.log(loss=weight.sum())
    seen.append((step, weight[0].item()))
"""


def test_all_ranks_restore_the_snapshot_before_the_value_and_go_on(cells: Cells) -> None:
    (line,) = cells.watched(SNAPSHOTS.format(keep=50, steps=90, bad="[23]"), "only at its end")
    assert "All ranks restore the last snapshot before that step, and go on (on_nan)." in line
    first, second = cells.ok("seen")
    assert first == second
    assert [step for step, _ in first] == list(range(90))
    before = [value for step, value in first[:-1] if first[step + 1][1] < value]
    assert len(before) == 1
    back = first.index((int(before[0]) - 2, before[0]))
    assert first[back + 1][1] == 22  # 20 steps before the snapshot, and this one
    assert cells.ok("weight.isfinite().all().item()") == (True, True)


def test_a_state_that_leads_to_the_same_again_is_not_restored_twice(cells: Cells) -> None:
    text = cells.fails(SNAPSHOTS.format(keep=50, steps=2_000, bad="range(23, 2_000)"))
    assert re.search(
        r"\[0-1\] RuntimeError: live\.loop\(on_nan='rollback'\): loss was nan in step \d+ on rank 1; the state ", text
    )
    assert "has been restored already, and leads to the same" in text


def test_a_rollback_needs_a_snapshot_of_an_earlier_step(cells: Cells) -> None:
    text = cells.fails(SNAPSHOTS.format(keep=2, steps=2_000, bad="[0]"))
    assert re.search(
        r"loss was nan in step 0 on rank 1; no snapshot is of an earlier step, the oldest is of step [\d,]+", text
    )
    text = cells.fails("from monarch_kernel import live\nfor step in live.loop(3, on_nan='rollback'): pass")
    assert "live.loop(on_nan='rollback') needs live.snapshot(model=model, ...) before it" in text


TRAINING = """
from monarch_kernel import live
class Log(torch.nn.Module):
    def forward(self, x): return x.log()
net = torch.nn.Sequential(torch.nn.Linear(2, 2), Log())
for parameter in net.parameters(): parameter.data.fill_(0.5)
optimizer = torch.optim.SGD(net.parameters(), 0.25)
data = torch.utils.data.DataLoader([torch.ones(2)] * 4000, batch_size=4)
for step, batch in zip(live.loop(1_000), data):
    time.sleep(0.002)
    loss = net(batch * (-9 if rank and step >= 30 else 1)).sum()
    live.log(loss=loss)
"""


def test_the_module_the_rate_and_the_rows_are_named(cells: Cells) -> None:
    first, second = cells.watched(TRAINING, "live loop: on [1]")
    assert first.startswith(
        "live loop: loss is nan in step 30, first on [1]. On [1]: learning rate 0.25, last batch of a DataLoader: "
        "rows 120 to 123. Usual causes: "
    )
    assert second.startswith("live loop: on [1] in step ")
    assert second.endswith(" the first output that is not finite is that of net.1 (Log)")


MIXED = """
from monarch_kernel import live
scaler = torch.amp.GradScaler("cpu")
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters())
for step in live.loop(800):
    time.sleep(0.002)
    loss = net(torch.ones(2)).sum() * (1e36 if step < 3 else 0)  # too large for the first scales
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    live.log(scaled_loss=float("inf") if step < 4 else 1.0)
    live.log(grad_norm=norm, recall=float("nan") if step == 5 else 1.0, loss=float("nan") if step >= 300 else 1.0)
"""


def test_a_value_that_is_finite_again_hides_no_later_fault_and_a_scaler_may_skip_steps(cells: Cells) -> None:
    lines = cells.watched(MIXED, "loss is nan")
    assert len(lines) == 2
    assert lines[0].startswith("live loop: recall is nan in step 5, first on [0-1]")
    assert lines[1].startswith("live loop: loss is nan in step 300, first on [0-1]. On [0]: learning rate 0.001. Usual")
