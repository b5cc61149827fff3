"""Replaced ranks of a detached mesh: the next kernel finds the current ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebook.kernel import test_detach
from tests.notebook.kernel.conftest import Notebook
from tests.notebook.kernel.test_detach import UP
from tests.support.waiting import wait_until

place = test_detach.place
kernel = test_detach.kernel


def kill_rank(notebook: Notebook, rank: int) -> None:
    pid = notebook.pids()[rank]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: rank in notebook.value("list(t.deaths())"), "the news of the death")


@pytest.mark.slow
def test_another_kernel_finds_the_current_ranks(kernel: Callable[[], Notebook], place: Path) -> None:
    first = kernel()
    first.ok(UP)
    first.ok("%%remote t\nx = rank")
    for _ in range(2):
        kill_rank(first, 1)
        first.ok("%mesh heal t")
    first.ok("%%remote t[1]\nx = 'healed'")
    kill_rank(first, 0)
    first.close(leaves=True)

    second = kernel()
    assert "[0] died: killed by SIGKILL" in second.ok("%mesh attach t").text
    assert second.ok("%%remote t[1]\nx").plain == "[1] 'healed'"
    assert second.value("t.incarnations()") == (0, 2)
    second.ok("%mesh heal t")
    assert set(
        second.ok(
            "%%remote t\nimport torch\nx = torch.ones(1)\ntorch.distributed.all_reduce(x); print(x.item())"
        ).stdout.split()
    ) == {"[0-1]", "2.0"}
    assert second.value("t.incarnations()") == (1, 2)
    second.ok("%mesh down t")
    wait_until(lambda: not (place / "t").exists(), "the end of the mesh")
