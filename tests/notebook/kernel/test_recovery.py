"""Live loops that recover from deaths of ranks, and that users roll back."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.notebook.kernel.conftest import Cell, Notebook
from tests.support.boards import scalars
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

RANKS = 4
DEFINE = """%%remote
import pathlib, random, time, torch
from torch import nn
from torch.distributed.fsdp import fully_shard
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    def forward(self, x):
        return self.layers(x)
def batch(step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 16, generator=generator)
"""
BUILD = """%%remote
torch.manual_seed(0)
model = Net()
for layer in model.layers:
    if isinstance(layer, nn.Linear): fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
losses = []
torch.manual_seed(rank)
random.seed(rank)
"""
TRAIN = """%%remote {options}
live.snapshot(model=model, optimizer=optimizer, schedule=schedule, losses=losses, every=5)
for step in live.loop(60, on_failure="recover"):
    lr = live.knob("scale", 1.0, low=0.1, high=10)
    loss = (model(batch(step)) * lr).square().mean() + 1e-3 * random.random()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append((step, loss.item()))
    live.log(loss=loss)
    if not pathlib.Path({go!r}).exists(): time.sleep(0.05)
"""
SUM = """%%remote --out sums
sum(float(param.full_tensor().double().sum()) for param in model.parameters()), losses
"""


def train(go: Path = Path("/"), options: str = "") -> str:
    """A training whose steps take a while until a file is there."""
    return TRAIN.format(go=str(go), options=options)


@pytest.fixture(scope="module")
def undisturbed(bare: Notebook) -> list[object]:
    """The result of a training without deaths."""
    bring_up(bare)
    bare.ok(train())
    found = outcome(bare)
    bare.ok("%mesh down t")
    return found


@pytest.fixture
def trained(bare: Notebook) -> Notebook:
    """A notebook with a mesh for this test only, where the model is built."""
    bring_up(bare)
    return bare


def bring_up(notebook: Notebook) -> None:
    notebook.ok(f"%mesh up t -n {RANKS} --device cpu")
    for code in (DEFINE, BUILD):
        notebook.ok(code)


def outcome(notebook: Notebook) -> list[object]:
    notebook.ok(SUM)
    return list(notebook.value("list(sums.values())"))


def reaches(notebook: Notebook, step: int) -> None:
    wait_until(lambda: notebook.value("max([0, *(loop.view().step for loop in t.loops)])") >= step, f"step {step}")


def kill(notebook: Notebook, rank: int) -> None:
    """Kill the current process of a rank, as soon as there is one."""
    wait_until(lambda: notebook.value(f"t.view().ranks[{rank}].pid"), "a process")
    os.kill(notebook.value(f"t.view().ranks[{rank}].pid or 1 << 30"), signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_replaced_and_the_outcome_is_the_same(
    trained: Notebook, undisturbed: list[object], tmp_path: Path
) -> None:
    board, go = tmp_path / "board", tmp_path / "go"
    said = trained.ok(f"%mesh tensorboard t {board}").stdout
    assert said == (
        f"t: its loops are written to {board}, each to a separate folder\n"
        f"to see them: %load_ext tensorboard, then %tensorboard --logdir {board}\n"
    )
    cell = trained.ok(train(go, "--background"))
    reaches(trained, 12)
    trained.ok("%mesh loop scale=1.0")
    kill(trained, 2)
    go.touch()
    assert outcome(trained) == undisturbed, cell.text
    assert trained.ok("%mesh tensorboard off").text.startswith("t: its loops are no longer written")
    assert [each.name for each in board.iterdir()] == ["loop_0"]
    assert [step for step, _ in scalars(board / "loop_0", "loss")] == list(range(60))
    died, back = [line for line in cell.stderr.splitlines() if line.startswith("t: ")]
    assert died == "t: [2] died (killed by SIGKILL); going back to the last snapshot"
    number = cell.reply["execution_count"]
    again = rf"ran cells \[{number - 3}\], \[{number - 2}\] again"
    assert re.fullmatch(rf"t: \[2\] replaced, the loop is back before step \d*[05], after .* s; {again}", back)
    steps = trained.value("[point.step for point in t.loop.view().curves[0].points]")
    assert steps == sorted(set(steps))
    assert steps[-1] == 59


@pytest.mark.slow
def test_several_ranks_are_killed_again_and_again(trained: Notebook, undisturbed: list[object], tmp_path: Path) -> None:
    """They are killed at once, one after the other, and while others are being replaced."""
    cell = trained.ok(train(tmp_path / "go", "--background"))
    reaches(trained, 7)
    kill(trained, 0)
    kill(trained, 2)
    reaches(trained, 23)
    kill(trained, 3)
    wait_until(lambda: trained.value("t.incarnations()")[3] == 1, "another process")
    kill(trained, 3)
    (tmp_path / "go").touch()
    assert outcome(trained) == undisturbed, cell.text
    assert trained.value("t.incarnations()") == (1, 0, 1, 2)


SLOW_TO_LOOK = """%%remote
from monarch_kernel.train.process_group.worker import RankGroup
pending_s = RankGroup.pending_s
def slowly(self, *others):
    time.sleep(0.3)
    return pending_s(self, *others)
