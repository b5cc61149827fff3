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
