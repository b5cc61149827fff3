"""A cell whose loop goes on by itself when ranks die: what is done between the death and the next step.

Theory of operation. The processes that are left have models, optimizers and groups that belong to a process group which is no
more, and a new process has nothing at all. So all of them run the cell again, after the cells that made what it needs
(`notebook.cells.replay`), as a user would; what training has come to is in their snapshots, and is put back where the cell
comes to `live.snapshot` (`train.snapshots.buddy_store`). The request is another one, the cell is the same: it goes on writing
where it wrote.

Ranks may die at any time, also meanwhile: then it begins anew. It is given up when they have died several times without
having come farther than ever before: what dies of itself at a certain step would go on doing so.
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

__all__ = ["Recovery", "python_of"]

MOST_IN_VAIN = 5
"""So often a cell is brought back that comes no farther."""


class Recovery:
    """Of one cell.

    Args:
        mesh: where it runs.
        code: of it.
        history: number and code of earlier cells, those that ran to their end on all ranks.
        form: has the process group formed anew.
        say: writes a line where the cell writes.
        listen: gets what earlier cells write that run again.
    """

    def __init__(
        self,
        mesh: ProcMesh,
        code: str,
        history: Sequence[tuple[int, str]],
        form: Callable[[], Future[Any]],
        say: Callable[[str], None],
        listen: Callable[[Any], None],
    ) -> None:
        self._mesh = mesh
        self._code = code
        self._history = history
        self._form = form
        self._say = say
        self._listen = listen
        self._requests: list[int] = []  # that have run the cell
        self._is_again = False
        self._farthest = -1
        self._in_vain = 0

    def wants(self, request: int, error: RanksError) -> bool:
        """Whether the cell is to go on, in spite of the error that ended it."""
        self._requests.append(request)
        kinds = {failure.kind for failure in error.reports.values()}
        if "lost" not in kinds or not kinds <= {"lost", "released"} or not self._code:
            return False
        if not self._is_again and not LoopControl(self._mesh._runtime).recovers(request):
            return False
        if not self._mesh.is_whole:
            self._say(f"{self._mesh.name} is a part of a mesh: only what runs on all of its ranks recovers")
            return False
        return True

    def steps(self, error: RanksError) -> Generator[Future[Any], None, Rewind | None]:
        """What is to be waited for, one after the other; gives with what the cell is to be sent again.

        Raises:
            MonarchError: it can't go on.
        """
        begun = time.monotonic()
        step = max((loop.view().step for loop in self._mesh.loops if loop.key[0] in self._requests), default=0)
        if step > self._farthest:
            self._farthest, self._in_vain = step, 0
        died = {point.rank: failure for point, failure in error.reports.items() if failure.kind == "lost"}
        how = re.split(r";| \(", died[min(died)].message)[0]
        self._say(f"{self._mesh.name}: {format_ranks(died)} died ({how}); going back to the last snapshot")
        while True:
            self._in_vain += 1
            if self._in_vain > MOST_IN_VAIN:
                raise SnapshotError(
                    f"{self._mesh.name} was brought back {MOST_IN_VAIN} times, and never came farther than step "
                    f"{self._farthest:,} before ranks died again; %mesh logs has their last words"
                )
            try:
                return (yield from self._once(begun))
            except RanksError:
                if not self._mesh.deaths():
                    raise

    def _once(self, begun: float) -> Generator[Future[Any], None, Rewind | None]:
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
            future.get()
        wanted = reads(self._code, python_of)
        there = mesh.run(f"[name for name in {wanted!r} if name in globals()]")
        yield there
        self._check(replaced, [set(names) for names in there.get().values()])
        self._is_again = True
        where = f"before step {chosen.key[2]:,}" if chosen else "at the beginning, for it had no snapshot yet"
        ran = f"; ran {_cells_text([number for number, _ in again])} again" if again else ""
        took = format_seconds(time.monotonic() - begun)
        self._say(f"{mesh.name}: {format_ranks(replaced)} replaced, the loop is back {where}, after {took}{ran}")
        if chosen is None:
            return None
        first = mesh.procs[0]
        return Rewind(0, chosen.key, tuple(first + holder for holder in chosen.holders), True)

    def _check(self, replaced: Sequence[int], there: Sequence[set[str]]) -> None:
        """See that new processes have what the others have, of all that the cell reads."""
        lacking = {name for names in there for name in names if any(name not in there[rank] for rank in replaced)}
        if lacking:
            raise SnapshotError(
                f"{self._mesh.name}: the new process of {format_ranks(replaced)} has no {', '.join(sorted(lacking))}: no "
                "earlier cell that ran to its end on all ranks makes it, as far as its text tells. Make it in the cell of the "
                "loop; or have the ranks make it now, and go on by %mesh rollback and that cell"
            )

    def _choose(self, held: Holdings) -> Common | None:
        """The snapshot to go back to; None if the loop has begun, and none is complete."""
        ranks = self._mesh.ranks
        found = [each for each in common(ranks, held) if each.key[0] in self._requests]
        if not found:
            taken = {key for owned in held.values() for keys in owned.values() for key in keys}
            if any(request in self._requests and step for request, _, step in taken):
                without = [rank for rank in ranks if not any(owned.get(rank) for owned in held.values())]
                raise SnapshotError(
                    f"{self._mesh.name}: there is no snapshot of {format_ranks(without or ranks)} any more: who kept it has "
                    "died, too; checkpoint.load goes on from what was saved"
                )
            return None
        return found[-1]


def python_of(code: str) -> str:
    """A cell in Python's own syntax."""
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager().transform_cell(code)


def _cells_text(numbers: Sequence[int]) -> str:
    return f"cell{'s' * (len(numbers) > 1)} {', '.join(f'[{number}]' for number in numbers)}"
