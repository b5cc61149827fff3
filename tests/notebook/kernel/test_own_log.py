"""The log messages of the package go to the kernel's log, and no cell shows them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook

pytestmark = pytest.mark.timeout(120)

KEEPS_LOG = """
import logging, threading
class Kept(logging.Handler):
    def emit(self, record):
        kept.append(record.getMessage())
kept, handler = [], Kept(logging.ERROR)
get_ipython().log.addHandler(handler)
"""
FAILS = """
import logging, sys, threading
def fails():
    raise LookupError("a thread of the package")
thread = threading.Thread(target=fails, name="monarch-test"); thread.start(); thread.join()
logging.getLogger("monarch_kernel.test").error("a logger of the package")
"""


def streams_of(notebook: Notebook) -> str:
    return "".join(
        message["content"]["text"]
        for cell in notebook.cells.values()
        for message in cell.messages
        if message["msg_type"] == "stream"
    )


DOCTOR = """
from monarch_kernel.base.own_log import ForwardingHandler
from monarch_kernel.doctor.sessions import background as findings
"""


def check_failures_in_the_background(notebook: Notebook) -> None:
    notebook.ok(f"{DOCTOR}\n{KEEPS_LOG}")
    before = notebook.value("ForwardingHandler.errors.number")
    notebook.ok(FAILS)
    notebook.ok(
        "def view(now):\n    raise TimeoutError('no answer within 0.0 s')\n"
        "background = get_ipython()._monarch_kernel[0].meshes.background\nbackground.drive('test', view)"
    )
    wait_until(lambda: notebook.value("len(kept)") == 3, "all records")
    kept = notebook.value("kept")
    assert kept[:2] == ["an exception in the thread monarch-test", "a logger of the package"]
    assert kept[2].endswith("failed")
    ((item, found),) = notebook.value("[(each.item, each.found) for each in findings()]")
    assert item == "background work"
    assert re.fullmatch(rf"{before + 3} errors in the log, the last at [\d:]+: .* failed", found)
    notebook.ok("get_ipython().log.removeHandler(handler)")
    notebook.sync()
    text = streams_of(notebook)
    assert "of the package" not in text
    assert "no answer within" not in text


def test_failures_in_the_background_reach_the_log_and_no_cell(notebook: Notebook) -> None:
    check_failures_in_the_background(notebook)


@pytest.mark.slow
def test_failures_in_the_background_reach_the_log_of_the_stock_kernel_and_no_cell(stock: Notebook) -> None:
    check_failures_in_the_background(stock)


def test_a_thread_of_the_user_fails_as_usual(notebook: Notebook) -> None:
    cell = notebook.ok(FAILS.replace("monarch-test", "mine"))
    cell.wait_for(lambda cell: "LookupError: a thread of the package" in cell.stderr)


def test_ranks_log_to_the_file_of_their_agent(notebook: Notebook) -> None:
    cell = notebook.ok(f"%%remote\n{FAILS}\nprint('the end')")
    assert cell.lines() == {rank: ["the end"] for rank in range(2)}
    assert cell.stderr == ""
    logs = notebook.value(
        "[path.read_text() for path in __import__('monarch_kernel.runtime.controller.session', fromlist=['x'])"
        ".current_session().directory.glob('agent-*.log')]"
    )
    (log,) = logs
    assert log.count("monarch_kernel.test: a logger of the package") == 2
    assert log.count("LookupError: a thread of the package") == 2
