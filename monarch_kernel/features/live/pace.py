"""Grants steps to the ranks of a loop, so that a change takes effect at the same step on all ranks, and no rank waits.

Theory of operation. Ranks of a loop run ahead of what the controller knows about them. For a change (a knob, a stop) to take
effect at the same step on all ranks, no rank can have started that step yet. So ranks only start steps that the controller
*granted*: those below a number, the horizon. The controller moves the horizon as the ranks approach it, so that no rank waits;
a change takes effect at the current horizon. To pause a loop, the controller stops moving its horizon: all ranks then stop
before the same step, even if their code takes different paths to it. This needs no collective, and costs a rank one comparison
per step.

The distance of the horizon determines how soon a change takes effect. It is twice the number of steps that the fastest rank
does in `AHEAD_S`; where a step takes longer than that, it is two steps: the one that runs, and the one that may follow it. A
rank reports when it has done half of that distance since its last report, so each rank reports to the controller ten times a
second. With very many ranks that would be too often: from 100 ranks on, the interval is one millisecond per rank.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from monarch_kernel.net.wire.messages import Change

__all__ = ["AHEAD_S", "ALARM", "PREEMPTION", "ROLLBACK", "Grant", "Pace", "StepGrant"]

PREEMPTION = "\0preemption"
"""The name of the change at whose step all ranks save their work, because one of them must end."""

ALARM = "\0alarm "
"""Begins the name of a change at whose step all ranks call a function of the loop, such as ``on_nan``."""

ROLLBACK = f"{ALARM}rollback "
"""Begins the name of a change at whose step all ranks restore the state of a snapshot."""

AHEAD_S = 0.1
"""Time for which ranks may run before the controller grants more; far longer than a message takes, also on busy machines."""

_AHEAD_S_PER_RANK = 0.001

_FIRST = 2
_MOST = 10_000
_FREE = 1 << 62


class Grant(NamedTuple):
    """Permission for ranks to start steps.

    Attributes:
        horizon: steps below this number may start.
        ahead: distance in steps between the fastest rank and the horizon; a rank reports each time it has done half of it.
        changes: the changes that the receivers may not know yet.
        is_paused: whether the horizon stays where it is.
    """

    horizon: int
    ahead: int
    changes: tuple[Change, ...] = ()
    is_paused: bool = False


class StepGrant:
    """The steps that one rank may start: the rank's counterpart of a `Pace`.

    Attributes:
        horizon: steps below this number may start.
        values: name of a knob -> its current value, for knobs that were set.
        is_stopped: whether the loop ends before the step that was started last.
        is_preempted: whether the rank must save its work before the step that was started last.
        is_paused: whether the controller grants no more steps for now.
        alarms: the changes of `ALARM` that are due at the step that was started last; the loop removes them.
    """

    def __init__(self) -> None:
        self.alarms: list[Change] = []
        self.horizon = 0
        self.is_paused = False
        self.values: dict[str, Any] = {}
        self.is_stopped = self.is_preempted = False
        self._lock = threading.Lock()  # another thread receives grants
        self._step = -1
        self._coming: dict[tuple[int, str], Change] = {}
        self._reported = 0
        self._every = 1

    def granted(self, grant: Grant) -> None:
        """Apply a grant of the controller; called in the order in which the controller sent them."""
        with self._lock:
            self.is_paused = grant.is_paused
            self._coming |= {(change.step, change.name): change for change in grant.changes}
            self._every = max(1, grant.ahead // 2)
            self.horizon = max(self.horizon, grant.horizon)  # last: from now on the steps below it may start

    def may_begin(self, step: int) -> bool:
        """Whether a step may start; if not, the rank must wait for a grant."""
        return step < self.horizon

    def begin(self, step: int) -> None:
        """Start a step, and apply the changes that are due at it."""
        self._step = step
        if not self._coming:
            return
        with self._lock:
            due = sorted((each for each in self._coming.values() if each.step <= step), key=lambda change: change.step)
            for change in due:
                del self._coming[change.step, change.name]
        for change in due:
            if change.name == PREEMPTION:
                self.is_preempted = True
            elif change.name.startswith(ALARM):
                self.alarms.append(change)
            elif change.name:
                self.values[change.name] = change.value
            else:
                self.is_stopped = True

    def go_free(self) -> None:
        """Let all steps start, because there is no controller any more."""
        with self._lock:
            self.horizon = self._every = _FREE

    def come_back(self) -> tuple[int, int]:
        """Hand the loop to a new controller. Called on another thread than the one that starts steps.

        Returns:
            The step that was started last, and the number below which steps may start until the next grant.
        """
        with self._lock:
            if self.horizon == _FREE:
                self.horizon = 0  # first: from now on no further step passes
                self.horizon = self._step + 2  # one may have passed, and be about to start
                self._every = 1
            return max(0, self._step), self.horizon

    def turned(self) -> dict[str, Any]:
        """The values of knobs that were set, including changes to later steps."""
        with self._lock:
            coming = sorted(self._coming.values(), key=lambda change: change.step)
        return self.values | {change.name: change.value for change in coming if change.name}

    def should_report(self, step: int, *, waits: bool = False) -> bool:
        """Whether the rank must report its progress now, so that the next grant arrives before it is needed.

        Args:
            step: the step that starts, or that waits for a grant.
            waits: whether the rank waits for that grant; then it reports once in any case.
        """
        if step - self._reported < (1 if waits else self._every):
            return False
        self._reported = step
        return True


@dataclass
class Pace:
    """The controller's state of one loop on several ranks. Pure: it takes what ranks report, and returns grants for them.

    Attributes:
        horizon: steps below this number may start.
        is_paused: whether the horizon stays where it is.
        apart: ranks stay less than this many steps apart, so that there is a step to which all can go back; 0 for any
            distance, else 2 or more.
        awaited: ranks that have not started the loop yet; they count as being before its first step.
        first: the first step of the loop.
        changes: all changes, in order; a rank that joins late applies them from the first on.
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
    _progress: int = 0

    @property
    def progress(self) -> int:
        """The step to show: that of the slowest rank. A rank that fails, restarts or joins late does not set it back."""
        return self._progress

    @property
    def is_pausing(self) -> bool:
        """Whether the loop is to pause, and a rank still has to do steps that it was granted."""
        reached = self._reached.copy()  # other threads read this
        return self.is_paused and any(step < self.horizon for rank, step in reached.items() if rank not in self._left)

    @property
    def reached(self) -> int:
        """The step of the slowest rank that is in the loop; once the loop is over, the step that all ranks reached."""
        reached = self._reached.copy()  # other threads read this
        return min((step for rank, step in reached.items() if self.is_over or rank not in self._left), default=0)

    @property
    def is_over(self) -> bool:
        """Whether ranks joined the loop, and all have left it."""
        return bool(self._left) and len(self._left) == len(self._reached)

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called, and ranks still have steps to do."""
        return any(not change.name for change in self.changes) and not self.is_over

    def joined(self, rank: int, step: int = 0, horizon: int = 0) -> Grant:
        """A rank starts the loop, or is in it already; returns the grant for that rank.

        Args:
            rank: number of its process.
            step: the step of the rank.
            horizon: steps below this number may already start on the rank.
        """
        self.awaited.discard(rank)
        self._reached[rank] = max(step, self._reached.get(rank, 0))
        self.horizon = max(self.horizon, horizon)
        self._progress = max(self._progress, self.reached)
        return self._grant(*self.changes)

    def progressed(self, rank: int, step: int, step_s: float) -> Grant | None:
        """A rank reports its progress; returns the grant for all ranks, if there is a new one.

        Args:
            rank: number of its process.
            step: the step that the rank starts or waits for.
            step_s: seconds that a step takes on this rank; 0 if not known yet.
        """
        self._reached[rank] = max(step, self._reached.get(rank, 0))
        self._progress = max(self._progress, self.reached)
        if step_s > 0:
            self._step_s[rank] = step_s
        return self._advance()

    def is_in(self, rank: int) -> bool:
        """Whether a rank is in the loop."""
        return rank in self._reached and rank not in self._left

    def left(self, rank: int, steps: int = 0) -> Grant | None:
        """A rank is out of the loop, for whatever reason; returns the grant for the others, if there is a new one.

        Args:
            rank: number of its process.
            steps: how many steps it has started, if it has reported that.
        """
        self._reached[rank] = max(steps, self._reached.get(rank, 0))
        self._progress = max(self._progress, self.reached)
        self._left.add(rank)
        self._progress = max(self._progress, self.reached)  # without this rank, which may have been the slowest
        return self._advance()

    def missed(self, rank: int) -> Grant | None:
        """An awaited rank will not start the loop; returns the grant for the others, if there is a new one."""
        self.awaited.discard(rank)
        return self._advance()

    def change(self, name: str, value: Any) -> tuple[Change, Grant]:
        """Set a knob; returns the change, with its step, and the grant for all ranks."""
        change = Change(self.horizon, name, value)
        self.changes = [each for each in self.changes if (each.step, each.name) != (change.step, name)] + [change]
        return change, self._grant(change)

    def stop(self) -> tuple[Change, Grant]:
        """End the loop at the same step on all ranks, also while it is paused."""
        ends = [change for change in self.changes if not change.name]
        change = ends[0] if ends else Change(self.horizon, "")
        if not ends:
            self.changes.append(change)
        self.horizon = max(self.horizon, change.step + 1)
        return change, self._grant(change)

    def preempt(self) -> Grant:
        """Make all ranks save their work before the same step, also while the loop is paused; several ranks may ask for it."""
        fastest = max((step for rank, step in self._reached.items() if self.is_in(rank)), default=0)
        for change in self.changes:
            if change.name == PREEMPTION and change.step > fastest:  # another rank has asked for it
                return self._grant(change)
        change = Change(self.horizon, PREEMPTION)
        self.changes.append(change)
        self.horizon += 1
        return self._grant(change)

    def pause(self) -> Grant:
        """Pause the loop: all ranks will stop at the current horizon. Returns the grant for all ranks."""
        self.is_paused = True
        return self._grant()

    def resume(self) -> Grant:
        """Resume the loop. Returns the grant for all ranks."""
        self.is_paused = False
        return self._advance() or self._grant()

    def step(self, count: int = 1) -> Grant:
        """Run some more steps, then pause again.

        Raises:
            ValueError: ``count`` is less than 1.
        """
        if count < 1:
            raise ValueError(f"can't run {count} steps: at least 1")
        self.is_paused = True
        self.horizon += count
        return self._grant()

    def _grant(self, *changes: Change) -> Grant:
        return Grant(self.horizon, self._ahead, changes, self.is_paused)

    def _advance(self) -> Grant | None:
        """Move the horizon if ranks approach it."""
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
