"""Tests what a rank does that can't say it itself: the stacks that faulthandler has written for it."""

from __future__ import annotations

import faulthandler
import json
import tempfile
import threading

import pytest

from monarch_kernel.errors import Frame
from monarch_kernel.runtime.diagnostics import dumped_stacks
from monarch_kernel.runtime.diagnostics.dumped_stacks import HELD, doing_of
from monarch_kernel.runtime.diagnostics.stacks import Doing

TEXT = f"""Thread 0x00007f2a1b7fe700 [monarch-io] (most recent call first):
  File "{json.__file__}", line 320 in loads
  File "{threading.__file__}", line 1012 in run

Thread 0x00007f2a2c4d1740 (most recent call first):
  File "/opt/venv/lib/python3.12/site-packages/numpy/linalg/_linalg.py", line 1841 in svd
  File "<remote cell [6]>", line 3 in solve
  File "<remote cell [6]>", line 6 in <module>
  File "{dumped_stacks.__file__}", line 9 in run_code
"""


def test_threads_with_code_of_the_user_are_read_from_the_outside_in() -> None:
    doing = doing_of(TEXT, 1)
    assert doing is not None
    assert (doing.rank, doing.is_silent, doing.unknown) == (1, True, HELD)
    (activity,) = doing.activities
    assert [(each.function, each.user) for each in activity.frames][-3:] == [
        ("<module>", True),
        ("solve", True),
        ("svd", False),
    ]
    assert activity.user_frame == Frame("<remote cell [6]>", 3, "solve", user=True)


def test_a_process_that_writes_nothing_or_runs_no_code_of_the_user_does_nothing_known() -> None:
    assert doing_of("", 0) is None
    assert doing_of(TEXT.replace("<remote cell [6]>", "/opt/venv/lib/site-packages/torch/x.py"), 0) is None
    assert doing_of("  <no Python frame>\n", 0) is None


@pytest.mark.parametrize(
    ("state", "halted"),
    [
        ("state: T 12 0\n", "stopped by a signal, such as SIGSTOP (kill -CONT 12 lets it go on)"),
        ("state: t 12 34\n", "stopped by a debugger or tracer, process 34"),
        (
            "state: D 12 0\n",
            "in a wait of the kernel that nothing interrupts (process 12), as for a disk or a network file system",
        ),
    ],
)
def test_the_state_of_a_process_that_runs_nothing_is_read(state: str, halted: str) -> None:
    doing = doing_of(state, 3)
    assert doing == Doing(unknown=HELD, rank=3, is_silent=True, halted=halted)


@pytest.mark.parametrize("text", ["state: R 12 0\n", "state: T 12; rm 0\n", "state: T 12 0\nx", "state: T 12 0"])
def test_no_other_text_is_taken_for_a_state(text: str) -> None:
    assert doing_of(text, 3) is None


def test_what_this_python_writes_is_understood() -> None:
    def waits() -> None:
        started.set()
        done.wait()

    started, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=waits)
    thread.start()
    started.wait()
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode()
    done.set()
    thread.join()
    doing = doing_of(text, 0)
    assert doing is not None
    functions = [frame.function for activity in doing.activities for frame in activity.frames]
    assert "waits" in functions
    assert "test_what_this_python_writes_is_understood" in functions
