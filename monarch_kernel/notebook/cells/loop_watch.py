"""Says below a cell what goes wrong in the live loops that it runs: `monarch_kernel.features.watch`.

Values and times come with the reports of the loops, so that the ranks are not asked for them. So do the times of collectives
that Python starts, which are compared once a second to find stragglers. For other collectives, the ranks are asked how many
collectives they have started: five times a second in the first seconds of a loop, and again when one rank seems to be late,
otherwise once a second. Only when a straggler has been found, the ranks are asked at which line they are. Each message comes
once, and is in the view until the cell ends.

Nothing here waits: the code that waits for the cell calls `LoopWatch.poll`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from monarch_kernel.base.events import WaitView
from monarch_kernel.errors import Failure
from monarch_kernel.features.watch.findings import Trouble, straggler_text
from monarch_kernel.features.watch.stragglers import (
    LateRank,
    Straggler,
    StragglerWatch,
    latest_of,
    look_at,
    place_of,
)
from monarch_kernel.notebook.cells.cell_names import located
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["LoopWatch"]

_READ_S = 0.5
_SETTLE_S = 0.6
"""A message waits for the reports of the other ranks, which may change it."""

_COMPARE_S = 1.0
_COMPARISONS = 2
"""So many comparisons in a row must find the same straggler."""

_BURST_S = 10.0
_LOOK_S = 0.2
_LOOK_SELDOM_S = 1.0
_TRIES = 40
_EQUAL_PLACES = 4
_LEAST_PLACES = 2
"""A straggler's line is the first one that this many looks find, or after all tries the most frequent one of at least two."""

_ANSWER_S = 1.0
_REST_S = 60.0
_MAX_RANKS = 64
"""In larger meshes the ranks are not asked by this watch: the answers would take the kernel too long."""

_MAX_TOLD = 8


class LoopingMesh(Protocol):
    """The part of `ProcMesh` that this module uses."""

    def progress(self) -> Future[dict[int, int | Failure]]:
        """Ask all ranks how many collectives they have started."""
        ...

    def doing(self) -> Future[dict[int, Doing | Failure]]:
        """Ask all ranks what they do."""
        ...

    def lateness(self, last_s: float) -> Mapping[int, LateRank]:
        """Return how late ranks have started the collectives of the last seconds, as far as that is known."""
        ...

    def show_waits(self, source: object, waits: Sequence[WaitView]) -> None:
        """Show lines in the views of the mesh, in place of earlier ones from the same source."""
        ...


