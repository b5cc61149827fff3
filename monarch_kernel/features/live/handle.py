"""Handles on loops that ranks are in: what the program does to steer them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from monarch_kernel.base.events import LoopView
from monarch_kernel.features.live.controller import LoopControl
from monarch_kernel.features.live.knobs import fitting
from monarch_kernel.features.live.loops import LoopRecord
from monarch_kernel.features.live.pace import Grant
from monarch_kernel.runtime.controller.runtime import Runtime

__all__ = ["SteeredLoop"]

T = TypeVar("T")


class SteeredLoop:
    """A loop of the ranks of a mesh (`monarch_kernel.live.loop`). All that is done to it returns at once.

    Args:
        runtime: the controller.
        key: request and number, which tell loops apart.
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
        """As it is now."""
        return self._control.view(self.key)

    def pause(self) -> int:
        """Have all ranks stand before the same step; gives which one, and does not wait until they do."""

        def pause(loop: LoopRecord) -> tuple[int, Grant]:
            grant = loop.pace.pause()
            return grant.horizon, grant

        return self._steer(pause)

    def resume(self) -> None:
        """Go on."""
        self._steer(lambda loop: (None, loop.pace.resume()))

    def step(self, count: int = 1) -> None:
        """Do that many steps more, and stand again.

        Raises:
            TypeError: ``count`` is no whole number.
            ValueError: it is less than 1.
        """
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"step({count!r}) takes how many steps, such as 10")
        self._steer(lambda loop: (None, loop.pace.step(count)))

    def stop(self) -> int:
        """End the loop at the same step on all ranks, as if there were no more steps; gives that step."""

        def stop(loop: LoopRecord) -> tuple[int, Grant]:
            change, grant = loop.pace.stop()
            return change.step, grant

        return self._steer(stop)

    def set(self, name: str, value: Any) -> int:
        """Turn a knob; gives the step from which on it has that value, the same on all ranks.

        Raises:
            LookupError: no rank has come to such a knob.
            TypeError: it is of another type.
            ValueError: it is out of its bounds.
        """

        def turn(loop: LoopRecord) -> tuple[int, Grant]:
            if name not in loop.knobs:
                known = ", ".join(loop.knobs) or "none yet"
                raise LookupError(f"no rank has come to live.knob({name!r}); knobs: {known}")
            change, grant = loop.pace.change(name, fitting(loop.knobs[name], value))
            return change.step, grant

        return self._steer(turn)

    def _steer(self, change: Callable[[LoopRecord], tuple[T, Grant | None]]) -> T:
        """Change how it goes on.

        Raises:
            RuntimeError: it is over.
        """

        def do(loop: LoopRecord) -> tuple[T, Grant | None]:
            if loop.pace.is_over:
                raise RuntimeError(f"the loop of {loop.mesh} is over, after {loop.pace.reached:,} steps")
            return change(loop)

        return self._control.steer(self.key, do)
