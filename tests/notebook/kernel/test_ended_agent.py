"""Something ends this machine's host agent (SIGTERM): the next mesh comes up with another one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.notebook.kernel.conftest import Notebook
from tests.support.processes import assert_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # agents that import torch


@pytest.mark.parametrize("when", ["right after", "before the agent acts"])
def test_a_mesh_comes_up_after_something_has_ended_the_agent(new_notebook: Callable[..., Notebook], when: str) -> None:
    notebook = new_notebook(n=1)
    agent = psutil.Process(psutil.Process(notebook.pids()[0]).ppid())
    before = notebook.processes()
    if when == "right after":
        os.kill(agent.pid, signal.SIGTERM)
        notebook.up(2, "u")
    else:
        os.kill(agent.pid, signal.SIGSTOP)
        os.kill(agent.pid, signal.SIGTERM)
        cell = notebook.send("%mesh up u -n 2 --device cpu")
        cell.wait_for(lambda cell: "waiting for ranks to start" in cell.text)
        os.kill(agent.pid, signal.SIGCONT)
        assert cell.wait(120).ok, cell.text
    assert notebook.ok("%%remote u\nrank").plain == "[0] 0\n[1] 1"
    assert_gone(before)
    cell = notebook.run("%%remote t\nrank")
    assert not cell.ok
    assert "SIGTERM" in cell.text
