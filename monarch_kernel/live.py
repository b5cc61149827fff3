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

Elsewhere than on ranks `loop` counts, `knob` is its value, and the others do nothing, so that code runs in a plain script, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from numbers import Real
from typing import Any, TypeVar

from monarch_kernel.features.live.knobs import bounds_text
from monarch_kernel.features.live.rates import PER_SECOND
from monarch_kernel.net.wire.messages import Knob
from monarch_kernel.runtime.rpc.handles import HOME

__all__ = ["knob", "log", "loop", "peak", "snapshot"]

_MOST_STEPS = 1 << 62

T = TypeVar("T", int, float, str, bool, None)


def loop(steps: int | None = None, *, on_failure: str = "raise") -> Iterator[int]:
    """The steps of a loop, from 0, each when it may begin.

    All ranks of a cell or call that go through it are one loop. They may be at different steps, as without it; they stop,
    and a knob changes, at the same one.

    Args:
        steps: how many; None: until the loop is left or stopped.
        on_failure: ``raise``, or ``recover``: if a rank dies it is replaced, the cell runs again, and the loop goes on from
            its last `snapshot`.

    Raises:
        RuntimeError: it is to recover, and is in no cell, or has no snapshots.
        TypeError: ``steps`` is no number.
        ValueError: it is negative or more than 2**62, or ``on_failure`` is something else.
    """
    if on_failure not in ("raise", "recover"):
        raise ValueError(f"live.loop(on_failure={on_failure!r}): it is 'raise' or 'recover'")
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool)):
        raise TypeError(f"live.loop(steps) takes how many steps there are, or nothing, not {steps!r}")
    if steps is not None and steps < 0:
        raise ValueError(f"live.loop({steps}): a loop has no less than 0 steps")
    if steps is not None and steps > _MOST_STEPS:
        raise ValueError(f"live.loop({steps}): that is more than a loop can count; live.loop() has no end")
    if HOME.loops is None:
        return iter(range(steps)) if steps is not None else itertools.count()
    begun: Iterator[int] = HOME.loops.begin(steps, recovers=on_failure == "recover")
    return begun


def snapshot(*, every: int = 10, keep: int = 2, **things: Any) -> int | None:
    """Have the loop that follows keep what it trains, in the memory of each rank and of another one.

    ``live.snapshot(model=model, optimizer=optimizer, every=10)`` stands before ``live.loop``. What is named is copied before
    the first step and every tenth one, with the random state. From there a loop goes on that recovers, or that is run after
    ``%mesh rollback``: then this puts it back, and the loop that follows begins with that step.

    Args:
        every: so many steps.
        keep: so many snapshots, the newest; at least 2, since ranks need not have taken the last one when one dies.
        things: modules, optimizers, what has ``state_dict()`` and ``load_state_dict()`` (schedulers, loaders), tensors, torch's
            generators, lists, dicts and sets. Each rank has its own part of what is spread.

    Returns:
        The step with which the loop begins, if things were put back; else None.

    Raises:
        RuntimeError: what is to be put back is not to be had any more.
        TypeError: something can't be put back.
        ValueError: nothing is named, it is not what it was, or a number is too small.
    """
    for name, number, least in (("every", every, 1), ("keep", keep, 2)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"live.snapshot({name}={number!r}): it is a number")
        if number < least:
            raise ValueError(f"live.snapshot({name}={number}): at least {least}")
    if HOME.loops is None or HOME.loops.snapshots is None:
        return None
    step: int | None = HOME.loops.snapshots.begin(things, every, keep)
    return step


def knob(name: str, value: T, low: float | None = None, high: float | None = None) -> T:
    """What a knob is in this step: ``value``, until somebody turns it.

    Args:
        name: of the knob.
        value: a number, a text, True or False, or None; ranks that give different ones keep theirs until it is turned.
        low: the least that it may be turned to.
        high: the most.

    Raises:
        RuntimeError: this is in no loop.
        TypeError: a value of that type can't be sent, or has bounds and is no number; or its name is no text.
        ValueError: it is out of its own bounds, or no finite number, or its name is empty.
    """
    if not isinstance(name, str):
        raise TypeError(f"live.knob({name!r}, ...): the name of a knob is a text")
    if not isinstance(value, (int, float, str, bool, type(None))):
        raise TypeError(f"live.knob({name!r}) is a number, a text, True, False or None, not a {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"live.knob({name!r}, {value}): a knob is a finite number; None can stand for none")
    if low is not None or high is not None:
        _check_bounds(name, value, low, high)
    if not name:
        raise ValueError(f"live.knob({name!r}): a knob has a name, by which it is turned")
    if HOME.loops is None:
        return value
    plain = float(value) if isinstance(value, float) else value  # one of NumPy's is a float, too
    current: T = _here(f"live.knob({name!r})").knob(Knob(name, plain, low, high))
    return current


def _check_bounds(name: str, value: Any, low: float | None, high: float | None) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"live.knob({name!r}, {value!r}): only a number has bounds")
    for bound in (low, high):
        if bound is not None and not isinstance(bound, (int, float)):
            raise TypeError(f"live.knob({name!r}): a bound is a number, not a {type(bound).__name__}")
        if bound is not None and not math.isfinite(bound):
            raise ValueError(f"live.knob({name!r}): a bound is a finite number, not {bound}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"live.knob({name!r}): low={low:g} is more than high={high:g}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"live.knob({name!r}) is {value:g}, but {bounds_text(low, high)}")


def log(**values: Any) -> None:
    """Note numbers of this step, or tensors with one element each, which are not waited for.

    The view shows their means over ranks. ``samples``, ``tokens`` and ``flops`` (floating-point operations of the model, such
    as ``plan_of(model).step_flops``) are how many this rank did in this step: of these it shows how many there are in a second,
    and of ``flops`` how many of those that the devices could do (model FLOP utilisation), where that is known: `peak`.

    Raises:
        RuntimeError: this is in no loop.
        TypeError: something is no number.
        ValueError: a number is greater than a float can be; or it counts what was done, and is less than 0 (tensors are not
            read for that).
    """
    for name in PER_SECOND:
        if isinstance(done := values.get(name), Real) and done < 0:
            raise ValueError(f"live.log({name}={done}): how many this rank did in this step, which is 0 or more")
    if HOME.loops is not None:
        _here("live.log()").log(values)


def peak(flops: float) -> None:
    """Say how many floating-point operations a second the device of this rank can do, at the precision that is trained with.

    Of known GPUs it need not be said: for them it is that of their data sheets for dense matrices of bfloat16.

    Raises:
        ValueError: it is no number greater than 0.
    """
    if not isinstance(flops, Real) or isinstance(flops, bool) or not 0 < flops < 1e30:
        raise ValueError(f"live.peak({flops!r}) takes how many operations a second the device can do, such as 989e12")
    if HOME.loops is not None:
        HOME.loops.peak = float(flops)


def _here(what: str) -> Any:
    found = HOME.loops.current
    if found is None:
        raise RuntimeError(f"{what} is for code within `for step in live.loop(...)`")
    return found
