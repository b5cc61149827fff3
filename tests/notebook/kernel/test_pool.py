"""The kernel that test modules share: each module finds it in its initial state, or a new one if it can't be restored."""

from __future__ import annotations

import os
import signal

import pytest

from tests.notebook.kernel.conftest import Notebook, Pool

CHANGES = """
import builtins, os, sys, warnings, monarch_kernel.actor
from monarch_kernel.notebook.magics import remote_names
from monarch_kernel.notebook.magics.meshes import Meshes
x = 1
os.chdir("/")
os.environ["OF_A_TEST"] = "1"
del os.environ["OMP_NUM_THREADS"]
sys.path.insert(0, "/of/a/test")
builtins.of_a_test = 1
remote_names.CAP_S = 99.0
monarch_kernel.actor.unhandled_fault_hook = print
Meshes.down = print
warnings.simplefilter("ignore")
get_ipython().events.register("pre_run_cell", lambda info: 1 / 0)
"""
LOOKS = """(
    'x' in globals(), __import__('os').getcwd(), 'OF_A_TEST' in __import__('os').environ,
    __import__('os').environ.get('OMP_NUM_THREADS'), __import__('sys').path[0], hasattr(__builtins__, 'of_a_test'),
    __import__('monarch_kernel.notebook.magics.remote_names', fromlist=['x']).CAP_S,
    __import__('monarch_kernel.actor', fromlist=['x']).unhandled_fault_hook.__module__,
    __import__('monarch_kernel.notebook.magics.meshes', fromlist=['x']).Meshes.down.__name__,
    len(__import__('warnings').filters), len(get_ipython().events.callbacks['pre_run_cell']),
    get_ipython().execution_count, len(get_ipython().history_manager.input_hist_raw),
)"""


def test_the_next_module_finds_the_initial_state(bare: Notebook, pool: Pool) -> None:
    notebook = pool.take("first", 0)
    assert notebook is bare
    before, pid = notebook.value(LOOKS), notebook.pid
    notebook.ok(CHANGES)
    assert notebook.value(LOOKS) != before
    notebook.send("while True: pass")
    assert pool.take("second", 0) is notebook
    assert notebook.value(LOOKS) == before
    assert notebook.pid == pid
    assert notebook.ok("1 + 1").reply["execution_count"] == 1
    assert len(notebook.cells) == 2


@pytest.mark.slow
def test_a_kernel_that_is_dead_or_stuck_is_replaced() -> None:
    pool = Pool()
    try:
        first = pool.take("first", 1)
        os.kill(first.pid, signal.SIGKILL)
        second = pool.take("second", 1)
        assert second.pid != first.pid
        assert second.ok("%remote rank").plain == "[0] 0"
        second.is_stuck = True
        third = pool.take("third", 0)
        assert third.pid != second.pid
        assert pool.started == 3
    finally:
        pool.end()
