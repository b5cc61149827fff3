"""Loops that are steered while they run: paused, resumed, done step by step, stopped, their knobs turned.

On the ranks of a mesh, in a cell or an endpoint::

    from monarch_kernel import live

    for step in live.loop(10_000):
        loss = train_step(batch(step), lr=live.knob("lr", 3e-4, low=1e-6, high=1e-2))
        live.log(loss=loss, tokens=batch_tokens)

In the notebook or script, while that runs::

    trainers.loop.set("lr", 1e-4)   # at the same step on all ranks
    trainers.loop.pause()           # all stand before the same step
    trainers.loop.step(2)
    trainers.loop.resume()

Elsewhere than on ranks `loop` counts, `knob` is its value, and `log` does nothing, so that code runs in a plain script, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, TypeVar

from monarch_kernel.asking.home import HOME
from monarch_kernel.steer.knobs import bounds_text
from monarch_kernel.wire.messages import Knob

__all__ = ["knob", "log", "loop"]

T = TypeVar("T", int, float, str, bool, None)


def loop(steps: int | None = None) -> Iterator[int]:
    """The steps of a loop, from 0, each when it may begin.

    All ranks of a cell or call that go through it are one loop. They may be at different steps, as without it; they stop,
    and a knob changes, at the same one.

    Args:
        steps: how many; None: until the loop is left or stopped.

    Raises:
        TypeError: ``steps`` is no number.
        ValueError: it is negative.
    """
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool)):
        raise TypeError(f"live.loop(steps) takes how many steps there are, or nothing, not {steps!r}")
    if steps is not None and steps < 0:
        raise ValueError(f"live.loop({steps}): a loop has no less than 0 steps")
    if HOME.loops is None:
        return iter(range(steps)) if steps is not None else itertools.count()
    begun: Iterator[int] = HOME.loops.begin(steps)
    return begun


def knob(name: str, value: T, low: float | None = None, high: float | None = None) -> T:
    """What a knob is in this step: ``value``, until somebody turns it.

    Args:
        name: of the knob.
        value: a number, a text, True or False, or None; ranks that give different ones keep theirs until it is turned.
        low: the least that it may be turned to.
        high: the most.

    Raises:
        RuntimeError: this is in no loop.
        TypeError: a value of that type can't be sent, or has bounds and is no number.
        ValueError: it is out of its own bounds, or its name is empty.
    """
    if not isinstance(value, (int, float, str, bool, type(None))):
        raise TypeError(f"live.knob({name!r}) is a number, a text, True, False or None, not a {type(value).__name__}")
    if low is not None or high is not None:
        _check_bounds(name, value, low, high)
    if not name:
        raise ValueError(f"live.knob({name!r}): a knob has a name, by which it is turned")
    if HOME.loops is None:
        return value
    current: T = _here(f"live.knob({name!r})").knob(Knob(name, value, low, high))
    return current


def _check_bounds(name: str, value: Any, low: float | None, high: float | None) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"live.knob({name!r}, {value!r}): only a number has bounds")
    for bound in (low, high):
        if bound is not None and not math.isfinite(bound):
            raise ValueError(f"live.knob({name!r}): a bound is a finite number, not {bound}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"live.knob({name!r}) is {value:g}, but {bounds_text(low, high)}")


def log(**values: Any) -> None:
    """Note numbers of this step, or tensors with one element each, which are not waited for.

    The view shows their means over ranks. ``samples`` and ``tokens`` are how many this rank did in this step: of these it
    shows how many there are in a second.

    Raises:
        RuntimeError: this is in no loop.
        TypeError: something is no number.
    """
    if HOME.loops is not None:
        _here("live.log()").log(values)


def _here(what: str) -> Any:
    found = HOME.loops.current
    if found is None:
        raise RuntimeError(f"{what} is for code within `for step in live.loop(...)`")
    return found
