"""F54: pools, processes that are terminated, and loader workers in cells, again and again: nothing hangs.

A child that a cell forks has a copy of the rank's signal handlers. They act in the rank only: `net.transport.forks` replaces
them in the child, before its other fork functions run.
"""

from __future__ import annotations

import textwrap

import pytest

from tests.failures.cells import Cells

N = 4

POOLS = """
import multiprocessing as mp, concurrent.futures as futures
def square(x): return x * x
for turn in range({n}):
    with mp.Pool(2) as pool: assert pool.map(square, range(4)) == [0, 1, 4, 9]
    process = mp.Process(target=time.sleep, args=(600,)); process.start(); process.terminate(); process.join()
    assert process.exitcode == -15
    with futures.ProcessPoolExecutor(2, mp_context=mp.get_context("fork")) as pool: assert list(pool.map(square, [3])) == [9]
turn
"""
LOADERS = """
class Squares(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return i * i
for turn in range({n}):
    for batch in torch.utils.data.DataLoader(Squares(), num_workers=2): break  # its workers are terminated with the loop
turn
"""
HANDLERS = """
import multiprocessing as mp, concurrent.futures as futures, signal
def look(_=0):
    terminate, interrupt = map(signal.getsignal, (signal.SIGTERM, signal.SIGINT))
    return terminate is signal.SIG_DFL, interrupt is signal.default_int_handler
def put(pipe): pipe.send(look())
class Looks(torch.utils.data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, i): return look()[1]  # torch handles SIGTERM in its workers itself
with mp.Pool(1) as pool: (in_pool,) = pool.map(look, [0])
with futures.ProcessPoolExecutor(1, mp_context=mp.get_context("fork")) as pool: (in_executor,) = pool.map(look, [0])
ours, theirs = mp.Pipe()
process = mp.Process(target=put, args=(theirs,)); process.start(); in_process = ours.recv(); process.join()
in_loader = [bool(each) for each in torch.utils.data.DataLoader(Looks(), num_workers=1)]
in_pool, in_executor, in_process, in_loader, look()
"""
TERMINATED_EARLY = """
import multiprocessing as mp, signal
armed = [signal.SIGTERM]
os.register_at_fork(after_in_child=lambda: armed and os.kill(os.getpid(), armed[0]))
process = mp.Process(target=time.sleep, args=(600,)); process.start(); process.join(30)
armed.clear()
code = process.exitcode
process.kill()
code
"""
SIGNALLED_LATE = """
import multiprocessing as mp, signal
ours, theirs = mp.Pipe()
def wait(pipe):
    pipe.send("waits")
    while True: time.sleep(0.01)  # a single sleep misses a signal that comes between Python's check and the system call
process = mp.Process(target=wait, args=(theirs,)); process.start(); ours.recv()
os.kill(process.pid, signal.{name}); process.join(30)
code = process.exitcode
process.kill()
code
"""


def test_pools_and_processes_end(cells: Cells) -> None:
    assert cells.ok(POOLS.format(n=1)) == (0,) * N


GARBAGE = """
import gc
from torch.utils.data import DataLoader, Dataset
read_end, write_end = os.pipe(); os.set_blocking(read_end, False)
sys.unraisablehook = lambda problem: os.write(write_end, str(problem.exc_value).encode())
class Rows(Dataset):
    def __len__(self): return 2
    def __getitem__(self, i): return gc.collect() and i
gc.disable()
iterator = iter(DataLoader(Rows(), num_workers=1)); iterator.me = iterator
del iterator
for batch in DataLoader(Rows(), num_workers=1): pass
sys.unraisablehook = sys.__unraisablehook__
os.write(write_end, b".")
said = os.read(read_end, 1000)
gc.enable(); gc.collect()
said
"""


def test_workers_leave_those_of_an_earlier_iterator_alone(cells: Cells) -> None:
    """On one rank: each collection of its workers visits all of torch, and they would share the cores with those of others."""
    code = f"said = b'.'\nif rank == 0:\n{textwrap.indent(GARBAGE, '    ')}\nsaid"
    assert cells.ok(code) == (b".",) * N


@pytest.mark.slow
def test_workers_of_four_ranks_leave_those_of_earlier_iterators_alone(cells: Cells) -> None:
    assert cells.ok(GARBAGE) == (b".",) * N


@pytest.mark.slow
def test_200_pools_on_four_ranks_end(cells: Cells) -> None:
    assert cells.ok(POOLS.format(n=50)) == (49,) * N


@pytest.mark.slow
def test_workers_of_loaders_end(cells: Cells) -> None:
    assert cells.ok(LOADERS.format(n=20)) == (19,) * N


def test_no_child_has_a_handler_of_the_rank(cells: Cells) -> None:
    usual = True, True
    assert cells.ok(HANDLERS) == ((usual, usual, usual, [True], (False, False)),) * N


def test_a_child_that_is_terminated_in_its_first_moments_ends(cells: Cells) -> None:
    """While Python calls the fork functions, it swallows the exception that a handler of the rank raises."""
    assert cells.ok(TERMINATED_EARLY) == (-15,) * N


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", -15), ("SIGINT", 1)])
def test_a_signal_later_ends_only_the_child(cells: Cells, name: str, code: int) -> None:
    """SIGINT raises KeyboardInterrupt there, as in any other program."""
    assert cells.ok(SIGNALLED_LATE.format(name=name)) == (code,) * N
    assert cells.ok("rank") == tuple(range(N))
