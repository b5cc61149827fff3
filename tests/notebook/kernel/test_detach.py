"""Detached meshes: they keep running when their kernel restarts or is killed, and another kernel attaches them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.notebook.kernel.conftest import START_S, Notebook
from tests.support.processes import assert_gone, has_ended, tree
from tests.support.waiting import wait_until

UP = "%mesh up t -n 2 --device cpu --detach"
COUNT = """\
%%remote t{options}
import time
for count in range(100_000):
    print("count", count)
    time.sleep(0.05)
"""
WAITS = """\
%%remote t --background
import os, time
print("waits")
while not os.path.exists({path!r}):
    time.sleep(0.01)
from IPython.display import HTML, display
display(HTML(f"<b>shown by {{rank}}</b>"))
if rank == 1:
    print("about to fail")
    raise ValueError("too late")
"the value"
"""
REDUCES = """\
%%remote t --background
import os, time, torch
total = torch.ones(1)
while rank == 0 and not os.path.exists({path!r}):
    time.sleep(0.01)
torch.distributed.all_reduce(total)
total.item()
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for detached meshes; the fixture ends the meshes that the test leaves there."""
    runtime = Path(tempfile.mkdtemp(prefix="x-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    root = runtime / "monarch-kernel"
    yield root
    for agent in agents(root):
        below = tree(agent)
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert_gone(below)
    shutil.rmtree(runtime)


@pytest.fixture
def kernel(place: Path) -> Iterator[Callable[[], Notebook]]:
    """Start kernels, and end them; their meshes may stay."""
    started: list[Notebook] = []

    def start() -> Notebook:
        started.append(Notebook())
        return started[-1]

    yield start
    for notebook in started:
        notebook.close(leaves=True)


def agents(root: Path) -> list[psutil.Process]:
    found = []
    for manifest in root.glob("*/manifest"):
        with suppress(psutil.NoSuchProcess, FileNotFoundError):  # the mesh ends at this moment
            found.append(psutil.Process(json.loads(manifest.read_text())["agent_pid"]))
    return found


def ranks(root: Path) -> list[int]:
    """Pids of the ranks of ``t``, by rank."""
    records = sorted((root / "t").glob("rank-*[0-9]"), key=lambda path: int(path.name.partition("-")[2]))
    return [json.loads(record.read_text())["pid"] for record in records]


def kill(notebook: Notebook) -> None:
    """Kill the kernel, as the system does when memory runs out."""
    os.kill(notebook.pid, signal.SIGKILL)
    wait_until(lambda: has_ended(notebook.pid), "the kernel's end")


def counts(text: str) -> list[int]:
    return [int(count) for count in re.findall(r"count (\d+)", text)]


@pytest.mark.slow
def test_a_mesh_survives_two_killed_kernels(place: Path, kernel: Callable[[], Notebook]) -> None:
    first = kernel()
    first.ok(UP, START_S)
    first.ok("%%remote t\nstate = {'rank': rank}")
    cell = first.send(COUNT.format(options=""))
    cell.wait_for(lambda cell: len(counts(cell.stdout)) > 4)
    pids = ranks(place)
    kill(first)
    seen = counts(cell.stdout)
    wait_until((place / "t" / "detached").exists, "the agent to notice it")

    second = kernel()
    listed = second.ok("%mesh").stdout
    assert re.search(
        r"Meshes outside this kernel .*\nname +axes +ranks +kernel\nt +gpus=2 +2 running cell \[3\] +none for \d",
        listed,
    ), listed
    attach = second.ok("%mesh attach t")
    assert attach.stdout.startswith("t: attached; it was without a kernel for ")
    assert "its ranks wrote meanwhile:\n" in attach.stdout
    missed = counts(attach.stdout)
    assert 0 < min(missed) <= max(seen) + 5, (seen, missed)  # the output has almost no gap
    assert "cell [3] on t[0-1]: running for" in attach.plain
    assert second.pids() == pids
    attach.wait_for(
        lambda cell: max(counts(cell.stdout)) > max(missed) + 10
    )  # the cell continues, and its output appears where the mesh was attached

    kill(second)  # while the cell of the first kernel still runs
    third = kernel()
    attach = third.ok("%mesh attach t")
    attach.wait_for(lambda cell: max(counts(cell.stdout)) > max(missed) + 20)
    third.ok("%mesh interrupt t")
    attach.wait_for(lambda cell: "RemoteInterrupt: interrupted by %mesh interrupt" in cell.error)
    values = third.ok("%%remote t --out found\n(state['rank'], count)")
    assert values.ok
    assert [rank for rank, _ in third.value("list(found.values())")] == [0, 1]
    assert min(count for _, count in third.value("list(found.values())")) > max(missed) + 15

    # It is a mesh like any other: Tab, push, pull, slices, actors and the process group work.
    assert "state" in third.complete("%%remote t\nsta")
    third.ok("t['pushed'] = 5\nassert list(t['pushed'].values()) == [5, 5]")
    assert third.ok("%remote t[1] pushed + rank").plain == "[1] 6"
    third.ok("%%remote t\nimport torch\ntotal = torch.ones(1)\ntorch.distributed.all_reduce(total)", 60)
    assert third.ok("%remote total.item()").plain == "[0-1] 2.0"
    third.ok(
        "from monarch_kernel.actor import Actor, endpoint\n"
        "class Echo(Actor):\n    @endpoint\n    def back(self, x): return x\n"
        "assert list(t.spawn('echo', Echo).back.call(3).get().values()) == [3, 3]"
    )
    processes = [*agents(place), *(psutil.Process(pid) for pid in pids)]
    assert third.ok("%mesh down t").stdout == "t: 2 ranks ended\n"
    assert_gone(processes)
    assert not place.exists()


@pytest.mark.slow
def test_a_background_cell_survives_a_restart_of_the_kernel(
    place: Path, kernel: Callable[[], Notebook], tmp_path: Path
) -> None:
    notebook = kernel()
    notebook.ok(UP, START_S)
    cell = notebook.ok(WAITS.format(path=str(tmp_path / "go")))
    cell.wait_for(lambda cell: "waits" in cell.stdout)
    notebook.manager.restart_kernel()
    notebook.client.wait_for_ready(timeout=START_S)
    assert cell.error == ""
    assert "2 running cell [2]" in notebook.ok("%mesh").stdout
    (tmp_path / "go").touch()
    wait_until(lambda: "running" not in notebook.ok("%mesh").stdout, "the end of the cell")
    attach = notebook.ok("%mesh attach t")
    attach.wait_for(lambda cell: cell.error)
    assert "[1] about to fail\n" in attach.stdout
    assert "[1] ValueError: too late" in attach.error
    assert "remote cell [2], line 10" in attach.error
    (page,) = (data["text/html"] for data in attach.shown if "shown by" in data.get("text/html", ""))
    assert page.index("<b>shown by 0</b>") < page.index("<b>shown by 1</b>"), "one page, with a part for each rank"
    assert notebook.ok("%remote rank").plain == "[0] 0\n[1] 1"
    notebook.manager.restart_kernel()
    notebook.client.wait_for_ready(timeout=START_S)
    attach = notebook.ok("%mesh attach t")  # output that was shown once is not shown again
    assert "meanwhile" not in attach.stdout
    assert attach.error == ""
    notebook.ok("%mesh down --all")
    assert not place.exists()


def test_a_collective_is_pending_when_the_kernel_dies(
    place: Path, kernel: Callable[[], Notebook], tmp_path: Path
) -> None:
    notebook = kernel()
    notebook.ok(UP, START_S)
    notebook.ok(REDUCES.format(path=str(tmp_path / "go")), 60)
    wait_until(lambda: all("cell" in file.read_text() for file in place.glob("t/rank-*[0-9]")), "the cell's start")
    kill(notebook)  # which ends the store of the process group, too
    (tmp_path / "go").touch()
    wait_until(lambda: not any("cell" in file.read_text() for file in place.glob("t/rank-*[0-9]")), "the cell's end")
    other = kernel()
    attach = other.ok("%mesh attach t")
    attach.wait_for(lambda cell: "[0-1] 2.0" in cell.plain)  # the value that no kernel has shown yet
    other.ok("%%remote t\ntorch.distributed.all_reduce(total)", 60)  # in a group that was formed again
    assert other.ok("%remote total.item()").plain == "[0-1] 4.0"
    other.ok("%mesh down t")


@pytest.mark.slow
def test_another_kernel_cannot_attach_an_attached_mesh(place: Path, kernel: Callable[[], Notebook]) -> None:
    first, second = kernel(), kernel()
    first.ok(UP, START_S)
    has = f"attached to another kernel, pid {first.pid}, which is alive"
    for code in ("%mesh attach t", "%mesh down t"):
        cell = second.run(code)
        assert not cell.ok
        assert has in cell.stderr, cell.text
    assert f"2 idle  pid {first.pid}\n" in second.ok("%mesh").stdout
    assert f"attached to another kernel, pid {first.pid}" in second.run(UP).stderr
    assert "'t' is already attached" in first.run("%mesh attach t").stderr
    assert "there is no detached mesh 'u'; available: none" in second.run("%mesh attach u").stderr
    assert first.ok("%remote t rank").ok  # none of this has disturbed the first kernel
    polite = place.parent / "polite"
    first.ok(f"%%remote t[0]\nimport atexit, pathlib\natexit.register(pathlib.Path({str(polite)!r}).touch);")

    # Permissions: no other user may enter; a kernel does not trust a directory that others can enter.
    for path in (place, place / "t"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    files = list((place / "t").iterdir())
    assert {file.name for file in files} >= {
        "controller",
        "manifest",
        "lock",
        "holder",
        "agent-1.log",
        "rank-1",
        "rank-2",
    }
    modes = set()
    for file in files:
        with suppress(FileNotFoundError):  # a rank has just replaced a record
            modes.add(stat.S_IMODE(file.stat().st_mode))
    assert modes == {0o600}

    first.close(leaves=True)
    (place / "t").chmod(0o750)
    cell = second.run("%mesh attach t")
    assert (
        "can be entered by other users (mode 0750), and is not used; if nobody has tampered with it: chmod 700"
        in cell.stderr
    )
    assert "(mode 0750)" in second.ok("%mesh").stdout
    (place / "t").chmod(0o700)
    if os.getuid() == 0:
        os.chown(place / "t", 12345, -1)
        assert "belongs to another user (uid 12345)" in second.run("%mesh attach t").stderr
        os.chown(place / "t", 0, -1)

    taken = "a detached mesh 't' exists; attach it with %mesh attach t, or end it with %mesh down t"
    for line in (UP, UP.removesuffix(" --detach")):
        assert taken in second.run(line).stderr
    processes = [*agents(place), *(psutil.Process(pid) for pid in ranks(place))]
    assert second.ok("%mesh down t").stdout == "t: 2 ranks ended\n"  # without attaching it
    assert_gone(processes)
    assert not place.exists()
    assert polite.exists()


@pytest.mark.slow
def test_ranks_and_meshes_that_end_while_detached(place: Path, kernel: Callable[[], Notebook]) -> None:
    notebook = kernel()
    notebook.ok(UP, START_S)
    kill(notebook)
    other = kernel()
    wait_until((place / "t" / "detached").exists, "the agent to notice it")
    gone = psutil.Process(ranks(place)[1])
    gone.kill()
    assert_gone([gone])
    assert "1 idle, 1 dead" in other.ok("%mesh").stdout
    attach = other.ok("%mesh attach t")
    assert "[1] died: killed by SIGKILL" in attach.stderr
    assert other.ok("%remote t[0] rank").plain == "[0] 0"
    other.close(leaves=True)

    wait_until((place / "t" / "detached").exists, "the agent to notice it")
    (agent,) = agents(place)
    agent.kill()
    assert_gone([agent])
    third = kernel()
    assert "t is gone: its processes have ended; its remaining files were removed" in third.ok("%mesh").stdout

    third.ok(f"{UP} --keep-for 1s", START_S)
    (agent,) = agents(place)
    below = tree(agent)
    third.close(leaves=True)
    assert_gone(below)
    told = "its time is over: it was kept for 1 s without a kernel, until "
    fourth = kernel()
    assert f"%mesh attach: mesh 't' is gone: {told}" in fourth.run("%mesh attach t").stderr
    assert "there is no detached mesh 't'" in fourth.run("%mesh attach t").stderr
    assert not place.exists()
    assert "Meshes outside this kernel" not in fourth.ok("%mesh").stdout
    fourth.ok(UP, START_S)  # the name is free
    kill(fourth)
    wait_until((place / "t" / "detached").exists, "the agent to notice it")
    (agent,) = agents(place)
    shutil.rmtree(place)  # no kernel can attach it any more
    assert_gone([agent])


@pytest.mark.slow
def test_a_kernel_that_dies_before_the_mesh_is_up_leaves_nothing(place: Path, kernel: Callable[[], Notebook]) -> None:
    notebook = kernel()
    notebook.send(UP)
    wait_until(lambda: len(notebook.processes()) >= 4, "the start of another agent and its zygote")
    below = notebook.processes()
    kill(notebook)
    assert_gone(below)
    wait_until(lambda: not (place / "t").exists(), "the directory's end")


@pytest.mark.slow
def test_without_detach_nothing_is_left(place: Path, kernel: Callable[[], Notebook]) -> None:
    notebook = kernel()
    notebook.ok(UP.removesuffix(" --detach"), START_S)
    below = notebook.processes()
    assert len(below) >= 4
    kill(notebook)
    assert_gone(below)
    assert not place.exists()


ASKS = """\
from monarch_kernel.actor import Actor, SupervisionError, context, endpoint

