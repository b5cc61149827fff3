"""Recovers a cell with a live loop when ranks die: the steps between the death and the next training step.

Theory of operation. The surviving processes have models, optimizers and groups that belong to a process group that no longer
exists, and a new process has no state. So all processes run the cell again, after the cells that define the names it needs
(`notebook.cells.replay`), as a user would. The state of the training is in their snapshots, and is restored where the cell
calls `live.snapshot` (`train.snapshots.buddy_store`). The request is a new one, but the cell is the same, and writes to the
same output.

Ranks may also die during recovery; then recovery starts again. It gives up when ranks have died several times before the
loop came farther than ever before: a loop that kills its ranks at a certain step would do so again.

From the death of a rank to the next step: the agent sends `Lost`; the state answers the rank's pending requests and sends
`Release` to the ranks that the cell waits for, which abort the groups that the rank was in, so the cell fails on all. The
cell then asks its recovery for one future after the other: heal, the list of snapshots (`ListSnapshots`), the process
group, earlier cells, and the cell again (``Run.rewind``). On each rank ``live.snapshot`` puts back what it has, or fetches
it from the buddy (`FetchSnapshot`). The loop record of the controller goes on from the one before, with its knobs, changes
and curves.

The cell runs again on all ranks, because a model that was spread (FSDP's groups, DDP's reducer, DTensors' meshes) holds the
process group that is gone, and building it needs collectives. Ranks agree on nothing among themselves: they take snapshots
before the same steps, and the controller sees which ones each place has. The rewind travels with the cell, so that a
recovery that fails leaves no rank that would go back in a later cell.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.text import format_seconds
from monarch_kernel.errors import RanksError, SnapshotError, format_ranks
from monarch_kernel.features.live.controller import LoopControl
from monarch_kernel.net.wire.messages import Rewind
from monarch_kernel.notebook.cells.replay import cells_for, reads
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.train.snapshots.rewind import Common, Holdings, common, holdings

__all__ = ["Recovery", "again_failed_text", "python_of"]

MAX_RECOVERIES = 5
"""Maximum number of successive recoveries of a cell whose loop comes no farther."""


class Recovery:
    """Recovers one cell.

    Args:
        mesh: where the cell runs.
        number: the number of the cell.
        code: the code of the cell.
        history: number and code of the earlier cells that finished on all ranks.
        form: forms the process group again.
        say: writes a line to the output of the cell.
        listen: receives the output of earlier cells that run again.
    """

    def __init__(
        self,
        mesh: ProcMesh,
        number: int,
        code: str,
        history: Sequence[tuple[int, str]],
        form: Callable[[], Future[Any]],
        say: Callable[[str], None],
        listen: Callable[[Any], None],
    ) -> None:
        self._mesh = mesh
        self._number = number
        self._code = code
        self._history = history
        self._form = form
        self._say = say
        self._listen = listen
        self._requests: list[int] = []  # the requests that have run the cell
        self._is_again = False
        self._farthest = -1
        self._recoveries = 0

    def wants(self, request: int, error: RanksError) -> bool:
        """Whether to recover the cell after the error that ended it."""
        self._requests.append(request)
        kinds = {failure.kind for failure in error.reports.values()}
        if "lost" not in kinds or not kinds <= {"lost", "released"} or not self._code:
            return False
        if not self._is_again and not LoopControl(self._mesh.runtime).recovers(request):
            return False
        if not self._mesh.is_whole:
            self._say(f"{self._mesh.name} is a slice of a mesh: only cells that run on all of its ranks can recover")
            return False
        return True

    def steps(self, error: RanksError) -> Generator[Future[Any], None, Rewind | None]:
        """Recover the cell; yields the futures to wait for, one after another.

        Returns:
            The snapshot to restore when the cell is sent again; None to start from the beginning.

        Raises:
            MonarchError: the cell can't be recovered.
        """
        started = time.monotonic()
        step = max((loop.view().step for loop in self._mesh.loops if loop.key[0] in self._requests), default=0)
        if step > self._farthest:
            self._farthest, self._recoveries = step, 0
        died = {point.rank: failure for point, failure in error.reports.items() if failure.kind == "lost"}
        how = re.split(r";| \(", died[min(died)].message)[0]
        self._say(f"{self._mesh.name}: {format_ranks(died)} died ({how}); going back to the last snapshot")
        while True:
            self._recoveries += 1
            if self._recoveries > MAX_RECOVERIES:
                raise SnapshotError(
                    f"{self._mesh.name} was recovered {MAX_RECOVERIES} times, and each time ranks died again before the loop "
                    f"passed step {self._farthest:,}; %mesh logs shows their last output"
                )
            try:
                return (yield from self._once(started))
            except RanksError:
                if not self._mesh.deaths():
                    raise

    def _once(self, started: float) -> Generator[Future[Any], None, Rewind | None]:
        mesh = self._mesh
        healing = mesh.heal()
        yield healing
        replaced = healing.get()
        asked = holdings(mesh)
        yield asked
        chosen = self._choose(asked.get())
        forming = self._form()
        yield forming
        forming.get()
        history = list(self._history)
        again = [history[at] for at in cells_for(self._code, [code for _, code in history], python_of)]
        for number, code in again:
            future = mesh.run_cell(code, cell=number, listen=self._listen)
            yield future
            try:
                future.get()
            except RanksError as error:
                what = again_failed_text(mesh.name, self._number, number)
                raise type(error)(what, error.reports, error.results) from None
        wanted = reads(self._code, python_of)
        there = mesh.run(f"[name for name in {wanted!r} if name in globals()]")
        yield there
        self._check(replaced, [set(names) for names in there.get().values()])
        self._is_again = True
        where = f"before step {chosen.key[2]:,}" if chosen else "at the beginning, as it had no snapshot yet"
        ran = f"; ran {_cells_text([number for number, _ in again])} again" if again else ""
        took = format_seconds(time.monotonic() - started)
        self._say(f"{mesh.name}: {format_ranks(replaced)} replaced, the loop is back {where}, after {took}{ran}")
        if chosen is None:
            return None
        first = mesh.procs[0]
        return Rewind(0, chosen.key, tuple(first + holder for holder in chosen.holders), True)

    def _check(self, replaced: Sequence[int], there: Sequence[set[str]]) -> None:
        """Check that the new processes have every name that the cell reads and the other processes have."""
        lacking = {name for names in there for name in names if any(name not in there[rank] for rank in replaced)}
        if lacking:
            raise SnapshotError(
                f"{self._mesh.name}: the new process of {format_ranks(replaced)} has no {', '.join(sorted(lacking))}: no "
                "earlier cell that finished on all ranks seems to define it. Define it in the cell of the loop; or define it "
                "on the ranks now, and continue with %mesh rollback and the cell of the loop"
            )

    def _choose(self, held: Holdings) -> Common | None:
        """Return the snapshot to restore; None if no snapshot is complete and none was taken after step 0."""
        ranks = self._mesh.ranks
        found = [each for each in common(ranks, held) if each.key[0] in self._requests]
        if not found:
            taken = {key for owned in held.values() for keys in owned.values() for key in keys}
            if any(request in self._requests and step for request, _, step in taken):
                without = [rank for rank in ranks if not any(owned.get(rank) for owned in held.values())]
                raise SnapshotError(
                    f"{self._mesh.name}: no snapshot of {format_ranks(without or ranks)} is left, because the ranks that kept "
                    "it have died, too; checkpoint.load restores the last saved checkpoint"
                )
            return None
        return found[-1]


def again_failed_text(mesh: str, number: int, earlier: int) -> str:
    """Say that an earlier cell failed when it ran again: the error has the lines of that cell, not of the one that ended.

    Args:
        mesh: name of the mesh.
        number: number of the cell that recovers.
        earlier: number of the cell that ran again.
    """
    return (
        f"cell [{number}] has no result: to recover its loop, cell [{earlier}] ran again on {mesh}, and failed. Correct and "
        f"run cell [{earlier}], then %mesh rollback {mesh} and cell [{number}]; its loop continues from the last snapshot"
    )


def python_of(code: str) -> str:
    """Convert a cell from IPython's syntax to Python's."""
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager().transform_cell(code)


def _cells_text(numbers: Sequence[int]) -> str:
    return f"cell{'s' * (len(numbers) > 1)} {', '.join(f'[{number}]' for number in numbers)}"
