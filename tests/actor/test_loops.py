"""The program controls loops on real ranks: a knob changes at the same step on all ranks, however long their steps take."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, Future, ProcMesh, endpoint, this_host
from monarch_kernel.errors import RemoteError, SupervisionError
from monarch_kernel.features.live.handle import LiveLoop
from tests.support.boards import scalars
from tests.support.waiting import LONG_S, wait_until

N_RANKS = 3
PROCS = {"gpus": N_RANKS}

# Each rank is the slowest one in turn. If it were always the same one, it would fall back further and further, and each wait
# for a change that begins ahead of the fastest rank would take three times as long as all before it.
WANDER = """
import random, time
from monarch_kernel import live
seen = []
chance = random.Random(rank)
for step in live.loop({steps}):
    lr = live.knob("lr", 0.1, low=0.0, high=1.0)
    seen.append((lr, live.knob("mode", "a"), live.knob("on", True)))
    live.log(loss=1 / (step + 1) + rank, samples=10)
    time.sleep(chance.uniform(0, 0.003) * (1 + (rank + step // 16) % 3))
seen
"""


# A rank that starts much later than others is missing in the first means, so ranks wait for each other before a loop. In 60
# steps no rank has more than 64 values to report at once, so each step has a separate mean.
MEET = """
import pathlib, time
here = pathlib.Path({folder!r})
(here / str(rank)).touch()
while len(list(here.iterdir())) < {n}: time.sleep(0.001)
for step in live.loop(60):
    time.sleep(0.015)
"""


def meeting(folder: Path, body: str) -> str:
    """Return the code of a loop of 60 steps that all ranks start together. They meet through the folder."""
    folder.mkdir(exist_ok=True)
    for each in folder.iterdir():
        each.unlink()
    return MEET.format(folder=str(folder), n=N_RANKS) + body


class Running:
    """A running cell and its loop."""

    def __init__(self, procs: ProcMesh, code: str, cell: int = 7) -> None:
        before = {loop.key for loop in procs.loops}
        self.procs = procs
        self.future: Future[Any] = procs.run_cell(code, cell=cell, want_value=True)
        wait_until(lambda: procs.loops and procs.loop.key not in before, "the loop to begin")
        self.loop: LiveLoop = procs.loop

    @property
    def step(self) -> int:
        return self.loop.view().step

    def values(self) -> list[Any]:
        """Wait until the cell and its loop have ended, and return the values of the cell."""
        values = [result.value for result in self.future.get(LONG_S).values()]
        wait_until(lambda: self.loop.view().state == "over", "the loop to be over")
        return values

    def wait_step(self, step: int) -> None:
        wait_until(lambda: self.step >= step, f"all ranks to come to step {step}")


@pytest.mark.parametrize("seed", range(3))
def test_a_knob_changes_at_the_same_step_on_all_ranks(procs: ProcMesh, seed: int) -> None:
    chance = random.Random(seed)
    running = Running(procs, WANDER.format(steps=100_000))
    wait_until(lambda: running.loop.view().knobs, "the knobs to be known")
    turned: list[tuple[int, str, Any]] = []
    for turn in range(12):
        if turn in (4, 8):  # at least three steps have different values: the last change is in force
            running.wait_step(turned[-1][0])
        time.sleep(chance.uniform(0, 0.05))  # no synchronization: sets the knob at a random moment
        name, value = chance.choice([("lr", round(chance.random(), 6)), ("mode", chance.choice("abc")), ("on", False)])
        turned.append((running.loop.set(name, value), name, value))
    end = running.loop.stop()
    by_rank = running.values()
    assert by_rank[0] == by_rank[1] == by_rank[2]
    now = {"lr": 0.1, "mode": "a", "on": True}
    expected = []
    for step in range(end):
        now |= {name: value for at, name, value in turned if at == step}
        expected.append((now["lr"], now["mode"], now["on"]))
    assert by_rank[0] == expected
    assert len(set(expected)) >= 3


def test_a_pause_stops_all_ranks_before_the_same_step(procs: ProcMesh) -> None:
    running = Running(procs, WANDER.format(steps=100_000))
    running.wait_step(10)
    before = running.loop.pause()
    wait_until(lambda: running.loop.view().state == "paused", "all ranks to pause, also one that has started late")
    paused_s = 0.5
    time.sleep(paused_s)  # the loop stays paused meanwhile
    assert running.step == before
    running.loop.step()
    running.wait_step(before + 1)
    view = running.loop.view()
    assert view.step_s < paused_s < view.age_s  # the speed is without the pause, the elapsed time is with it
    assert view.left_s is not None
    assert view.left_s / (100_000 - view.step) < paused_s
    running.loop.step(5)
    running.wait_step(before + 6)
    time.sleep(0.2)  # the loop stays paused again
    assert running.step == before + 6
    running.loop.resume()
    running.wait_step(before + 50)
    assert running.loop.view().state == "running"
    end = running.loop.stop()
    assert [len(seen) for seen in running.values()] == [end] * N_RANKS


def test_a_paused_loop_ends_when_it_is_stopped_and_when_it_is_interrupted(procs: ProcMesh) -> None:
    running = Running(procs, WANDER.format(steps=100_000))
    running.wait_step(running.loop.pause())
    assert running.loop.stop() == len(running.values()[0])
    assert running.loop.view().state == "over"

    running = Running(procs, WANDER.format(steps=100_000))
    running.wait_step(running.loop.pause())
    procs.interrupt()
    with pytest.raises(RemoteError, match="KeyboardInterrupt"):
        running.future.get(LONG_S)
    wait_until(lambda: running.loop.view().state == "over", "the loop to be over")
    assert [result.value for result in procs.run_cell("1 + 1", want_value=True).get(LONG_S).values()] == [2] * N_RANKS


def test_what_is_logged_is_reduced_over_ranks(procs: ProcMesh, tmp_path: Path) -> None:
    running = Running(procs, meeting(tmp_path, "    live.log(loss=1 / (step + 1) + rank, samples=10)"))
    running.values()
    view = running.loop.view()
    assert (view.state, view.step, view.steps, view.where) == ("over", 60, 60, "cell [7]")
    (loss,) = view.curves
    assert loss.name == "loss"
    assert loss.by_rank == tuple((rank, pytest.approx(1 / 60 + rank)) for rank in range(N_RANKS))
    assert loss.last == pytest.approx(1 / 60 + 1)
    assert [point.step for point in loss.points] == list(range(60))
    assert loss.points[9].mean == pytest.approx(1 / 10 + 1)
    ((name, rate),) = view.per_s
    assert name == "samples"
    assert 0 < rate < 10 * N_RANKS / 0.015


def test_the_share_of_peak_flops_is_known(procs: ProcMesh) -> None:
    code = """
import time
import numpy as np
live.peak(np.float32(2e9) if rank else 1e9)
for step in live.loop(100):
    live.log(flops=1e6, tokens=7)
    time.sleep(0.002)
"""
    running = Running(procs, code)
    running.values()
    view = running.loop.view()
    rates = dict(view.per_s)
    assert list(rates) == ["flops", "tokens"]
    assert rates["flops"] == pytest.approx(rates["tokens"] / 7 * 1e6)
    assert view.mfu == pytest.approx(rates["flops"] / 5e9)
    assert 0 < rates["flops"] < N_RANKS * 1e6 / 0.002
    assert not view.curves


def test_counts_can_be_logged_in_some_steps_or_several_times_in_one(procs: ProcMesh) -> None:
    # Rates are over a time in which only a few steps end, also on a busy machine.
    code = """
import time
for step in live.loop(40):
    live.log(tokens=5)
    live.log(tokens=5)
    if step % 10 == 0:
        live.log(samples=10)
    live.log(flops=1)
    time.sleep(0.01)
"""
    running = Running(procs, code)
    running.values()
    rates = dict(running.loop.view().per_s)
    assert rates["tokens"] == pytest.approx(10 * rates["flops"])
    assert rates["samples"] == pytest.approx(rates["flops"], rel=0.3)  # some reports include one more of these steps


@pytest.mark.parametrize(
    ("knob", "said"),
    [
        ("3, 1", r"TypeError: live\.knob\(3, \.\.\.\): the name of a knob must be a string"),
        ("'n', float('nan')", r"ValueError: live\.knob\('n', nan\): a knob must be finite; use None for no value"),
        ("'n', 1, low='a'", r"TypeError: live\.knob\('n'\): a bound must be a number, not a str"),
    ],
)
def test_an_invalid_knob_is_refused_where_it_is_defined(procs: ProcMesh, knob: str, said: str) -> None:
    with pytest.raises(RemoteError, match=said):
        procs.run_cell(f"for step in live.loop(2):\n    live.knob({knob})").get(LONG_S)


def test_numbers_of_numpy_are_knobs(procs: ProcMesh) -> None:
    procs.run_cell("import numpy as np\nfor step in live.loop(2):\n    live.knob('n', np.float64(0.5))").get(LONG_S)
    assert [knob.value for knob in procs.loop.view().knobs] == [0.5]


def test_the_number_of_steps_is_an_integer(procs: ProcMesh) -> None:
    running = Running(procs, "import time\nfor step in live.loop(): time.sleep(0.001)\nstep")
    running.loop.pause()
    for wrong in (2.5, "3", True):
        with pytest.raises(TypeError, match="pass a number of steps, such as 10"):
            running.loop.step(wrong)  # type: ignore[arg-type]
    running.loop.stop()
    running.values()


@pytest.mark.parametrize("wrong", ["0", "-1", "float('nan')", "float('inf')", "'989e12'", "True"])
def test_an_invalid_peak_is_refused(procs: ProcMesh, wrong: str) -> None:
    with pytest.raises(RemoteError, match=r"live\.peak\(.*\): pass the device's operations per second"):
        procs.run_cell(f"live.peak({wrong})").get(LONG_S)


def test_loops_are_logged_to_tensorboard(procs: ProcMesh, tmp_path: Path) -> None:
    folder = procs.tensorboard(tmp_path / "runs")
    assert folder == tmp_path / "runs"
    body = "    live.log(loss=step + rank, tokens=10)\n    live.knob('lr', 0.5)"
    Running(procs, meeting(tmp_path / "here", body)).values()
    code = meeting(tmp_path / "here", body)
    second = Running(procs, code)
    wait_until(lambda: scalars(folder / "loop_1", "loss"), "the first steps, while the loop goes on")
    second.values()
    assert procs.tensorboard(None) is None  # this writes all that is known
    Running(procs, code).values()  # this loop is not written
    for loop in range(2):
        assert scalars(folder / f"loop_{loop}", "loss") == [(step, step + 1.0) for step in range(60)]
        speeds = scalars(folder / f"loop_{loop}", "speed/tokens_per_s")
        assert all(0 < speed < N_RANKS * 10 / 0.015 for _, speed in speeds)
        assert {value for _, value in scalars(folder / f"loop_{loop}", "knobs/lr")} == {0.5}
    assert sorted(each.name for each in folder.iterdir()) == ["loop_0", "loop_1"]


def test_tensorboard_refuses_a_slice(procs: ProcMesh, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TensorBoard needs the loops of a whole mesh"):
        procs.slice(gpus=0).tensorboard(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file"):
        procs.tensorboard(tmp_path / "file")


def test_the_others_do_not_wait_for_a_rank_that_dies(session: None) -> None:
    procs = this_host().spawn_procs({"gpus": 2}, device="cpu")
    procs.initialized.get(LONG_S)
    running = Running(procs, WANDER.format(steps=100_000))
    running.wait_step(5)
    os.kill(procs.view().ranks[1].pid, signal.SIGKILL)
    wait_until(lambda: procs.view().ranks[1].state == "dead", "the news of the death")
    running.wait_step(running.step + 300)
    before = running.loop.pause()
    running.wait_step(before)
    running.loop.stop()
    with pytest.raises(SupervisionError) as caught:
        running.future.get(LONG_S)
    (result,) = caught.value.results.values()
    assert len(result.value) == before
    procs.stop(grace_s=0).get(LONG_S)


PREEMPTED = """
import pathlib, time
from monarch_kernel import live
at = -1
def save():
    pathlib.Path({folder!r}, f"rank{{rank}}-step{{at}}").touch()
for at in live.loop(on_preempt=save):
    if at == 0:
        (pathlib.Path({folder!r}).parent / f"in{{rank}}").touch()
    time.sleep(0.002 * (1 + rank))
"""


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    """The directory in which ranks save; each has a file beside it once it is in the loop."""
    folder = tmp_path / "saves"
    folder.mkdir()
    return folder


def wait_in_loop(saves: Path) -> None:
    """Wait until both ranks are in the loop: the loop's step says nothing about a rank that has not come to it."""
    wait_until(lambda: all((saves.parent / f"in{rank}").exists() for rank in range(2)), "both ranks to be in the loop")


def preempt(procs: ProcMesh, rank: int) -> None:
    """Send SIGTERM to a rank, as a scheduler does."""
    wait_until(lambda: procs.view().ranks[rank].pid, "the rank to be up")  # 0 would be the process group of pytest
    os.kill(procs.view().ranks[rank].pid, signal.SIGTERM)


def test_all_ranks_save_before_the_same_step_when_one_is_preempted(session: None, saves: Path) -> None:
    procs = this_host().spawn_procs({"gpus": 2}, device="cpu")
    running = Running(procs, PREEMPTED.format(folder=str(saves)))
    wait_in_loop(saves)
    preempt(procs, 1)
    wait_until(lambda: len(os.listdir(saves)) == 2, "both ranks to save")
    steps = {name.partition("-")[2] for name in os.listdir(saves)}
    assert len(steps) == 1
    wait_until(lambda: procs.view().ranks[1].state == "dead", "the end of the rank")
    assert "killed by SIGTERM (something asked it to end: likely a scheduler" in procs.deaths()[1].message
    running.wait_step(running.step + 10)  # the other continues
    running.loop.stop()
    with pytest.raises(SupervisionError, match="killed by SIGTERM"):
        running.future.get(LONG_S)
    procs.stop(grace_s=0).get(LONG_S)


FAILS_TO_SAVE = PREEMPTED.replace(
    "def save():\n", "def save():\n    if rank == 1: raise ValueError('the disk is full')\n"
)


def test_an_error_of_the_save_is_in_the_last_lines_of_the_rank_that_ends(session: None, saves: Path) -> None:
    procs = this_host().spawn_procs({"gpus": 2}, device="cpu")
    running = Running(procs, FAILS_TO_SAVE.format(folder=str(saves)))
    wait_in_loop(saves)
    preempt(procs, 1)
    wait_until(lambda: procs.view().ranks[1].state == "dead", "the end of the rank")
    last = procs.deaths()[1].last_lines
    assert "on_preempt failed, so the work of this rank was not saved: ValueError('the disk is full')" in last
    running.loop.stop()
    with pytest.raises(SupervisionError, match="killed by SIGTERM"):
        running.future.get(LONG_S)
    procs.stop(grace_s=0).get(LONG_S)


def test_a_stopped_mesh_saves_nothing(session: None, saves: Path) -> None:
    """The agent sends SIGTERM, too, to end ranks that are not needed any more."""
    procs = this_host().spawn_procs({"gpus": 2}, device="cpu")
    running = Running(procs, PREEMPTED.format(folder=str(saves)))
    wait_in_loop(saves)
    procs.stop(grace_s=60).get(30)  # far less than the grace
    assert os.listdir(saves) == []
    with pytest.raises(SupervisionError):
        running.future.get(LONG_S)


# The loop's step is that of the slowest rank in it, so the slow rank is in it before the others.
FAR_SLOWER = """
import pathlib, time
in_loop = pathlib.Path({folder!r}, "in1")
while rank != 1 and not in_loop.exists(): time.sleep(0.001)
for step in live.loop():
    if rank == 1: in_loop.touch()
    time.sleep(1.2 if rank == 1 else 0.001)
"""


def test_a_rank_that_is_far_slower_reports_after_each_step(procs: ProcMesh, tmp_path: Path) -> None:
    running = Running(procs, FAR_SLOWER.format(folder=str(tmp_path)))
    running.wait_step(1)
    assert running.step < 50
    procs.interrupt()
    assert isinstance(running.future.exception(LONG_S), RemoteError)


LOOPS_IN_LOOPS = """
from monarch_kernel import live
found = []
for outer in live.loop(2):
    a = live.knob("a", 1)
    for inner in live.loop(3):
        b = live.knob("b", 2)
        found.append((outer, inner, a, b))
    live.log(outer=outer)
for step in live.loop(5):
    if step == 2:
        break
found, step
"""


def test_loops_in_loops_and_after_loops(procs: ProcMesh) -> None:
    before = {loop.key for loop in procs.loops}
    (value, *others) = [result.value for result in procs.run_cell(LOOPS_IN_LOOPS, want_value=True).get(LONG_S).values()]
    assert value == ([(i, j, 1, 2) for i in range(2) for j in range(3)], 2)
    assert others == [value] * (N_RANKS - 1)
    views = [loop.view() for loop in procs.loops if loop.key not in before]
    assert [(view.state, view.steps, view.step) for view in views] == [
        ("over", 2, 2),
        ("over", 3, 3),
        ("over", 3, 3),
        ("over", 5, 2),
    ]
    assert [knob.name for knob in views[0].knobs] == ["a"]


class Trainer(Actor):
    @endpoint
    def train(self, steps: int) -> list[float]:
        from monarch_kernel import live

        return [live.knob("lr", 0.1) for step in live.loop(steps)]


def test_a_loop_in_an_endpoint(procs: ProcMesh) -> None:
    trainers = procs.spawn("trainer", Trainer)
    values = trainers.train.call(1000).get(LONG_S)
    assert [len(each) for each in values.values()] == [1000] * N_RANKS
    assert "train" in procs.loop.view().where


def test_a_loop_of_a_cell_that_is_over_is_an_error(procs: ProcMesh) -> None:
    procs.run_cell("from monarch_kernel import live\nsteps = live.loop(); next(steps)").get(LONG_S)
    with pytest.raises(RemoteError, match="started in another cell or call, which is over"):
        procs.run_cell("while True: next(steps)").get(LONG_S)


BAD = {
    "live.loop('3')": r"live\.loop\('3'\): steps must be an integer or None",
    "live.loop(-1)": "steps must be 0 or more",
    "live.loop(10**30)": "more steps than a loop can count",
    "[live.knob('k', 5, low=10, high=1) for _ in live.loop(1)]": "low=10 is more than high=1",
    "live.knob('lr', 1)": "works only inside `for step in live.loop",
    "live.log(loss=1)": "works only inside `for step in live.loop",
    "[live.log(loss='x') for _ in live.loop(1)]": r"takes a number or a tensor with one element, not a str",
    "[live.log(loss=torch.ones(2, 3)) for _ in live.loop(1)]": r"not a tensor of shape \[2, 3\]",
    "[live.log(loss=torch.ones((), dtype=torch.complex64)) for _ in live.loop(1)]": "not a tensor of complex numbers",
    "[live.log(loss=torch.ones((), device='meta')) for _ in live.loop(1)]": "on the meta device, which has no value",
    "[live.log(loss=torch.ones(1).to_sparse()) for _ in live.loop(1)]": "not a tensor that is sparse or quantized",
    "[live.log(loss=__import__('numpy').array('x')) for _ in live.loop(1)]": r"not a tensor of shape \[\]",
    "[live.log(loss=None) for _ in live.loop(1)]": "takes a number or a tensor with one element, not a NoneType",
    "[live.log(7) for _ in live.loop(1)]": r"live\.log\(\) takes each thing under its name, not a bare int",
    "[live.log(loss=10**400) for _ in live.loop(1)]": r"loss=\.\.\.\): the integer is too large for a float",
    "[live.log(tokens=-7) for _ in live.loop(1)]": r"tokens=-7\): the count of this rank in this step must be 0 or more",
    "[live.knob('k', [1]) for _ in live.loop(1)]": r"must be a number, string, bool or None, not a list",
    "[live.knob('k', 1, low=float('nan')) for _ in live.loop(1)]": "a bound must be finite, not nan",
    "[live.knob('k', 1.0, low=2.0) for _ in live.loop(1)]": "live.knob\\('k'\\) is 1, but must be at least 2",
    "[live.knob('k', 'x', low=2.0) for _ in live.loop(1)]": "only a number can have bounds",
    "[live.knob('', 1) for _ in live.loop(1)]": "a knob needs a name",
}


@pytest.mark.parametrize("code", BAD)
def test_invalid_input_is_refused_with_the_reason(procs: ProcMesh, code: str) -> None:
    with pytest.raises(RemoteError, match=BAD[code]):
        procs.run_cell(f"import torch\nfrom monarch_kernel import live\n{code}").get(LONG_S)


def test_tensors_are_logged(procs: ProcMesh) -> None:
    code = """
import time, torch
from monarch_kernel import live
for step in live.loop(60):
    time.sleep(0.005)
    weight = torch.tensor(float(step), requires_grad=True)
    live.log(a=weight * 2, b=torch.ones(1, 1, dtype=torch.int64), c=weight.detach().numpy(), d=True)
"""
    procs.run_cell(code).get(LONG_S)
    curves = {curve.name: curve for curve in procs.loop.view().curves}
    assert [point.step for point in curves["a"].points] == list(range(60))
    assert [point.mean for point in curves["a"].points] == [2.0 * step for step in range(60)]
    assert (curves["b"].last, curves["c"].last, curves["d"].last) == (1, 59, 1)


def test_a_nan_is_shown(procs: ProcMesh) -> None:
    code = "for step in live.loop(3): live.log(loss=float('nan') if step == 2 and rank == 1 else 1.0)"
    procs.run_cell(code).get(LONG_S)
    (loss,) = procs.loop.view().curves
    assert math.isnan(loss.last)
    assert [math.isnan(last) for _, last in loss.by_rank] == [False, True, False]
    assert [point.mean for point in loss.points] == [1, 1, 1]


def test_a_finished_loop_can_be_viewed_but_not_controlled(procs: ProcMesh) -> None:
    running = Running(procs, WANDER.format(steps=5))
    running.values()
    wait_until(lambda: running.loop.view().state == "over", "the loop to be over")
    for do in (running.loop.pause, running.loop.resume, running.loop.step, running.loop.stop):
        with pytest.raises(RuntimeError, match=r"the loop of .* is over, after 5 steps"):
            do()
    assert "over, step 5 of 5" in repr(running.loop)


def test_an_unknown_knob_is_refused(procs: ProcMesh) -> None:
    running = Running(procs, WANDER.format(steps=100_000))
    running.wait_step(3)
    with pytest.raises(LookupError, match=r"no rank has called live.knob\('lrr'\); knobs: lr, mode, on"):
        running.loop.set("lrr", 1)
    with pytest.raises(ValueError, match="1 steps|can't run 0 steps"):
        running.loop.step(0)
    running.loop.stop()
    running.values()


def test_a_loop_without_ranks_counts_steps() -> None:
    code = """
from monarch_kernel import live
print([(step, live.knob("lr", 0.5)) for step in live.loop(2)], live.log(loss=1))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[(0, 0.5), (1, 0.5)] None\n"
