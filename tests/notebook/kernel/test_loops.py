"""Live loops are controlled by ``%mesh loop``, by the program and by pages, even while a cell runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebook.kernel.conftest import Notebook
from tests.notebook.kernel.pages import Page
from tests.support.waiting import wait_until

TRAINS = """
import time
seen = []
for step in live.loop(100_000):
    seen.append((live.knob("lr", 0.1, low=0.0, high=1.0), live.knob("mode", "a")))
    live.log(loss=1 / (step + 1), tokens=32)
    time.sleep(0.002 * (1 + rank))
len(seen), seen[-1]
"""


@pytest.fixture
def running(notebook: Notebook) -> Notebook:
    """A notebook with a loop in the background that all ranks have entered."""
    notebook.ok("earlier = {loop.key for loop in t.loops}")
    notebook.ok(f"%%remote t --background --out done\n{TRAINS}")
    started = "[loop.view().step > 5 for loop in t.loops if loop.key not in earlier]"
    wait_until(lambda: notebook.value(started) == [True], "the loop to start")
    return notebook


def ended(notebook: Notebook) -> tuple[int, tuple[float, str]]:
    """Wait for the end of the loop; gives the number of steps of all ranks, and the knobs in the last step."""
    wait_until(lambda: notebook.value("t.loop.view().state == 'over'"), "the loop to be over")
    wait_until(lambda: notebook.value("'done' in globals()"), "the cell to be over")
    values = notebook.value("list(getattr(done, 'result', lambda: done)().values())")
    notebook.ok("del done")
    assert values[0] == values[1]
    count, last = values[0]
    return count, last


def test_magics_control_a_live_loop(running: Notebook) -> None:
    text = running.ok("%mesh loop").stdout
    number = running.value("get_ipython().execution_count")
    assert re.fullmatch(
        r"loop in cell \[\d+\]: ▶ running, step \d+ of 100,000, [\d.]+ s elapsed, [\w ]+ left; "
        r"[\d.]+ ms a step, [\d.,]+ steps/s, [\d,]+ tokens/s; "
        r"loss [\d.]+; lr=0.1; mode='a'\n",
        text,
    ), (text, number)
    found = re.fullmatch(r"all ranks pause before step ([\d,]+)\n", running.ok("%mesh loop pause").stdout)
    assert found
    before = int(found[1].replace(",", ""))
    wait_until(lambda: running.value("t.loop.view().step") == before, "all ranks to pause")
    assert "❚❚ paused" in running.ok("%mesh loop t").stdout
    assert running.ok("%mesh loop t step 3").stdout == "3 steps more\n"
    wait_until(lambda: running.value("t.loop.view().step") == before + 3, "the steps to be done")
    said = running.ok("%mesh loop lr=1e-2 mode=b").stdout
    assert said == f"lr is 0.01 from step {before + 3:,} on\nmode is 'b' from step {before + 3:,} on\n"
    assert running.ok("%mesh loop resume").stdout == "the loop continues\n"
    found = re.fullmatch(r"the loop ends before step ([\d,]+)\n", running.ok("%mesh loop stop").stdout)
    assert found
    assert ended(running) == (int(found[1].replace(",", "")), (0.01, "b"))
    assert "■ over" in running.ok("%mesh loop").stdout


HANGS = """
import os, time
for step in live.loop(25_000):
    while step == 20_001 and not os.path.exists({path!r}):
        time.sleep(0.02)