class Peer(Actor):
    @endpoint
    def greet(self):
        return context().actor_instance.rank.rank

    @endpoint
    def serve(self, peers, path):
        # Greet the other rank whenever a file says so, and note what comes back in another.
        import os, time
        for turn in range(100):
            while not os.path.exists(f"{path}.ask{turn}"):
                time.sleep(0.01)
            try:
                said = repr(peers.slice(gpus=1).greet.call_one().get(timeout=20))
            except SupervisionError as error:
                said = str(error)
            with open(f"{path}.new", "w") as file:
                file.write(said)
            os.rename(f"{path}.new", f"{path}.said{turn}")

peers = t.spawn("peers", Peer)
"""


@pytest.mark.slow
def test_ranks_call_each_other_without_a_kernel_and_under_the_next(
    place: Path, kernel: Callable[[], Notebook], tmp_path: Path
) -> None:
    """The next kernel tells a rank whether the other one is alive."""
    path = tmp_path / "peer"

    def ask(turn: int) -> str:
        Path(f"{path}.ask{turn}").touch()
        said = Path(f"{path}.said{turn}")
        wait_until(said.exists, f"turn {turn}")
        return said.read_text()

    first = kernel()
    first.ok(UP)
    first.ok(ASKS)
    first.ok(f"peers.slice(gpus=0).serve.broadcast(peers, {str(path)!r})")
    assert ask(0) == "1"
    kill(first)
    assert ask(1) == "1"
    second = kernel()
    second.ok("%mesh attach t")
    assert ask(2) == "1"
    os.kill(ranks(place)[1], signal.SIGKILL)
    assert "SIGKILL" in ask(3)
    second.ok("%mesh down t")


LOOPS = """\
%%remote t --background --out done
import time
seen = []
for step in live.loop(1_000_000):
    seen.append(live.knob("lr", 0.1))
    live.log(loss=1.0)
    time.sleep(0.001 * (1 + rank))
    if step % 10 == 0:
        with open({path!r} + str(rank), "w") as file:
            file.write(str(step).ljust(10))