RankGroup.pending_s = slowly
"""


APART = """%%remote --background
live.snapshot(losses=losses, every=5)
for step in live.loop(60, on_failure="recover"):
    losses.append(step)
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_death_outside_collectives_ends_the_loop_of_other_ranks(trained: Notebook) -> None:
    """The controller ends the rank's loop once it has noted the reason; otherwise the cell would fail by itself."""
    trained.ok(SLOW_TO_LOOK)
    cell = trained.ok(APART)
    reaches(trained, 12)
    kill(trained, 1)
    ended = trained.run("%%remote\nlosses == list(range(60))")
    assert ended.plain == f"[0-{RANKS - 1}] True", cell.text


TWO = """%%remote --background
live.snapshot(losses=losses, every=5)
for step in live.loop(20, on_failure="recover"):
    losses.append(("one", step))
live.snapshot(losses=losses, every=5)
for step in live.loop(60, on_failure="recover"):
    losses.append(("two", step))
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_the_second_loop_of_a_cell_uses_its_own_snapshot(trained: Notebook) -> None:
    """The repeated first loop takes snapshots, too."""
    cell = trained.ok(TWO)
    wait_until(
        lambda: trained.value("[loop.key[1] for loop in t.loops if loop.view().step > 11]")[-1:] == [2], "step 12"
    )
    kill(trained, 1)
    steps = [("one", step) for step in range(20)] + [("two", step) for step in range(60)]
    ended = trained.run(f"%%remote\nlosses == {steps!r}")
    assert ended.plain == f"[0-{RANKS - 1}] True", cell.text


NESTED = """%%remote --background
import pathlib
losses = []
live.snapshot(losses=losses, every=1)
for epoch in live.loop(4, on_failure="recover"):
    for step in live.loop(20):
        if rank == 2 and (epoch, step) == (1, 10):
            pathlib.Path(FOLDER, "here").touch()
            while not pathlib.Path(FOLDER, "go").exists(): time.sleep(0.01)
        torch.distributed.barrier()
    losses.append(epoch)
"""


def test_a_death_in_a_plain_loop_inside_a_recovering_loop(trained: Notebook, tmp_path: Path) -> None:
    cell = trained.ok(NESTED.replace("FOLDER", repr(str(tmp_path))))
    wait_until((tmp_path / "here").exists, "the rank to be in the second epoch")
    kill(trained, 2)
    (tmp_path / "go").touch()
    ended = trained.run("%%remote\nlosses")
    assert ended.plain == f"[0-{RANKS - 1}] [0, 1, 2, 3]", cell.text
    assert "the loop is back before step 1" in cell.stderr


SLOW_STEP = """%%remote --background
import pathlib
live.snapshot(model=model, optimizer=optimizer, every=5)
for step in live.loop(100):
    if step == 7:
        pathlib.Path({folder!r}, f"here{{rank}}").touch()
        while not pathlib.Path({folder!r}, "go").exists(): time.sleep(0.01)
"""

LATE = """%%remote --background
losses = []
live.snapshot(losses=losses, every=5)
pathlib.Path(FOLDER, f"here{rank}").touch()
if rank == 1:
    while not pathlib.Path(FOLDER, "go").exists(): time.sleep(0.01)
for step in live.loop(100, on_failure="recover"):
    losses.append(step)
    time.sleep(0.001)
