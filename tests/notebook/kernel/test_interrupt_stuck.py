"""Ranks that do not stop at an interrupt: the error names them and their current lines, and other cells don't wait for them."""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.notebook.kernel.subshells import in_control, send_to
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Cell, Notebook
    from tests.support.timing import Bar

pytestmark = pytest.mark.timeout(120)

BOUND_S = 2.5  # the documented limit is 2 s, on an idle machine
GO = "print('go', flush=True)\n"
REDUCE = "import torch, torch.distributed as dist\nx = torch.ones(1); dist.all_reduce(x); x.item()"


def start(notebook: Notebook, code: str, selector: str = "t", n: int = 2) -> Cell:
    """Run a cell until n ranks have printed "go"."""
    cell = notebook.send(f"%%remote {selector}\n{code}")
    return cell.wait_for(lambda cell: sum("go" in line for line in cell.lines().values()) == n or cell.reply)


@pytest.fixture
def interrupted(bar: Bar) -> Callable[..., Cell]:
    """Interrupt a cell, and check that it ends with the right error."""

    def interrupt(notebook: Notebook, cell: Cell) -> Cell:
        assert not cell.reply, cell.text
        with bar.below(BOUND_S, "the interrupt"):
            notebook.interrupt()
            cell.wait()
        assert (cell.reply["status"], cell.ename) == ("error", "RemoteInterrupt")
        return cell

    return interrupt


def until(notebook: Notebook, code: str, condition: Callable[[str], object]) -> str:
    """Run a local cell until its output meets a condition."""
    said: list[str] = []

    def fits() -> object:
        said[:] = [notebook.ok(code).stdout]
        return condition(said[0])

    wait_until(fits, f"what {code} prints")
    return said[0]


def states(notebook: Notebook) -> list[str]:
    return list(notebook.value("[rank.state for rank in t.view().ranks]"))


def stubborn(flag: Path, condition: str = "True") -> str:
    """Give code that catches every KeyboardInterrupt until a file exists; ranks that do not meet the condition end at once."""
    return (
        "import os, time\n"
        "def hold_out():\n"
        "    while True:\n"
        "        try:\n"
        f"            while not os.path.exists({str(flag)!r}): time.sleep(0.01)\n"
        "            return\n"
        "        except KeyboardInterrupt: pass\n"
        f"{GO}if {condition}: hold_out()\n"
        "ended = True"
    )


# -- code that stops

STOPS = {
    "ignores SIGINT, sleeps": "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nGOtime.sleep(600)",
    "ignores SIGINT, computes": "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nGOwhile True: pass",
    "default SIGINT": "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\nGOtime.sleep(600)",
    "own handler": (
        "import signal, time\ndef stop(*_): raise KeyboardInterrupt\nsignal.signal(signal.SIGINT, stop)\nGOtime.sleep(600)"
    ),
    "event": "import threading\nGOthreading.Event().wait()",
    "queue": "import queue\nGOqueue.Queue().get()",
    "child": "import subprocess\nGOsubprocess.run(['sleep', '600'])",
    "separate group": (
        "import time, torch.distributed as dist\ngroup = dist.new_group([0, 1])\n"
        "GOtime.sleep(600) if rank else dist.barrier(group=group)"
    ),
    "data loader": (
        "import time, torch\nclass Slow(torch.utils.data.Dataset):\n    def __len__(self): return 1000\n"
        "    def __getitem__(self, i): print('go', flush=True); time.sleep(1); return i\n"
        "loader = torch.utils.data.DataLoader(Slow(), num_workers=2)\nfor batch in loader: pass"
    ),
}


@pytest.mark.parametrize("code", STOPS.values(), ids=STOPS.keys())
def test_code_that_an_interrupt_stops(notebook: Notebook, code: str, interrupted: Callable[..., Cell]) -> None:
    pids = notebook.pids()
    state = f"state = {len(code)}\n"
    cell = interrupted(notebook, start(notebook, state + code.replace("GO", GO)))
    assert cell.evalue.splitlines()[0] == "interrupted on [0-1]; their state is kept"
    assert notebook.ok(f"%%remote\nassert state == {len(code)}\n{REDUCE}").plain == "[0-1] 2.0"
    assert notebook.pids() == pids


