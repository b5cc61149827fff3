"""F07: a rank is killed by SIGKILL; the error names the signal, what points to its sender, its memory and its cell."""

from __future__ import annotations

from tests.failures.cells import Cells
from tests.support.waiting import LONG_S


def test_a_killed_rank_is_named_with_what_it_ran(cells: Cells) -> None:
    text = cells.fails("if rank == 1:\n    os.kill(os.getpid(), 9)\n'kept'")
    assert "[1] RankDied: killed by SIGKILL (a kill -9 by a person, a program or the job's scheduler" in text
    assert "nothing points to the out-of-memory killer" in text
    assert f"it was running cell [{cells.number}]" in text
    assert "[0] finished" in text
    assert cells.mesh[0:1].run("rank").get(LONG_S).values() == (0,)