class LoopWatch:
    """Watches the loops of one run of a cell.

    Args:
        mesh: the whole mesh.
        ranks: the ranks of the cell.
        trouble: returns what is wrong with the running loops of the cell, by number of the loop; none if there is no loop.
        say: writes a line to the output of the cell.
        asks: whether to ask ranks what they do.
        now: the time.
    """

    def __init__(
        self,
        mesh: LoopingMesh,
        ranks: Collection[int],
        trouble: Callable[[], Mapping[int, Trouble]],
        say: Callable[[str], None],
        now: float,
        *,
        asks: bool = True,
    ) -> None:
        self._mesh = mesh
        self._ranks = frozenset(ranks)
        self._trouble = trouble
        self._say = say
        self._asks = asks and 1 < len(self._ranks) <= _MAX_RANKS
        self._read_at = now + _READ_S
        self._seen: dict[tuple[int, str], float] = {}
        self._told: dict[tuple[int, str], str] = {}
        self._stragglers: dict[int, StragglerWatch] = {}  # by number of the loop
        self._compare_at = now + _COMPARE_S
        self._compared_since: dict[int, float] = {}  # by number of the loop
        self._latest: list[int | None] = []  # what the last comparisons have found
        self._look_at = float("inf")
        self._burst_until = self._rested_at = 0.0
        self._look: Future[dict[int, int | Failure]] | None = None
        self._places: Future[dict[int, Doing | Failure]] | None = None
        self._asked_at = 0.0
        self._found: tuple[int, Straggler] | None = None  # whose line is not known yet
        self._seen_at: list[str] = []
        self._tries = 0

    def poll(self, now: float) -> None:
        """Read what the loops have reported, and look at the ranks, when that is due."""
        if self._found is not None:
            self._poll_place(now)
        elif self._look is not None:
            self._poll_look(now)
        elif now >= self._look_at:
            self._look, self._asked_at = self._mesh.progress(), now
        if now >= self._read_at:
            self._read_at = now + _READ_S
            self._read(now, _SETTLE_S)
        if self._asks and now >= self._compare_at and self._found is None:
            self._compare_at = now + _COMPARE_S
            self._compare(now)

    def end(self, now: float) -> None:
        """The cell has ended."""
        for future in (self._look, self._places):
            if future is not None:
                future.cancel()
        self._look = self._places = None
        if self._found is not None:
            self._tell_straggler()
        self._read(now, 0.0)
        if self._told:
            self._mesh.show_waits(self, ())

    def _poll_look(self, now: float) -> None:
        assert self._look is not None
        if not self._look.done():
            if now < self._asked_at + _ANSWER_S:
                return
            self._look.cancel()  # native code holds the GIL of a rank
        answers, self._look = self._look.get(), None
        self._look_at = now + (_LOOK_S if now < self._burst_until else _LOOK_SELDOM_S)
        loops = self._trouble()
        if not loops:
            return
        number = list(loops)[-1]
        watch = self._stragglers.setdefault(number, StragglerWatch())
        straggler = watch.take(look_at({rank: each for rank, each in answers.items() if rank in self._ranks}))
        if straggler is not None:
            self._find(number, straggler)
        elif watch.is_close and now >= self._rested_at:
            self._burst(now)

    def _compare(self, now: float) -> None:
        """Compare when the ranks have started the last collectives of the loop."""
        if not (loops := self._trouble()):
            return
        number = list(loops)[-1]
        if number not in self._compared_since:  # what an earlier loop has started says nothing about this one
            self._compared_since[number], self._latest = now, []
        late = self._mesh.lateness(now - self._compared_since[number])
        late = {rank: each for rank, each in late.items() if rank in self._ranks}
        found = latest_of(late, loops[number].step_s())
        self._latest = [*self._latest, None if found is None else found.rank][-_COMPARISONS:]
        if found is not None and self._latest == [found.rank] * _COMPARISONS:
            self._find(number, found)

    def _find(self, number: int, straggler: Straggler) -> None:
        """A rank is a straggler: its line is next, unless the rank was named before."""
        if (number, _key(straggler)) not in self._told:
            self._found, self._tries, self._seen_at = (number, straggler), _TRIES, []

    def _poll_place(self, now: float) -> None:
        """Ask ranks what they do until the straggler is not in a collective."""
        assert self._found is not None
        if self._places is None:
            self._places, self._asked_at = self._mesh.doing(), now
        if not self._places.done():
            if now < self._asked_at + _ANSWER_S:
                return
            self._places.cancel()
        answers, self._places = self._places.get(), None
        rank, self._tries = self._found[1].rank, self._tries - 1
        others = [each for other, each in answers.items() if other in self._ranks - {rank}]
        answer = answers.get(rank)
        place = place_of(located(answer) if isinstance(answer, Doing) else None, others)
        self._seen_at += [place] * bool(place)
        if self._most_frequent()[1] >= _EQUAL_PLACES or self._tries <= 0:
            self._tell_straggler()

    def _most_frequent(self) -> tuple[str, int]:
        """The line at which the straggler was found most often, and how often."""
        return next(iter(Counter(self._seen_at).most_common(1)), ("", 0))

    def _tell_straggler(self) -> None:
        assert self._found is not None
        (number, straggler), self._found = self._found, None
        place, looks = self._most_frequent()
        place = place if looks >= _LEAST_PLACES else ""
        trouble = self._trouble().get(number)
        text = straggler_text(replace(straggler, place=place), 0.0 if trouble is None else trouble.step_s())
        self._tell(number, _key(straggler), text)

    def _burst(self, now: float) -> None:
        """Look often for some seconds."""
        self._look_at, self._burst_until, self._rested_at = now, now + _BURST_S, now + _REST_S

    def _read(self, now: float, settle_s: float) -> None:
        loops = self._trouble()
        if loops and self._asks and not self._burst_until:
            self._burst(now)
        for number, trouble in loops.items():
            for key, text in trouble.texts().items():
                seen = self._seen.setdefault((number, key), now)
                if now >= seen + settle_s:
                    self._tell(number, key, text)

    def _tell(self, number: int, key: str, text: str) -> None:
        if (number, key) in self._told:
            return
        if len(self._told) >= _MAX_TOLD:
            text = ""
        if len(self._told) == _MAX_TOLD:
            self._say("live loop: further messages of this cell are left out")
        self._told[number, key] = text
        if text:
            self._say(f"live loop: {text}")
            self._mesh.show_waits(self, [WaitView(f"live loop: {each}") for each in self._told.values() if each])


def _key(straggler: Straggler) -> str:
    return f"straggler {straggler.rank}"