def test_an_interrupt_reaches_the_workers_of_a_loader_that_it_ends(
    notebook: Notebook, tmp_path: Path, interrupted: Callable[..., Cell]
) -> None:
    """Else torch waits five seconds for each of them, and the next cell for torch."""
    code = f"""
import pathlib, time, torch
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        print("go", flush=True)
        try: time.sleep(600)
        except KeyboardInterrupt:
            (pathlib.Path({str(tmp_path)!r}) / f"{{rank}} {{i}}").touch()
            raise
for batch in torch.utils.data.DataLoader(Slow(), num_workers=1): pass
"""
    interrupted(notebook, start(notebook, code))
    assert notebook.ok("%%remote\nrank").plain == "[0] 0\n[1] 1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0 0", "1 0"]


IMPORTS_THEN_WAITS = """
import threading, torch, torch.distributed as dist
from monarch_kernel.train.process_group.worker import RankGroup
looked, pending_s = threading.Event(), RankGroup.pending_s
def note(group, *others):
    found = pending_s(group, *others)
    looked.set()
    return found
RankGroup.pending_s = note
print("go", flush=True)
looked.wait()
RankGroup.pending_s = pending_s
dist.all_reduce(torch.ones(1))
"""


def test_a_collective_that_begins_after_the_rank_has_looked_for_one(
    notebook: Notebook, tmp_path: Path, interrupted: Callable[..., Cell]
) -> None:
    """As in `DistributedDataParallel(...)` on a new rank: its import of a part of torch is not interrupted."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "imports_then_waits.py").write_text(IMPORTS_THEN_WAITS)
    pids = notebook.pids()
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\ntry: import imports_then_waits\nfinally: sys.path.pop(0)"
    cell = interrupted(notebook, start(notebook, code, "t[1]", 1))
    assert cell.evalue.splitlines()[0] == "interrupted on [1]; its state is kept"
    assert notebook.ok(f"%%remote\n{REDUCE}").plain == "[0-1] 2.0"
    assert notebook.pids() == pids


def test_a_collective_that_an_interrupted_cell_has_started_and_not_awaited(
    notebook: Notebook, interrupted: Callable[..., Cell]
) -> None:
    """The other rank has not started it; with the group that there was, the next collectives would not match."""
    pids = notebook.pids()
    code = f"import time, torch, torch.distributed as dist\nwork = dist.all_reduce(torch.ones(1), async_op=True)\n{GO}"
    cell = interrupted(notebook, start(notebook, f"{code}while True: time.sleep(0.01)", "t[1]", 1))
    assert cell.evalue.splitlines()[0] == "interrupted on [1]; its state is kept"
    assert notebook.ok(f"%%remote\n{REDUCE}").plain == "[0-1] 2.0"
    assert notebook.pids() == pids


def test_many_interrupts_at_once_count_as_one(notebook: Notebook) -> None:
    pids = notebook.pids()
    cell = start(notebook, "try:\n    print('go', flush=True)\n    while True: pass\nfinally: tidy = 'up'")
    for _ in range(8):
        notebook.interrupt()
    cell.wait()
    assert cell.evalue == "interrupted on [0-1]; their state is kept"
    assert notebook.ok(f"%%remote\nassert tidy == 'up'\n{REDUCE}").plain == "[0-1] 2.0"
    assert notebook.pids() == pids


# -- code that does not stop


def test_a_rank_that_catches_interrupts(
    notebook: Notebook, tmp_path: Path, bar: Bar, interrupted: Callable[..., Cell]
) -> None:
    pids = notebook.pids()
    cell = interrupted(notebook, start(notebook, stubborn(tmp_path / "flag", "rank == 1")))
    first, place, caller, *advice = cell.evalue.split("\n")
    within = re.fullmatch(r"interrupted; \[0\] had finished; \[1\] did not stop within (\d+\.\d) s", first)
    assert within, first
    bar.check(float(within[1]), 2.0, "the wait for rank 1")
    number = re.fullmatch(r"  \[1\] (cell \[\d+\]), line [4-7], in hold_out: .*", place)
    assert number
    assert caller == f"      called from {number[1]}, line 10: if rank == 1: hold_out()"
    assert any("%mesh interrupt t[1] --abort" in line for line in advice)
    assert any("%mesh restart t[1] replaces it" in line for line in advice)
    # The other rank is free; tables and stacks show the rank that is not.
    assert notebook.ok("%%remote t[0]\nrank").plain == "[0] 0"
    assert f"[1] {number[1]}, line " in notebook.ok("%mesh stacks t").stdout
    assert states(notebook) == ["idle", "running"]
    # A cell on both ranks waits, and can be interrupted.
    queued = notebook.send("%%remote\nqueued = True")
    queued.wait_for(lambda cell: cell.messages or time.monotonic() > cell.sent_at + 0.3)
    with bar.below(2, "the interrupt"):
        notebook.interrupt()
        queued.wait()
    assert queued.ename == "RemoteInterrupt"
    assert f"interrupted while it waited for {number[1]}; it was not sent. " in queued.evalue
    assert f"  [1] {number[1]}, line " in queued.evalue
    # The late end of the first cell disturbs no other cell.
    (tmp_path / "flag").touch()
    assert notebook.ok(f"%%remote\nassert ended and 'queued' not in globals()\n{REDUCE}").plain == "[0-1] 2.0"
    assert notebook.pids() == pids


def test_a_second_interrupt_aborts_process_groups(notebook: Notebook, tmp_path: Path, bar: Bar) -> None:
    cell = start(notebook, f"import torch.distributed as dist\nold = dist.group.WORLD\n{stubborn(tmp_path / 'flag')}")
    with bar.below(2, "the first interrupt, and another half a second later"):
        pressed_at = time.monotonic()
        notebook.interrupt()
        while time.monotonic() < pressed_at + 0.5:  # a second interrupt right after the first has no effect
            notebook.pump(0.02)
        assert not cell.reply
        notebook.interrupt()
        cell.wait()
    assert "[0-1] did not stop within " in cell.evalue
    assert "Their process groups were aborted; the mesh forms its group again before the next cell." in cell.evalue
    (tmp_path / "flag").touch()
    assert notebook.ok(f"%%remote\nassert dist.group.WORLD is not old\n{REDUCE}").plain == "[0-1] 2.0"


def test_an_abort_overrides_a_user_handler(notebook: Notebook, interrupted: Callable[..., Cell]) -> None:
    pids = notebook.pids()
    deaf = "import signal, time\ncalls = []\nsignal.signal(signal.SIGINT, lambda *_: calls.append(1))\n"
    cell = interrupted(notebook, start(notebook, f"{deaf}{GO}time.sleep(600)"))
    assert "[0-1] did not stop" in cell.evalue
    assert re.search(r"\[0-1\] cell \[\d+\], line 6: time.sleep\(600\)", cell.evalue)
    said = notebook.ok("%mesh interrupt t --abort").stdout
    assert re.fullmatch(r"t: interrupted cell \[\d+\] on \[0-1\]; their state is kept\n", said)
    assert notebook.ok(f"%%remote\nassert calls == [1]\n{REDUCE}").plain == "[0-1] 2.0"
    assert notebook.pids() == pids


def test_native_code_that_holds_the_gil(notebook: Notebook, interrupted: Callable[..., Cell]) -> None:
    code = f"import ctypes\n{GO}ctypes.PyDLL(None).system(b'sleep 4') if rank else None"
    cell = interrupted(notebook, start(notebook, code))
    assert "; [0] had finished; [1] did not stop" in cell.evalue
    line = r"\[1\] cell \[\d+\], line \d+\n +its collectives are not known: it does not answer: native code that holds the GIL"
    assert re.search(line, cell.evalue)
    assert re.search(line, notebook.ok("%mesh stacks t[1]").stdout)
    assert notebook.ok(f"%%remote\n{REDUCE}", 30).plain == "[0-1] 2.0"


# -- %mesh interrupt


def test_interrupt_of_an_idle_mesh(notebook: Notebook) -> None:
    notebook.ok(f"%%remote\n{REDUCE}")
    for written in ("t", "t --abort"):
        assert notebook.ok(f"%mesh interrupt {written}").stdout == "t: nothing runs on [0-1]\n"
    assert notebook.ok("%mesh interrupt t[1]").stdout == "t: nothing runs on [1]\n"
    assert notebook.ok(f"%%remote\n{REDUCE}").plain == "[0-1] 2.0"
    assert notebook.run("%mesh interrupt nope").evalue == "%mesh interrupt: there is no mesh 'nope'; available: t"
    assert notebook.run("%mesh interrupt").evalue == "%mesh interrupt: name a mesh (t)"
    assert "out of range" in notebook.run("%mesh interrupt t[7]").evalue


def test_interrupt_of_a_slice(notebook: Notebook) -> None:
    code = "import time; time.sleep(600)"
    notebook.ok(f"runs = t.run({code!r})")
    until(notebook, "print([rank.activity for rank in t.view().ranks])", lambda said: said == "['code', 'code']\n")
    notebook.ok("half = t[1:]")
    assert notebook.ok("%mesh interrupt half").stdout == "t: interrupted code on [1]; its state is kept\n"
    assert states(notebook) == ["running", "idle"]
    assert notebook.ok("%mesh interrupt t[0]").stdout == "t: interrupted code on [0]; its state is kept\n"
    assert notebook.run("runs.get()").ename == "RemoteError"


def test_interrupt_of_cells_in_the_background(notebook: Notebook) -> None:
    first = notebook.ok("%%remote --background --out a\nimport time; time.sleep(600)")
    notebook.ok("%%remote --background --out b\nimport time; time.sleep(600)")
    said = notebook.ok("%mesh interrupt t").stdout.splitlines()
    assert re.fullmatch(r"t: interrupted cell \[\d+\] on \[0-1\]; their state is kept", said[0]), first.text
    assert re.fullmatch(r"t: cell \[\d+\], which waited for its turn, will not be sent", said[1])
    for name in "ab":
        assert notebook.run(f"{name}.result()").ename == "RemoteInterrupt"
    assert notebook.ok("%%remote\nrank").plain == "[0] 0\n[1] 1"


# -- other waits for ranks


def test_interrupt_of_a_pull(notebook: Notebook, interrupted: Callable[..., Cell]) -> None:
    slow = "class Slow:\n    def __reduce__(self): print('go', flush=True); time.sleep(600)\n"
    cell = notebook.ok(f"%%remote\nimport time\n{slow}slow, fast = Slow(), 7")
    pull = notebook.send("t['slow']")
    cell.wait_for(lambda cell: "go" in cell.stdout)  # output outside any cell goes to the cell before
    assert "so is what the ranks run for it" in interrupted(notebook, pull).evalue
    assert notebook.value("t['fast'].values()") == (7, 7)


def test_an_async_endpoint_that_blocks_its_thread_goes_on(notebook: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    notebook.ok(
        "import os, time\nfrom monarch_kernel.actor import Actor, endpoint\nclass Holder(Actor):\n    @endpoint\n"
        "    async def hold(self, path):\n        print('go', flush=True)\n"
        "        while not os.path.exists(path): time.sleep(0.01)\n        return 5\nholder = t.spawn('holder', Holder)"
    )
    cell = notebook.send(f"holder.hold.call({str(gate)!r}).get()")
    cell.wait_for(lambda cell: cell.stdout.count("go") == 2 or "[0-1]" in cell.stdout)
    notebook.interrupt()
    assert cell.wait().ename == "RemoteInterrupt"
    assert cell.evalue.startswith("the wait for holder.hold was interrupted; [0"), cell.evalue
    assert "with holder.hold until " in cell.evalue
    gate.touch()
    assert notebook.value(f"holder.hold.call({str(gate)!r}).get().values()") == (5, 5)


def test_interrupt_of_a_wait_for_a_stream(notebook: Notebook, interrupted: Callable[..., Cell]) -> None:
    notebook.ok(
        "import time\nfrom monarch_kernel.actor import Actor, endpoint\nclass Long(Actor):\n    @endpoint\n"
        "    def nap(self): print('go', flush=True); [time.sleep(0.1) for _ in range(6000)]\n"
        "    @endpoint\n    def one(self): return 1\nlong = t.spawn('long', Long)"
    )
    cell = notebook.send("for future in long.nap.stream(): pass")
    cell.wait_for(lambda cell: "go" in cell.stdout)
    assert "so is what the ranks run for it" in interrupted(notebook, cell).evalue
    assert notebook.value("long.one.call().get().values()") == (1, 1)


@pytest.mark.parametrize("kind", ["async def", "def"])
def test_interrupt_of_a_call(notebook: Notebook, kind: str, interrupted: Callable[..., Cell]) -> None:
    nap = "await asyncio.sleep(600)" if kind == "async def" else "[time.sleep(0.1) for _ in range(6000)]"
    notebook.ok(
        "import asyncio, time\nfrom monarch_kernel.actor import Actor, endpoint\nclass Napper(Actor):\n"
        f"    @endpoint\n    {kind} nap(self): print('go', flush=True); {nap}\n    @endpoint\n    {kind} one(self): return 1\n"
        "nappers = t.spawn('nappers', Napper)\nassert nappers.one.call().get()"
    )
    cell = notebook.send("nappers.nap.call().get()")
    interrupted(notebook, cell.wait_for(lambda cell: "go" in cell.stdout))
    assert notebook.value("nappers.one.call().get().values()") == (1, 1)
    notebook.ok("later = nappers.nap.call()")
    said = until(notebook, "%mesh stacks", lambda said: "[0-1] actor nappers: " in said)
    assert re.search(r"notebook cell \[\d+\], line 5, in nap: (async )?def nap\(self\): ", said)
    said = notebook.ok("%mesh interrupt t").stdout
    assert "t: interrupted nappers.nap on [0-1]; their state is kept\n" in said
    assert notebook.value("nappers.one.call().get().values()") == (1, 1)


def test_interrupt_while_a_mesh_comes_up(bare: Notebook, interrupted: Callable[..., Cell]) -> None:
    wait_until(lambda: bare.zygotes(), "the zygote that ranks are forked from")
    (zygote,) = bare.zygotes()
    zygote.suspend()  # no rank starts until it continues
    try:
        cell = bare.send("%mesh up u -n 2 --device cpu")
        cell.wait_for(lambda cell: "waiting for ranks" in cell.plain or cell.reply)
        interrupted(bare, cell)
    finally:
        zygote.resume()
    assert "'u'" not in bare.run("%mesh").stdout
    bare.ok("%mesh up u -n 2 --device cpu", 60)
    assert bare.ok(f"%%remote\n{REDUCE}").plain == "[0-1] 2.0"


def test_interrupt_while_the_process_group_is_formed(bare: Notebook, interrupted: Callable[..., Cell]) -> None:
    bare.up(2)
    subshell = str(in_control(bare, "create_subshell_request")["subshell_id"])
    bare.ok("busy = t[1].run('import time; time.sleep(600)')")
    cell = bare.send("%%remote\nrank")
    look = "[rank.activity for rank in t.view().ranks]"
    forming = "['forming the process group', 'code']"
    wait_until(lambda: send_to(bare, subshell, look).wait().plain == forming, forming)
    interrupted(bare, cell)
    assert "while the process group was forming; the cell was not sent" in cell.evalue
    assert bare.run("%mesh interrupt t").ok
    assert bare.ok(f"%%remote\n{REDUCE}").plain == "[0-1] 2.0"


def test_interrupt_leaves_calls_that_the_notebook_does_not_wait_for(notebook: Notebook, tmp_path: Path) -> None:
    awake = tmp_path / "awake"
    notebook.ok(
        "from monarch_kernel.actor import Actor, endpoint\nclass Naps(Actor):\n    @endpoint\n    def nap(self):\n"
        f"        import os, time\n        while not os.path.exists({str(awake)!r}):\n            time.sleep(0.01)\n"
        "naps = t.slice(gpus=1).spawn('naps', Naps)\nnaps.nap.broadcast()"
    )
    until(notebook, "%mesh stacks t", lambda said: "time.sleep(0.01)" in said)
    said = notebook.ok("%mesh interrupt t").stdout
    assert (
        "t: nothing was interrupted, because the notebook waits for nothing there; actors work for other callers"
        in said
    )
    assert "[1] actor naps: notebook cell [" in said
    awake.touch()
    notebook.ok("naps.stop().get()")
    assert notebook.ok("%mesh interrupt t").stdout == "t: nothing runs on [0-1]\n"


# -- %mesh stacks


def test_stacks(notebook: Notebook) -> None:
    assert notebook.ok("%mesh stacks").stdout == "t: nothing runs on [0-1]\n"
    notebook.ok(f"%%remote\n{REDUCE}")
    code = "import time\ndef late(): time.sleep(600)\n\nif rank: late()\ndist.all_reduce(torch.ones(2, 3))"
    notebook.ok(f"%%remote --background\n{code}")
    said = until(notebook, "%mesh stacks t", lambda said: "waits in" in said and "in late" in said)
    number = re.search(r"cell \[\d+\]", said)
    assert number
    assert re.sub(r"\d+\.\d s", "S", re.sub(r"#\d+", "#N", said)).replace(number[0], "CELL").splitlines() == [
        "t: 2 ranks, 2 busy",
        "[0] CELL, line 6: dist.all_reduce(torch.ones(2, 3))",
        "    waits in all_reduce #N (shape 2x3) for S",
        "    [1] has not started it",
        "[1] CELL, line 3, in late: def late(): time.sleep(600)",
        "    called from CELL, line 5: if rank: late()",
    ]
    assert notebook.ok("%mesh stacks t[1]").stdout.startswith("t: 1 rank, 1 busy\n[1] ")
    notebook.ok("%mesh interrupt t")
    assert notebook.ok("%mesh stacks t").stdout == "t: nothing runs on [0-1]\n"


# -- at any moment


def test_interrupts_at_any_moment(notebook: Notebook, bar: Bar) -> None:
    rng = random.Random(3)
    tries = 30 if bar.is_asserted else 10
    pids, times = notebook.pids(), []
    notebook.ok("%%remote\nn = done = 0")
    for _ in range(tries):
        cell = start(notebook, f"{GO}while True: n += 1")
        until = time.monotonic() + rng.uniform(0, 0.1)
        while time.monotonic() < until:
            notebook.pump(0.002)
        begin = time.monotonic()
        notebook.interrupt()
        cell.wait()
        assert cell.evalue == "interrupted on [0-1]; their state is kept"
        times.append(cell.replied_at - begin)
        assert notebook.ok("%%remote\ndone += 1; n > 0").plain == "[0-1] True"
    assert notebook.ok("%%remote\ndone").plain == f"[0-1] {tries}"
    assert notebook.pids() == pids
    bar.check(statistics.median(times), 0.5, "an interrupt, the median")
    bar.check(max(times), 2.0, "an interrupt, the longest")
