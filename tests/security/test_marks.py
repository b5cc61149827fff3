"""A process that a rank has forked shares its output and can do no harm to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch_kernel.actor import ProcMesh
from monarch_kernel.base.events import OutputEvent
from monarch_kernel.net.wire.stream_marks import FIRST_MARK, switch_mark
from monarch_kernel.runtime.controller.session import current_session
from tests.support.waiting import LONG_S, wait_until

CHILD = """
import gc, multiprocessing, os
from monarch_kernel.runtime.worker.stdio import OutputMarks

def child():
    (marks,) = [each for each in gc.get_objects() if type(each) is OutputMarks]
    marks.set(display=True)
    marks.begin(7)
    for number in NUMBERS:
        os.write(1, b"\\0monarch-kernel mark %s%016d\\n" % (marks._secret.encode(), number))
        os.write(1, b"\\0monarch-kernel mark %s %016d\\n" % (marks._secret.encode(), number))
    os.set_blocking(1, False)
    os.write(1, b"secret: [%s]\\n" % marks._secret.encode())

worker = multiprocessing.get_context("fork").Process(target=child)
worker.start(); worker.join()
(os.getpid(), worker.exitcode)
"""


@pytest.fixture
def written(procs: ProcMesh) -> Iterator[list[OutputEvent]]:
    events: list[OutputEvent] = []
    stop = current_session().runtime.watch(
        lambda event: events.append(event) if isinstance(event, OutputEvent) else None
    )
    yield events
    stop()


def test_a_fork_of_a_rank_writes_only_text(procs: ProcMesh, written: list[OutputEvent]) -> None:
    numbers = (FIRST_MARK + 1, 1 << 51, switch_mark(1, 0), switch_mark(1, 99_999), 10**16 - 1)
    pids, codes = zip(*procs.run(CHILD.replace("NUMBERS", repr(numbers))).get(LONG_S).values())
    assert codes == (0, 0)
    shown = [f"\0monarch-kernel mark {space}{number:016d}\n" for number in numbers for space in ("", " ")]
    for rank in (0, 1):
        wait_until(lambda rank=rank: "secret: []" in _text(written, rank), "the output of the child")
        assert _text(written, rank) == "".join([*shown, "secret: []\n"])
    written.clear()
    long = "x" * 300_000  # more than a pipe takes at once
    assert procs.run("print('x' * 300_000); os.getpid()").get(LONG_S).values() == pids
    assert [_text(written, rank) for rank in (0, 1)] == [f"{long}\n"] * 2


FIND_MARKS = """
import gc, os
from monarch_kernel.runtime.worker.stdio import OutputMarks
(marks,) = [each for each in gc.get_objects() if type(each) is OutputMarks]
"""


def test_a_silent_cell_sets_no_mark_and_output_of_native_code_comes_before_the_end_of_its_cell(
    procs: ProcMesh, written: list[OutputEvent]
) -> None:
    """`os.write` stands for native code: no part of this package sees it."""
    procs.run(FIND_MARKS).get(LONG_S)
    first, *others = [procs.run("marks._last").get(LONG_S).values() for _ in range(4)]
    assert others == [first] * 3
    shown = ""
    for i in range(20):
        procs.run(f"_ = os.write(1, b'{i}\\n')").get(LONG_S)
        shown += f"{i}\n"
        assert [_text(written, rank) for rank in (0, 1)] == [shown] * 2
        procs.run("None").get(LONG_S)
    assert procs.run("marks._last").get(LONG_S).values() > first


def _text(events: list[OutputEvent], rank: int) -> str:
    return "".join(event.text for event in events if event.rank == rank and event.stream == "stdout")
