"""F40: the loss spikes; the step, the value against the running median, the learning rate and the rows are named."""

from __future__ import annotations

from tests.failures.cells import Cells

LOOP = """
from monarch_kernel import live
for step in live.loop(5_000):
    time.sleep(0.002)
    live.log(loss=40.0 + rank if step == 120 else 2.0 + (step * 7 + rank) % 10 / 20)
"""


def test_the_step_and_the_median_are_named(cells: Cells) -> None:
    (line,) = cells.watched(LOOP, "live loop")
    assert line.startswith(
        "live loop: loss jumps to 41 in step 120 on [0-1]; the median of the last steps is 2.25. Usual causes: "
    )
    assert cells.shown == (line,)


TRAINING = """
from monarch_kernel import live
data = torch.utils.data.DataLoader(list(range(20_000)), batch_size=4, num_workers=1)
for step, batch in zip(live.loop(5_000), data):
    time.sleep(0.002)
    loss = 40.0 if step == 120 and rank else 2.0 + (step * 7 + rank) % 10 / 20
    live.log(loss=loss, lr=0.5 if step == 120 else 0.1)
"""


def test_the_learning_rate_and_the_rows_are_named(cells: Cells) -> None:
    (line,) = [each for each in cells.watched(TRAINING, "jumps to") if "jumps" in each]
    assert "jumps to 40 in step 120 on [1]; " in line
    assert ". On [1]: learning rate 0.5, last batch of a DataLoader: rows 480 to 483. Usual causes: " in line


SKIPPING = """
from monarch_kernel import live
weight = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([weight], lr=1.0)
applied = []
for step in live.loop({steps}, on_spike="skip"):
    before = weight.detach().clone()
    weight.grad = torch.ones(2)
    live.log(loss=torch.tensor(40.0 if step in {jumps} else 2.0 + (step * 7 + rank) % 10 / 20))
    if {when}:
        optimizer.step()
    applied.append(not torch.equal(weight, before))
"""


def test_no_rank_applies_the_update_of_a_step_whose_loss_jumps_on_one(cells: Cells) -> None:
    cells.ok(SKIPPING.format(steps=100, jumps="({0: [60], 1: [70, 71]}[rank])", when="True") + "applied")
    first, second = cells.ok("[step for step, each in enumerate(applied) if not each]")
    assert first == second == [60, 70, 71]
    assert cells.ok("weight.tolist()") == ([-97.0, -97.0],) * 2


def test_ranks_that_update_in_different_steps_get_an_error(cells: Cells) -> None:
    text = cells.fails(SKIPPING.format(steps=9, jumps="()", when="rank == 0 or step % 2"))
    assert "some ranks apply the update of step 0 and others that of step 1" in text


ACTING = """
from monarch_kernel import live
weight = torch.zeros(1)
if ({hook}) == "rollback":
    live.snapshot(weight=weight, every=10, keep=50)
seen = []
for step in live.loop({steps}, on_spike={hook}):
    time.sleep(0.002)
    weight += 1
    live.log(loss=40.0 if (rank, step) == (1, 60) else 2.0 + (step * 7 + rank) % 10 / 20)
"""


def test_a_jump_stops_the_loop_calls_a_function_or_goes_back_on_all_ranks(cells: Cells) -> None:
    call = "lambda alarm: seen.append((step, alarm.kind, alarm.step, alarm.value, alarm.rank))"
    (line,) = cells.watched(ACTING.format(steps=600, hook=call), "only at its end")
    assert "All ranks call on_spike. " in line
    first, second = cells.ok("seen")
    assert first == second
    assert [each[1:] for each in first] == [("spike", 60, 40.0, 1)]
    (line,) = cells.watched(ACTING.format(steps=5_000, hook="'stop'"), "only at its end")
    assert "The loop stops (on_spike). " in line
    first, second = cells.ok("step")
    assert 60 <= first == second < 4_999
    (line,) = cells.watched(ACTING.format(steps=600, hook="'rollback'"), "only at its end")
    assert "All ranks restore the last snapshot before that step, and go on (on_spike). " in line
    ((step, first), (_, second)) = cells.ok("step, weight.item()")
    assert (step, first) == (599, second)
    assert 60 < first < 600  # the steps up to the snapshot before step 60, and those after the restoration