"""


@pytest.mark.slow
def test_ranks_wait_for_a_late_rank_and_a_death_before_its_start_ends_the_loop(
    trained: Notebook, tmp_path: Path
) -> None:
    """Otherwise the first ranks would keep no snapshot for the last one, and all steps would be done for nothing."""
    trained.ok("%%remote\nimport pathlib")
    cell = trained.ok(LATE.replace("FOLDER", repr(str(tmp_path))))
    wait_until(lambda: (tmp_path / "here1").exists() and trained.value("bool(t.loops)"), "all ranks to arrive")
    reaches(trained, 5)
    time.sleep(0.5)  # enough time for all steps, if they did not wait
    assert trained.value("t.loop.view().step") == 5
    kill(trained, 0)
    wait_until(lambda: trained.value("t.loop.view().state") == "over", "the ranks in the loop to end")
    (tmp_path / "go").touch()
    ended = trained.run("%%remote\nlosses == list(range(100))")
    assert ended.plain == f"[0-{RANKS - 1}] True", cell.text
    assert "the loop is back at the beginning, as it had no snapshot yet" in cell.stderr


@pytest.mark.slow
def test_a_rollback_waits_for_the_last_steps_of_a_stopped_loop(trained: Notebook, tmp_path: Path) -> None:
    trained.ok("from monarch_kernel.notebook.magics import commands as _commands; _commands._ENDS_S = 0.01")
    trained.ok(SLOW_STEP.format(folder=str(tmp_path)))
    # Not by the view: a rank that waits in a step reports nothing, so the view may show an earlier one.
    wait_until(lambda: all((tmp_path / f"here{rank}").exists() for rank in range(RANKS)), "all ranks to be in step 7")
    running = trained.run("%mesh rollback").evalue
    assert "is running; end its loop with %mesh loop stop" in running
    trained.ok("%mesh loop stop")
    rollback = trained.send("%mesh rollback")
    rollback.wait_for(lambda cell: cell.has_started)
    trained.wait_blocked()
    (tmp_path / "go").touch()
    assert rollback.wait().stdout.startswith("t: all ranks are back before step "), rollback.text
    trained.ok("_commands._ENDS_S = 2.0")


@pytest.mark.slow
def test_a_stopped_loop_is_rolled_back_by_hand_and_continues(
    trained: Notebook, undisturbed: list[object], tmp_path: Path
) -> None:
    trained.ok(train(tmp_path / "never", "--background"))
    reaches(trained, 16)
    trained.ok("%mesh loop stop")
    said = trained.ok("%mesh rollback t").stdout
    step = int(
        re.fullmatch(r"t: all ranks are back before step (\d+); the next live.loop continues from there\n", said)[1]
    )
    assert step % 5 == 0
    assert f"t has no snapshot of step 999; it has: {step - 5}, {step} (" in trained.run("%mesh rollback 999").evalue
    assert "t has no snapshot of step 2; it has: " in trained.run("%mesh rollback 2").evalue
    assert trained.ok("%%remote\nlen(losses)").plain == f"[0-3] {step}"  # a refused step changes nothing
    assert trained.ok(f"%mesh rollback {step - 5}").stdout.startswith(f"t: all ranks are back before step {step - 5}")
    assert trained.ok("%%remote\nlen(losses)").plain == f"[0-3] {step - 5}"
    trained.ok(train())
    assert outcome(trained) == undisturbed


@pytest.mark.slow
def test_ranks_healed_by_hand_get_their_snapshots_from_others(
    trained: Notebook, undisturbed: list[object], tmp_path: Path
) -> None:
    plain = train(tmp_path / "never", "--background").replace(', on_failure="recover"', "")
    trained.ok(plain)
    reaches(trained, 12)
    kill(trained, 1)
    wait_until(lambda: trained.value("t.loop.view().state") == "over", "the loop to end")
    trained.ok("%mesh heal")
    for code in (DEFINE, BUILD):
        trained.ok(code)
    assert trained.run("%mesh rollback").ok
    trained.ok(train())
    assert outcome(trained) == undisturbed


SLOW = """%%remote --background
live.snapshot(losses=losses, every=2)
for step in live.loop(2000, on_failure="recover"):
    losses.append(({name}, step))
    time.sleep(0.02)
