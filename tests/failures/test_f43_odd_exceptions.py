"""F43: exceptions that are chained, grouped, endless, huge, or can't be printed or pickled are shown bounded, by rank."""

from __future__ import annotations

from monarch_kernel.notebook.view.messages import condensed
from monarch_kernel.runtime.diagnostics import failures
from tests.failures.cells import Cells

CHAIN = """
def load(): raise FileNotFoundError(2, "No such file or directory", f"/data/shard-{rank}.pt")
try: load()
except OSError as error: raise RuntimeError("step failed") from error
"""
NOTES = "error = ValueError('bad row'); error.add_note('look at row 17'); error.add_note('of a.csv')\nraise error"
GROUP = "raise ExceptionGroup('two rows', [ValueError('x0'), KeyError('x1')])"
ENDLESS = "def f(n): return f(n + 1)\nf(0)"
NO_STR = "class Bad(Exception):\n    def __str__(self): raise TypeError('no')\n    __repr__ = __str__\nraise Bad()"
NO_PICKLE = """
import threading
class Locked(Exception):
    def __init__(self, *, status): super().__init__(f"status {status}"); self.lock = threading.Lock()
raise Locked(status=429)
"""


def test_causes_that_differ_by_rank_are_shown_by_rank(cells: Cells) -> None:
    text = cells.fails(CHAIN)
    assert "[0-1] RuntimeError: step failed" in text
    assert "on [0] FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-0.pt'" in text
    assert "on [1] FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-1.pt'" in text
    assert "line 2, in load" in text


def test_notes_are_shown(cells: Cells) -> None:
    assert "ValueError: bad row\n    look at row 17\n    of a.csv\n" in cells.fails(NOTES)


def test_the_members_of_a_group_are_shown(cells: Cells) -> None:
    if cells.ok("sys.version_info >= (3, 11)")[0]:
        text = cells.fails(GROUP)
        assert "ValueError: x0" in text
        assert "KeyError: 'x1'" in text


def test_an_endless_recursion_is_counted(cells: Cells) -> None:
    text = cells.fails(ENDLESS)
    assert "RecursionError: maximum recursion depth exceeded" in text
    assert "frames in remote cell" in text
    assert text.count("\n") < 40


def test_a_message_of_ten_megabytes_is_cut(cells: Cells) -> None:
    text = cells.fails("raise ValueError('x' * 10_000_000)")
    assert "[0-1] ValueError: xxx" in text
    assert len(text) < 10_000


def test_an_exception_that_can_not_be_printed_is_named(cells: Cells) -> None:
    text = cells.fails(NO_STR)
    assert "[0-1] Bad: <Bad whose __str__ failed>" in text
    assert "could not determine" not in text


def test_an_exception_that_can_not_be_pickled_is_shown(cells: Cells) -> None:
    assert "[0-1] Locked: status 429" in cells.fails(NO_PICKLE)


def test_a_traceback_in_a_message_has_the_users_lines_and_no_frames_of_this_package() -> None:
    text = (
        "-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
        f'  File "{failures.__file__}", line 3, in describe\n    return inner()\n'
        '  File "<remote cell [2]>", line 6, in worker\n    dist.init_process_group("gloo")\n'
        f'  File "{failures.__file__}", line 9, in join\n    original()\nValueError: twice!'
    )
    shown = "\n".join(condensed(text))
    assert "line 6, in worker" in shown
    assert "original()" not in shown
    assert shown.endswith("ValueError: twice!")