seen
"""


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.slow
def test_the_next_kernel_controls_a_live_loop(
    place: Path, kernel: Callable[[], Notebook], tmp_path: Path, is_paused: bool
) -> None:
    def done(rank: int) -> int:
        return int((tmp_path / f"step{rank}").read_text() or "0")

    first = kernel()
    first.ok(UP, START_S)
    first.ok(LOOPS.format(path=str(tmp_path / "step")))
    wait_until(lambda: first.value("[loop.view().step > 20 for loop in t.loops]") == [True], "the loop to start")
    first.ok("%mesh loop lr=0.5")
    if is_paused:
        before = first.value("t.loop.pause()")
        wait_until(lambda: first.value("t.loop.view().step") == before, "the ranks to pause")
    kill(first)
    wait_until((place / "t" / "detached").exists, "the agent to notice it")
    if is_paused:
        at = done(0)
    else:  # many more steps than were granted
        after = done(0) + 500
        wait_until(lambda: min(done(0), done(1)) > after, "the ranks to continue without a kernel")

    second = kernel()
    second.ok("%mesh attach t", START_S)
    if is_paused:
        assert second.value("t.loop.view().state") == "paused"
        assert (second.value("t.loop.view().step"), done(0)) == (before, at)
        second.ok("%mesh loop resume")
    wait_until(lambda: second.value("[knob.value for knob in t.loop.view().knobs]") == [0.5], "the knob to be reported")
    turned = second.value("t.loop.set('lr', 0.25)")
    wait_until(lambda: second.value("t.loop.view().step") > turned + 10, "the ranks to continue")
    end = second.value("t.loop.stop()")
    wait_until(lambda: second.value("t.loop.view().state") == "over", "the loop to be over")
    values = second.value("[(len(seen), seen.index(0.25), seen[-1]) for seen in t['seen'].values()]")
    assert values == [(end, turned, 0.25)] * 2
    second.ok("%mesh down t")
