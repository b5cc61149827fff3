"""Kernel > Interrupt stops the ranks, which keep their state, and disturbs nothing else."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import pytest

from monarch_kernel.errors import RemoteInterrupt
from tests.support.processes import assert_gone

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Cell, Notebook
    from tests.support.timing import Bar

pytestmark = pytest.mark.timeout(120)

BOUND_S = 2.0
GO = "print('go', flush=True)\n"
REDUCE = "import torch, torch.distributed as dist\nx = torch.ones(1); dist.all_reduce(x); x.item()"
POOL = "from concurrent.futures import ThreadPoolExecutor\n"


def start(notebook: Notebook, code: str, selector: str = "t", n: int = 2) -> Cell:
    """Run a cell until all its ranks have printed "go"."""
    cell = notebook.send(f"%%remote {selector}\n{code}")
    return cell.wait_for(lambda cell: sum(line == ["go"] for line in cell.lines().values()) == n or cell.reply)


@pytest.fixture
def interrupted(bar: Bar) -> Callable[..., Cell]:
    """Interrupt a cell, and check that it ends with the right error."""

    def interrupt(notebook: Notebook, cell: Cell, bound_s: float = BOUND_S) -> Cell:
        assert not cell.reply, cell.text
        with bar.below(bound_s, "the interrupt"):
            notebook.interrupt()
            cell.wait()
        assert (cell.reply["status"], cell.ename) == ("error", "RemoteInterrupt")
        return cell

    return interrupt


@pytest.mark.parametrize(
    "loop",
    ["while True: n += 1", "import time; time.sleep(600)", "import asyncio; await asyncio.sleep(600)", "!sleep 600"],
)
def test_an_interrupt_stops_a_cell_and_keeps_the_state(
    notebook: Notebook, loop: str, interrupted: Callable[..., Cell]
) -> None:
    pids = notebook.pids()
    cell = interrupted(notebook, start(notebook, f"n = 1\n{GO}{loop}"))
    assert cell.evalue == "interrupted on [0-1]; their state is kept"
    assert "Traceback" not in cell.error
    assert notebook.ok("%%remote\nn > 0").plain == "[0-1] True"
    assert notebook.pids() == pids


def test_an_interrupt_is_a_keyboard_interrupt() -> None:
    assert issubclass(RemoteInterrupt, KeyboardInterrupt)


def test_an_interrupt_of_a_local_cell_leaves_ranks_alone(notebook: Notebook) -> None:
    pids = notebook.pids()
    cell = notebook.send("print('go')\nimport time; time.sleep(60)")
    cell.wait_for(lambda cell: "go" in cell.stdout)
    notebook.wait_blocked()
    notebook.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert notebook.ok("%%remote\nrank").plain == "[0] 0\n[1] 1"
    assert notebook.pids() == pids


def test_a_signal_to_the_kernels_group_does_not_reach_ranks(notebook: Notebook) -> None:
    pids = notebook.pids()
    group = os.getpgid(notebook.pid)
    zygotes = notebook.zygotes()
    assert zygotes
    for pid in (*pids, *(each.pid for each in zygotes), *(each.ppid() for each in zygotes)):  # the last ones are agents
        assert os.getpgid(pid) != group, psutil.Process(pid).cmdline()
    notebook.wait_blocked()  # while the kernel ends a cell, an interrupt applies to a cell that waits, too
    os.killpg(group, signal.SIGINT)
    for pid in pids:  # even a signal that reaches a rank has no effect
        os.kill(pid, signal.SIGINT)
    assert notebook.ok("%%remote\nrank").plain == "[0] 0\n[1] 1"
    cell = start(notebook, f"{GO}import time\ntime.sleep(0.5)\n'undisturbed'")
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    assert cell.wait().plain == "[0-1] 'undisturbed'"
    assert notebook.pids() == pids


def test_an_interrupt_stops_only_the_ranks_that_still_run(notebook: Notebook, interrupted: Callable[..., Cell]) -> None:
    cell = start(notebook, f"{GO}import time\ntime.sleep(600 if rank else 0)")
    assert interrupted(notebook, cell).evalue == "interrupted on [1]; its state is kept; [0] had finished"


def test_an_interrupt_names_the_error_of_a_failed_rank_in_brief(
    notebook: Notebook, interrupted: Callable[..., Cell]
) -> None:
    cell = start(
        notebook, f"{GO}import time\nif rank == 0:\n    raise ValueError('a\\n' + 'z' * 50_000)\ntime.sleep(600)"
    )
    cell.wait_for(lambda cell: "failed with" in cell.stderr)
    said = interrupted(notebook, cell).evalue
    assert said.startswith("interrupted on [1]; its state is kept; [0] failed: ValueError: a … (cell [")
    assert "zzz" not in said


def test_ranks_that_a_death_has_released_were_not_interrupted(bare: Notebook, interrupted: Callable[..., Cell]) -> None:
    bare.ok("%mesh up u -n 3 --device cpu")
    cell = bare.send(
        "%%remote u\nimport os, time, torch.distributed as dist\n"
        "if rank == 0: os._exit(5)\nif rank == 2: time.sleep(600)\ndist.barrier()"
    )
    cell.wait_for(lambda cell: "[2] goes on" in cell.stderr)
    said = interrupted(bare, cell).evalue
    assert said.startswith("interrupted on [2]; its state is kept; [0] lost: RankDied: ")
    assert said.endswith("; [1] waited for [0] and was released")


def test_a_rank_that_completes_the_cell_after_an_interrupt_had_not_finished(
    notebook: Notebook, interrupted: Callable[..., Cell]
) -> None:
    cell = start(
        notebook,
        f"import time\n{GO}try: time.sleep(600)\nexcept KeyboardInterrupt:\n    if rank: raise",
    )
    assert interrupted(notebook, cell).evalue == "interrupted on [1]; its state is kept; [0] ran to its end"


@pytest.mark.parametrize(
    "call",
    [
        "dist.recv(torch.ones(1), 1 - rank)",
        "dist.irecv(torch.ones(1), 1 - rank).wait()",
        "dist.recv_object_list([None], 1 - rank)",
        "time.sleep(600) if rank else dist.monitored_barrier()",
        f"{POOL}with ThreadPoolExecutor(1) as pool: pool.submit(dist.recv, torch.ones(1), 1 - rank).result()",
    ],
    ids=["recv", "irecv", "recv_object_list", "monitored_barrier", "pool"],
)
def test_an_interrupt_releases_ranks_that_wait_for_each_other(
    notebook: Notebook, call: str, interrupted: Callable[..., Cell]
) -> None:
    """The recorder of torch does not know of these calls."""
    notebook.ok(f"%%remote\n{REDUCE}")
    cell = interrupted(notebook, start(notebook, f"import time\n{GO}{call}"))
    assert cell.evalue.splitlines()[0] == "interrupted on [0-1]; their state is kept"
    assert notebook.ok(f"%%remote\n{REDUCE}").plain == "[0-1] 2.0"


def test_an_interrupt_of_local_code_that_waits_for_ranks_reaches_them(notebook: Notebook, bar: Bar) -> None:
    cell = notebook.send("future = t.run('import time; print(1); time.sleep(600)')\nprint('go')\nfuture.get()")
    cell.wait_for(lambda cell: "go" in cell.stdout)
    notebook.wait_blocked()
    notebook.interrupt()
    assert cell.wait().ename == "RemoteInterrupt"
    with bar.below(BOUND_S, "the next cell"):
        assert notebook.ok("%%remote\nrank").plain == "[0] 0\n[1] 1"


def test_a_late_interrupt_never_hits_the_next_cell(notebook: Notebook) -> None:
    rng = random.Random(7)
    outcomes: set[str] = set()
    whole_s = min(notebook.ok("%%remote\nimport time; time.sleep(0.03)\nprint(rank)").elapsed_s for _ in range(3))
    for i in range(25):
        sleep_s = 600 if i == 0 else 0.03
        cell = notebook.send(f"%%remote\nimport time; print('go', flush=True); time.sleep({sleep_s})\nprint(rank)")
        if i == 0:  # while the ranks run
            cell.wait_for(lambda cell: len(cell.lines()) == 2)
        elif i == 1:  # after the ranks have run
            cell.wait()
        else:
            until = time.monotonic() + rng.uniform(0.0, 2 * whole_s)
            while time.monotonic() < until:
                notebook.pump(0.002)
        notebook.interrupt()
        cell.wait()
        outcomes.add(cell.ename or "ok")
        following = notebook.run("%%remote --out alive\nimport time; time.sleep(0.01); rank")
        assert following.ok, (cell.text, following.text)
        assert following.plain == "[0] 0\n[1] 1"
    # An interrupt at the very start of a cell may come before anything is sent.
    assert {"ok", "RemoteInterrupt"} <= outcomes <= {"ok", "RemoteInterrupt", "KeyboardInterrupt"}


def test_ranks_that_wait_in_a_collective_are_released(notebook: Notebook, interrupted: Callable[..., Cell]) -> None:
    code = f"{GO}import time\nimport torch, torch.distributed as dist\nstate = 5\n"
    cell = interrupted(notebook, start(notebook, code + "time.sleep(600) if rank else dist.barrier()"))
    assert cell.evalue.splitlines()[0] == "interrupted on [0-1]; their state is kept"
    assert notebook.ok(f"%%remote\n{REDUCE}").plain == "[0-1] 2.0"  # the process group was formed again
    assert notebook.ok("%%remote\nstate").plain == "[0-1] 5"


def test_ranks_that_wait_for_a_failed_rank_are_released(notebook: Notebook, bar: Bar) -> None:
    pids = notebook.pids()
    cell = notebook.run(f"%%remote\nmark = 7\nif rank == 1: raise ValueError('of rank one')\n{REDUCE}")
    assert cell.ename == "RemoteError"
    bar.check(cell.elapsed_s, 3.5, "the cell")
    assert "[1] ValueError: of rank one" in cell.error
    assert re.search(r"\[0\] waited for other ranks at remote cell \[\d+\], line 5, and was released", cell.error)
    assert notebook.ok(f"%%remote\nassert mark == 7\n{REDUCE}").plain == "[0-1] 2.0"
    assert notebook.pids() == pids


def test_a_flood_of_output_can_be_interrupted(notebook: Notebook, interrupted: Callable[..., Cell]) -> None:
    cell = notebook.send("%%remote\nwhile True: print('x' * 80)")
    cell.wait_for(lambda cell: "left out" in cell.stdout or len(cell.stdout) > 300_000)
    interrupted(notebook, cell)
    assert notebook.ok("%%remote\nprint('quiet')").lines() == {0: ["quiet"], 1: ["quiet"]}


def test_ranks_that_ignore_interrupts_are_named_and_do_not_block_the_kernel(
    bare: Notebook, interrupted: Callable[..., Cell]
) -> None:
    bare.up(2)
    stubborn = "    try: time.sleep(0.01)\n    except KeyboardInterrupt:\n        if not rank: raise"
    cell = start(bare, f"import time\n{GO}while True:\n{stubborn}")
    interrupted(bare, cell, 3.0)
    found = re.search(r"; \[1\] did not stop within (\d+\.\d) s\n", cell.evalue)
    assert found, cell.evalue
    assert float(found[1]) >= 1.8  # time that the kernel waits for the ranks
    assert f"[1] cell [{cell.reply['execution_count']}], line " in cell.evalue
    assert "%mesh restart t[1] replaces it" in cell.evalue
    ranks = [psutil.Process(pid) for pid in bare.pids()]
    assert bare.ok("%mesh down t").stdout == "t: 2 ranks ended\n"
    assert_gone(ranks)


def test_a_second_interrupt_does_not_wait(bare: Notebook, bar: Bar) -> None:
    bare.up(1)
    cell = start(
        bare,
        f"import time\n{GO}while True:\n    try: time.sleep(0.01)\n    except KeyboardInterrupt: pass",
        n=1,
    )
    bare.interrupt()
    time.sleep(0.3)  # the kernel still waits because of the first interrupt
    with bar.below(1.0, "the interrupt"):
        bare.interrupt()
        assert cell.wait().ename == "RemoteInterrupt"
