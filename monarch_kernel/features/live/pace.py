"""How far the ranks of a loop may go, and at which step a change takes effect: at the same one on all, with no rank waiting.

Theory of operation. Ranks of a loop run ahead of what the controller knows of them. For a change (a knob, a stop) to take
effect on all at the same step that step must be one that no rank can have begun. So ranks only begin steps that they were
*granted*: those below a number, the horizon. The controller moves the horizon as the ranks come near it, so that none ever
waits; a change is made at the horizon as it is now. To pause is to move it no further: all ranks then stand before the same
step, however different the ways by which they came there. No collective is needed, and a rank pays a comparison for a step.

How far ahead the horizon is decides how soon a change is felt. It is twice as far as ranks go in `AHEAD_S`, by what the fastest
does; where a step takes longer than that, two steps: the one that runs, and the one that may follow it. Ranks report when they
have done half of that since the last time, so the controller hears each of them ten times a second. Of very many that would be
too much: from 100 on it is a millisecond for each of them.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from monarch_kernel.net.wire.messages import Change

__all__ = ["AHEAD_S", "Grant", "Lease", "Pace"]

AHEAD_S = 0.1
"""What ranks may do before the controller is heard again; far longer than a message takes, also on busy machines."""

_AHEAD_S_PER_RANK = 0.001

_FIRST = 2
_MOST = 10_000
_FREE = 1 << 62


class Grant(NamedTuple):
    """What ranks are told.

    Attributes:
        horizon: steps below this number may begin.
        ahead: so many steps the horizon is before the first rank; say how far you are when you have done half of that.
        changes: all that may be news to somebody who is told this.
        is_paused: whether the horizon is to stay where it is.
    """

    horizon: int
    ahead: int
    changes: tuple[Change, ...] = ()
    is_paused: bool = False


class Lease:
    """What one rank may do: the other end of a `Pace`.

    Attributes:
        horizon: steps below this number may begin.
        values: name of a knob -> what it is now, of those that were turned.
        is_stopped: whether the loop ends before the step that was begun last.
        is_paused: whether nothing more is to be granted for now.
    """

    def __init__(self) -> None:
        self.horizon = 0
        self.is_paused = False
        self.values: dict[str, Any] = {}
        self.is_stopped = False
        self._lock = threading.Lock()  # what is granted comes on another thread
        self._step = -1
        self._coming: dict[tuple[int, str], Change] = {}
        self._reported = 0
        self._every = 1

    def granted(self, grant: Grant) -> None:
        """Take what the controller says; in the order in which it was said."""
        with self._lock:
            self.is_paused = grant.is_paused
            self._coming |= {(change.step, change.name): change for change in grant.changes}
            self._every = max(1, grant.ahead // 2)
            self.horizon = max(self.horizon, grant.horizon)  # last: from now on the steps before it may begin

    def may_begin(self, step: int) -> bool:
        """Whether a step may begin; if not, more must be granted first."""
        return step < self.horizon

    def begin(self, step: int) -> None:
        """Have what changes at this step take effect."""
        self._step = step
        if not self._coming:
            return
        with self._lock:
            due = sorted((each for each in self._coming.values() if each.step <= step), key=lambda change: change.step)
            for change in due:
                del self._coming[change.step, change.name]
        for change in due:
            if change.name:
                self.values[change.name] = change.value
            else:
                self.is_stopped = True

    def go_free(self) -> None:
        """Nobody steers any more: all steps may begin."""
        with self._lock:
            self.horizon = self._every = _FREE

    def come_back(self) -> tuple[int, int]:
        """Somebody else steers from now on; for another thread than the one that begins steps.

        Returns:
            The step that was begun last, and the number below which steps may begin until more is granted.
        """
        with self._lock:
            if self.horizon == _FREE:
                self.horizon = 0  # first: from now on no step passes that had not
                self.horizon = self._step + 2  # one had, perhaps, and is about to begin
                self._every = 1
            return max(0, self._step), self.horizon

    def turned(self) -> dict[str, Any]:
        """What knobs are, or will be at the step for which that was said last."""
        with self._lock:
            coming = sorted(self._coming.values(), key=lambda change: change.step)
        return self.values | {change.name: change.value for change in coming if change.name}

    def should_report(self, step: int, *, waits: bool = False) -> bool:
        """Whether it is time to say how far one is, for more to be granted before it is needed.

        Args:
            step: that begins, or could begin if it were granted.
            waits: whether one waits for that; then it is said in any case, once.
        """
        if step - self._reported < (1 if waits else self._every):
            return False
        self._reported = step
        return True


@dataclass
class Pace:
    """One loop on several ranks, as the controller has it; pure: it is told what ranks say, and gives what they are to be told.

    Attributes:
        horizon: steps below this number may begin.
        is_paused: whether it stays where it is.
        apart: a rank may begin a step only if all have come nearer to it than so many, so that there is one to which all can
            go back; 0 for any number, else 2 or more.
        awaited: ranks that are yet to begin the loop, which count as before its first step.
        first: that step.
        changes: all that were made, in order: who comes late begins with the first.
    """

    horizon: int = _FIRST
    is_paused: bool = False
    apart: int = 0
    awaited: set[int] = field(default_factory=set)
    first: int = 0
    changes: list[Change] = field(default_factory=list)
    _reached: dict[int, int] = field(default_factory=dict)
    _step_s: dict[int, float] = field(default_factory=dict)
    _left: set[int] = field(default_factory=set)
    _ahead: int = _FIRST

    @property
    def reached(self) -> int:
        """The step that the slowest rank is at, of those that are in the loop; at the end the one that all came to."""
        reached = self._reached.copy()  # another thread may look
        return min((step for rank, step in reached.items() if self.is_over or rank not in self._left), default=0)

    @property
    def is_over(self) -> bool:
        """Whether there were ranks in the loop, and are none any more."""
        return bool(self._left) and len(self._left) == len(self._reached)

    def joined(self, rank: int, step: int = 0, horizon: int = 0) -> Grant:
        """A rank begins the loop, or is in it already: what it is to be told.

        Args:
            rank: number of its process.
            step: that it is at.
            horizon: steps below this number it may begin already.
        """
        self.awaited.discard(rank)
        self._reached[rank] = max(step, self._reached.get(rank, 0))
        self.horizon = max(self.horizon, horizon)
        return self._grant(*self.changes)

    def progressed(self, rank: int, step: int, step_s: float) -> Grant | None:
        """A rank is at the beginning of a step, of which each takes it so long: what all are to be told, if anything.

        Args:
            rank: number of its process.
            step: that it begins, or waits for.
            step_s: seconds; 0 if that is not known yet.
        """
        self._reached[rank] = max(step, self._reached.get(rank, 0))
        if step_s > 0:
            self._step_s[rank] = step_s
        return self._advance()

    def is_in(self, rank: int) -> bool:
        """Whether a rank is in the loop."""
        return rank in self._reached and rank not in self._left

    def left(self, rank: int, steps: int = 0) -> Grant | None:
        """A rank is out of the loop, by whatever way: what the others are to be told, if anything.

        Args:
            rank: number of its process.
            steps: that it has begun, if it has said so.
        """
        self._reached[rank] = max(steps, self._reached.get(rank, 0))
        self._left.add(rank)
        return self._advance()

    def missed(self, rank: int) -> Grant | None:
        """A rank that was awaited will not begin the loop: what the others are to be told, if anything."""
        self.awaited.discard(rank)
        return self._advance()

    def change(self, name: str, value: Any) -> tuple[Change, Grant]:
        """Turn a knob: when that takes effect, and what all are to be told."""
        change = Change(self.horizon, name, value)
        self.changes = [each for each in self.changes if (each.step, each.name) != (change.step, name)] + [change]
        return change, self._grant(change)

    def stop(self) -> tuple[Change, Grant]:
        """End the loop, at the same step on all ranks, also while it is paused."""
        ends = [change for change in self.changes if not change.name]
        change = ends[0] if ends else Change(self.horizon, "")
        if not ends:
            self.changes.append(change)
        self.horizon = max(self.horizon, change.step + 1)
        return change, self._grant(change)

    def pause(self) -> Grant:
        """Let no rank begin a step that it may not begin already: what all are to be told; they will stand at the horizon."""
        self.is_paused = True
        return self._grant()

    def resume(self) -> Grant:
        """Go on: what all are to be told."""
        self.is_paused = False
        return self._advance() or self._grant()

    def step(self, count: int = 1) -> Grant:
        """Do some steps more, and stand again.

        Raises:
            ValueError: ``count`` is less than 1.
        """
        if count < 1:
            raise ValueError(f"{count} steps can't be done; at least 1")
        self.is_paused = True
        self.horizon += count
        return self._grant()

    def _grant(self, *changes: Change) -> Grant:
        return Grant(self.horizon, self._ahead, changes, self.is_paused)

    def _advance(self) -> Grant | None:
        """Move the horizon, if ranks come near it."""
        if self.is_paused or self.is_over:
            return None
        fastest = min(self._step_s.values(), default=0.0)
        ahead_s = 2 * max(AHEAD_S, _AHEAD_S_PER_RANK * len(self._reached))
        self._ahead = min(_MOST, max(_FIRST, math.ceil(ahead_s / fastest))) if fastest else _FIRST
        reached = [step for rank, step in self._reached.items() if rank not in self._left]
        first, last = max(reached, default=0), min(reached, default=0)
        if self.awaited:
            last = min(last, self.first)
        if self.apart:
            self._ahead = min(self._ahead, self.apart)
            horizon = min(first + self._ahead, last + self.apart)
            if horizon < self.horizon + self._ahead - self._ahead // 2:
                return None
            self.horizon = horizon
        elif self.horizon - first > self._ahead // 2:
            return None
        else:
            self.horizon = first + self._ahead
        return self._grant()
