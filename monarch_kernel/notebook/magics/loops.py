"""What is done to a loop of ranks, by a line of ``%mesh loop`` or by a viewer, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monarch_kernel.features.live.handle import SteeredLoop
from monarch_kernel.notebook.syntax.lines import UsageProblem

__all__ = ["steer"]


def steer(loop: SteeredLoop, command: str, *, count: int = 1, knobs: Mapping[str, Any] | None = None) -> str:
    """Do it, and say what comes of it.

    Args:
        loop: that is steered.
        command: ``pause``, ``resume``, ``step``, ``stop`` or ``set``.
        count: of steps.
        knobs: what is to be turned: name -> value.

    Raises:
        UsageProblem: it can't be done.
    """
    try:
        return _steer(loop, command, count, knobs or {})
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UsageProblem(str(error)) from None


def _steer(loop: SteeredLoop, command: str, count: int, knobs: Mapping[str, Any]) -> str:
    if command == "pause":
        return f"all ranks stand before step {loop.pause():,}"
    if command == "resume":
        loop.resume()
        return "it goes on"
    if command == "step":
        loop.step(count)
        return f"{count:,} step{'s' * (count != 1)} more"
    if command == "stop":
        return f"it ends before step {loop.stop():,}"
    return "\n".join(f"{name} is {value!r} from step {loop.set(name, value):,} on" for name, value in knobs.items())