"""


def test_the_step_is_shown_in_which_ranks_hang(notebook: Notebook, tmp_path: Path) -> None:
    """Ranks report steps as short as these only now and then."""
    path = tmp_path / "go on"
    notebook.ok(f"%%remote t --background --out gone_on\n{HANGS.format(path=str(path))}")
    try:
        wait_until(lambda: notebook.value("[loop.view().step for loop in t.loops[-1:]]") == [20_001], "the step")
        assert "▶ running, step 20,001 of 25,000" in notebook.ok("%mesh loop t").stdout
    finally:
        path.touch()
    wait_until(lambda: notebook.value("t.loop.view().state == 'over'"), "the loop to be over")
    assert notebook.value("t.loop.view().step") == 25_000
    notebook.ok("gone_on.result() if hasattr(gone_on, 'result') else None\ndel gone_on")


MISUSES = {
    "%mesh loop t go": "'go' is neither one of pause, resume, step, stop nor KNOB=VALUE",
    "%mesh loop step 0": "step takes a number of steps, such as 10, not '0'",
    "%mesh loop pause now": "pause takes no argument, not 'now'",
    "%mesh loop lr=2": "knob 'lr' is at least 0 and at most 1, not 2",
    "%mesh loop lr=x": "knob 'lr' is a number, not 'x'",
    "%mesh loop lrr=1": "no rank has called live.knob('lrr'); knobs: lr, mode",
    "%mesh loop u": "'u' is neither a mesh (t) nor one of pause, resume, step, stop, nor KNOB=VALUE",
    "%mesh loop stepp": "did you mean step?",
    "%mesh rollback abc": "'abc' is neither a mesh (t) nor a step, such as 40",
}


def test_usage_errors_are_one_line(running: Notebook) -> None:
    for line, said in MISUSES.items():
        cell = running.run(line)
        assert (cell.reply["status"], cell.ename) == ("error", "UsageError"), line
        assert said in cell.evalue
        assert "\n" not in cell.evalue
    running.ok("t.loop.stop()")
    ended(running)
    cell = running.run("%mesh loop pause")
    assert "is over, after" in cell.evalue


def test_a_mesh_without_a_loop_shows_how_to_start_one(notebook: Notebook) -> None:
    notebook.ok("%mesh up u -n 1 --device cpu")
    assert "no rank of u has started a loop: for step in live.loop(...)" in notebook.run("%mesh loop u").evalue
    notebook.ok("%mesh down u")


def test_a_page_shows_and_controls_a_live_loop_while_a_cell_runs(notebook: Notebook) -> None:
    page = Page(notebook)
    cell = notebook.send(f"%%remote t --out done\n{TRAINS}")
    page.wait(lambda: any(loop["state"] == "running" and loop.get("step") for loop in page.mesh().get("loops", ())))

    def loop() -> dict[str, object]:
        return dict(page.mesh()["loops"][-1])

    key = [loop()["request"], loop()["number"]]
    assert loop()["steps"] == 100_000
    page.wait(lambda: len(page.curves["t"][-1]["curves"].get("loss", [[]])[0]) > 50)
    first = page.curves["t"][-1]["curves"]["loss"][1][0]  # the mean of one step, or of 2, 4, 8 after many steps
    assert first in [pytest.approx(sum(1 / (i + 1) for i in range(n)) / n) for n in (1, 2, 4, 8, 16, 32)]
    reply = page.ask("set", loop=key, knob="lr", value=0.5)
    assert reply["ok"], reply
    assert re.fullmatch(r"lr is 0.5 from step [\d,]+ on", reply["text"])
    page.wait(lambda: {"name": "lr", "value": 0.5, "low": 0.0, "high": 1.0} in loop()["knobs"])  # type: ignore[operator]
    assert "all ranks pause" in page.ask("pause", loop=key)["text"]
    page.wait(lambda: loop()["state"] == "paused")
    at = loop()["step"]
    assert page.ask("step", loop=key)["ok"]
    page.wait(lambda: loop()["step"] > at)  # type: ignore[operator]
    assert page.ask("resume", loop=key)["text"] == "the loop continues"
    assert page.ask("set", loop=key, knob="lr", value=7)["text"] == "knob 'lr' is at least 0 and at most 1, not 7"
    assert page.ask("set", loop=key, knob="no", value=7)["text"].startswith("no rank has called live.knob('no')")
    for bad in (
        {"loop": 5},
        {"loop": [1]},
        {"loop": key, "knob": 5},
        {"loop": key, "value": [1]},
        {"loop": key, "count": "x"},
    ):
        assert not page.ask("set", **bad)["ok"]
    assert page.ask("pause", loop=[0, 0])["text"] == "the loop is over"
    assert not cell.reply
    assert page.ask("stop", loop=key)["ok"]
    cell.wait()
    assert cell.reply["status"] == "ok"
    page.wait(lambda: loop()["state"] == "over")
    assert ended(notebook)[1] == (0.5, "a")
    late = Page(notebook)
    late.wait(lambda: late.curves)
    assert len(late.curves["t"][-1]["curves"]["loss"][0]) > 50


def test_the_table_shows_the_progress_of_a_loop(running: Notebook) -> None:
    shown = running.ok("%mesh show t")
    assert re.search(r"loop in cell \[\d+\]: ▶ running, step", shown.plain)
    running.ok("t.loop.stop()")
    ended(running)


def test_an_interrupt_ends_a_paused_loop(notebook: Notebook) -> None:
    cell = notebook.send(f"%%remote t\n{TRAINS}")
    page = Page(notebook)
    page.wait(lambda: any(loop["state"] == "running" for loop in page.mesh().get("loops", ())))
    loop = page.mesh()["loops"][-1]
    page.ask("pause", loop=[loop["request"], loop["number"]])
    notebook.interrupt()
    assert cell.wait().ename == "RemoteInterrupt"
    assert notebook.value("t.loop.view().state") == "over"
    assert notebook.ok("%remote t 1 + 1").plain


def test_what_goes_wrong_is_said_once_below_the_cell(notebook: Notebook) -> None:
    cell = notebook.ok(
        "%%remote t\nimport time\nfor step in live.loop(400, on_nan='stop'):\n    time.sleep(0.002)\n"
        "    live.log(loss=float('nan') if rank and step > 20 else 1.0)"
    )
    assert cell.stderr.count("live loop: ") == 1
    assert "live loop: loss is nan in step 21, first on [1]. " in cell.stderr
    assert "The loop stops (on_nan)." in cell.stderr
    assert (
        "live.loop(on_spike='halt'): pass 'stop', 'rollback', 'skip', or a function"
        in notebook.run("%remote t live.loop(3, on_spike='halt')").error
    )
