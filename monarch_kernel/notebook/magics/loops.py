"""Controls a live loop for ``%mesh loop`` and for viewers, and describes the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monarch_kernel.features.live.handle import LiveLoop
from monarch_kernel.notebook.syntax.lines import UsageProblem

__all__ = ["control_loop"]


def control_loop(loop: LiveLoop, command: str, *, count: int = 1, knobs: Mapping[str, Any] | None = None) -> str:
    """Control a live loop or set its knobs, and describe the result.

    Args:
        loop: the loop to control.
        command: ``pause``, ``resume``, ``step``, ``stop`` or ``set``.
        count: number of steps.
        knobs: the knobs to set: name -> value.

    Raises:
        UsageProblem: the loop refuses the command.
    """
    try:
        return _control(loop, command, count, knobs or {})
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UsageProblem(str(error)) from None


def _control(loop: LiveLoop, command: str, count: int, knobs: Mapping[str, Any]) -> str:
    if command == "pause":
        return f"all ranks pause before step {loop.pause():,}"
    if command == "resume":
        loop.resume()
        return "the loop continues"
    if command == "step":
        loop.step(count)
        return f"{count:,} step{'s' * (count != 1)} more"
    if command == "stop":
        return f"the loop ends before step {loop.stop():,}"
    return "\n".join(f"{name} is {value!r} from step {loop.set(name, value):,} on" for name, value in knobs.items())
