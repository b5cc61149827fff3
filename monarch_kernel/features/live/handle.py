"""Handles with which the program controls the loops of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from monarch_kernel.base.events import LoopView
from monarch_kernel.base.text import plural
from monarch_kernel.features.live.controller import LoopControl
from monarch_kernel.features.live.csv_text import csv_text
from monarch_kernel.features.live.knobs import fitting
from monarch_kernel.features.live.loops import LoopRecord
from monarch_kernel.features.live.pace import Grant
from monarch_kernel.runtime.controller.runtime import Runtime

__all__ = ["MOST_STEPS", "LiveLoop"]

MOST_STEPS = 1_000_000_000_000
"""Most steps of one `LiveLoop.step`."""

T = TypeVar("T")


class LiveLoop:
    """A running loop on the ranks of a mesh (`monarch_kernel.live.loop`). All methods return at once.

    Args:
        runtime: the controller.
        key: request and number, which identify the loop.
    """

    def __init__(self, runtime: Runtime, key: tuple[int, int]) -> None:
        self._control = LoopControl(runtime)
        self.key = key

    def __repr__(self) -> str:
        view = self.view()
        steps = "" if view.steps is None else f" of {view.steps:,}"
        where = f" in {view.where}" if view.where else ""
        return f"<loop of {view.mesh}{where}: {view.state}, step {view.step:,}{steps}>"

    def view(self) -> LoopView:
        """The current state of the loop."""
        return self._control.view(self.key)

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called, and ranks still have steps to do."""
        return self._control.is_stopping(self.key)

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the curves of the loop to a CSV file, a line for each point, and return the path of the file.

        The columns are ``name``, ``step``, ``mean`` (over ranks), ``min``, ``min_rank``, ``max`` and ``max_rank``. A curve has
        at most 256 points, so a point of a long loop stands for several steps.

        Raises:
            OSError: the file can't be written.
        """
        path = Path(path).expanduser()
        path.write_text(csv_text(self.view()), encoding="utf-8", newline="")
        return path

    def pause(self) -> int:
        """Pause all ranks before the same step, and return that step without waiting for them."""

        def pause(loop: LoopRecord) -> tuple[int, Grant]:
            grant = loop.pace.pause()
            return grant.horizon, grant

        return self._change(pause)

    def resume(self) -> None:
        """Resume the loop."""
        self._change(lambda loop: (None, loop.pace.resume()))

    def step(self, count: int = 1) -> None:
        """Run that many more steps, then pause again.

        Raises:
            TypeError: ``count`` is not an integer.
            ValueError: ``count`` is less than 1, or more than a loop can run.
        """
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"step({count!r}): pass a number of steps, such as 10")
        if count > MOST_STEPS:
            raise ValueError(f"step({count:,}): at most {MOST_STEPS:,} at once; resume() runs all that are left")
        self._change(lambda loop: (None, loop.pace.step(count)))

    def stop(self) -> int:
        """End the loop at the same step on all ranks, as if it had no more steps, and return that step."""

        def stop(loop: LoopRecord) -> tuple[int, Grant]:
            change, grant = loop.pace.stop()
            return change.step, grant

        return self._change(stop)

    def set(self, name: str, value: Any) -> int:
        """Set a knob, and return the step from which it has that value, the same on all ranks.

        Raises:
            LookupError: no rank has called `monarch_kernel.live.knob` with this name yet.
            TypeError: the value has another type than the knob.
            ValueError: the value is out of the bounds of the knob.
        """

        def turn(loop: LoopRecord) -> tuple[int, Grant]:
            if name not in loop.knobs:
                known = ", ".join(loop.knobs) or "none yet"
                raise LookupError(f"no rank has called live.knob({name!r}); knobs: {known}")
            change, grant = loop.pace.change(name, fitting(loop.knobs[name], value))
            return change.step, grant

        return self._change(turn)

    def _change(self, change: Callable[[LoopRecord], tuple[T, Grant | None]]) -> T:
        """Apply a change to the loop.

        Raises:
            RuntimeError: the loop is over.
        """

        def do(loop: LoopRecord) -> tuple[T, Grant | None]:
            if loop.pace.is_over:
                raise RuntimeError(f"the loop of {loop.mesh} is over, after {plural(loop.pace.progress, 'step')}")
            return change(loop)

        return self._control.change(self.key, do)