"""


def ends(notebook: Notebook, cell: Cell) -> str:
    """Wait until a cell in the background has failed; gives all its output."""
    wait_until(lambda: notebook.value("t.loop.view().state") == "over" and "Error" in cell.error, "the cell to fail")
    return cell.text


@pytest.mark.slow
def test_a_loop_that_can_not_recover_shows_the_reason(trained: Notebook) -> None:
    loop = "for step in live.loop(3, on_failure='recover'): pass"
    assert "needs live.snapshot(model=model, ...) before it" in trained.run(f"%%remote\n{loop}").error
    assert (
        "works only in notebook cells"
        in trained.run(f"t.run({f'live.snapshot(losses=losses){chr(10)}{loop}'!r}).get()").error
    )
    assert "a int can't be restored" in trained.run("%%remote\nlive.snapshot(step=3)").error
    assert trained.run("%mesh rollback").evalue.startswith("t: there is no snapshot of [0-3]")
    assert "to see them" not in trained.run("%mesh tensorboard t[0:2] x").text
    assert "TensorBoard needs the loops of a whole mesh: " in trained.run("%mesh tensorboard t[0:2] x").evalue
    assert trained.run("%mesh tensorboard /dev/null/x").evalue.startswith("%mesh tensorboard: [Errno 20]")
    assert "t is a mesh; write a folder, too, such as t runs/t" in trained.run("%mesh tensorboard t").evalue
    assert trained.run("%mesh rollback t[0:2]").evalue.startswith(
        "%mesh rollback: all ranks roll back together; write t"
    )

    trained.ok("t['pushed'] = 'by the program'")
    cell = trained.ok(SLOW.format(name="pushed"))
    reaches(trained, 10)
    kill(trained, 1)
    assert "t: the new process of [1] has no pushed: no earlier cell" in ends(trained, cell)
    trained.ok("t['pushed'] = 'by the program'")
    assert trained.ok("%mesh rollback").stdout.startswith("t: all ranks are back before step ")

    for code in (DEFINE, BUILD):
        trained.ok(code)
    cell = trained.ok(SLOW.format(name="0"))
    reaches(trained, 10)
    kill(trained, 1)
    kill(trained, 2)  # this rank keeps the other one's snapshot
    assert "t: no snapshot of [1] is left, because the ranks that kept it have died, too" in ends(trained, cell)


ONCE = """%%remote
import pathlib
ran = pathlib.Path(FOLDER, f"ran{rank}")
if ran.exists() and not pathlib.Path(FOLDER, "again").exists(): raise ValueError("not twice")
ran.touch()
once = 1
"""


@pytest.mark.slow
def test_an_earlier_cell_that_fails_when_it_runs_again_names_the_cell_of_the_loop(
    trained: Notebook, tmp_path: Path
) -> None:
    once = trained.ok(ONCE.replace("FOLDER", repr(str(tmp_path)))).reply["execution_count"]
    cell = trained.ok(SLOW.format(name="once"))
    number = cell.reply["execution_count"]
    reaches(trained, 10)
    kill(trained, 1)
    said = ends(trained, cell)
    assert f"cell [{number}] has no result: to recover its loop, cell [{once}] ran again on t, and failed. " in said
    assert "[0-3] ValueError: not twice" in said
    (tmp_path / "again").touch()
    for code in (DEFINE, BUILD, ONCE.replace("FOLDER", repr(str(tmp_path)))):  # what the text says to do
        trained.ok(code)
    assert trained.ok("%mesh rollback t").stdout.startswith("t: all ranks are back before step ")


@pytest.mark.slow
def test_a_rollback_into_another_model_is_given_up(trained: Notebook) -> None:
    trained.ok("%%remote\nnet = nn.Linear(8, 8)\nlive.snapshot(net=net, every=5)\nfor step in live.loop(10): pass")
    trained.ok("%mesh rollback")
    other = "%%remote\nnet = nn.Linear(8, 4)\nlive.snapshot(net=net, every=5)\nfor step in live.loop(10): pass\nstep"
    said = trained.run(other).evalue
    assert (
        "weight has another shape than when the snapshot was taken: this rank has [4, 8] of it, but had [8, 8]" in said
    )
    assert "The rollback to step 5 is cancelled: run this cell again to start from the beginning" in said
    assert trained.ok(other).plain == f"[0-{RANKS - 1}] 9"


@pytest.mark.slow
def test_an_interrupt_ends_a_recovery(trained: Notebook) -> None:
    trained.ok(SLOW.format(name="0"))
    reaches(trained, 10)
    kill(trained, 3)
    trained.ok("%mesh interrupt t")
    trained.ok("%mesh heal")
    assert trained.ok("%%remote\n1 + 1").plain == "[0-3] 2"
    assert trained.ok("%mesh rollback").stdout.startswith("t: all ranks are back before step ")
