"""F10: a rank runs an endless loop; an interrupt stops it, the error names the line, and its state is kept."""

from __future__ import annotations

import pytest

from monarch_kernel.errors import RemoteError
from monarch_kernel.runtime.diagnostics.stacks import Doing
from tests.failures.cells import Cells, shown
from tests.support.waiting import LONG_S, wait_until


def test_an_interrupt_stops_the_loop(cells: Cells) -> None:
    future = cells.mesh.run_cell("steps = 0\nwhile rank == 1:\n    steps += 1", cell=3)

    def loops() -> bool:
        busy = cells.mesh.doing().get(LONG_S)[1]
        assert isinstance(busy, Doing)
        frames = [activity.user_frame for activity in busy.activities]
        return any(frame is not None and frame.line >= 2 for frame in frames)

    wait_until(loops, "rank 1 to loop")  # from then on, rank 0 is idle only after its cell
    wait_until(lambda: cells.mesh.view().ranks[0].state == "idle", "rank 0 to finish")
    cells.mesh.interrupt()
    with pytest.raises(RemoteError) as caught:
        future.get(LONG_S)
    assert "[1] KeyboardInterrupt" in shown(caught.value)
    assert "remote cell [3], line 2: while rank == 1:" in shown(caught.value)
    kept = cells.ok("steps")
    assert kept[0] == 0 < kept[1]
