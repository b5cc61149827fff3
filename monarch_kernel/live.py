"""Training loops that a user can pause, resume, single-step, stop and tune with knobs while they run.

On the ranks of a mesh, in a cell or an endpoint::

    from monarch_kernel import live

    for step in live.loop(10_000):
        loss = train_step(batch(step), lr=live.knob("lr", 3e-4, low=1e-6, high=1e-2))
        live.log(loss=loss, tokens=batch_tokens)

In the notebook or script, while that runs::

    trainers.loop.set("lr", 1e-4)   # at the same step on all ranks
    trainers.loop.pause()           # all stop before the same step
    trainers.loop.step(2)
    trainers.loop.resume()

Outside of ranks `loop` only counts, `knob` returns its default, and the other functions do nothing, so that the same code also
runs as a plain script.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sized
from contextlib import suppress
from numbers import Real
from typing import Any, TypeVar

from monarch_kernel.features.live.knobs import bounds_text
from monarch_kernel.features.live.limits import integer_problem, name_problem, text_problem
from monarch_kernel.features.live.rates import PER_SECOND
from monarch_kernel.features.live.trajectories import make_trajectory
from monarch_kernel.features.watch.values import NOT_FINITE, SPIKE, Alarm
from monarch_kernel.net.wire.messages import Knob
from monarch_kernel.runtime.rpc.handles import PROCESS

__all__ = ["Alarm", "check", "knob", "log", "loop", "peak", "repeat", "snapshot", "trajectory"]

_MOST_STEPS = 1 << 62
_SHOWN = 40  # characters of an argument in an error
_MISSING: Any = object()

T = TypeVar("T", int, float, str, bool, None)
ResultT = TypeVar("ResultT")


def loop(
    steps: int | None = None,
    *,
    on_failure: str = "raise",
    on_preempt: Callable[[], object] | None = None,
    on_nan: str | Callable[[Alarm], object] | None = None,
    on_spike: str | Callable[[Alarm], object] | None = None,
) -> Iterator[int]:
    """Yield the steps of a loop, counted from 0, each once it may start.

    All ranks of a cell or call that run this line form one loop. They may be at different steps, as in any loop; but they all
    stop, and a knob changes, at the same step.

    Args:
        steps: number of steps; None: until the loop is left or stopped.
        on_failure: ``raise``, or ``recover``: if a rank dies, the controller replaces it and runs the cell again, and the loop
            resumes from its last `snapshot`.
        on_preempt: called by all ranks of the loop before the same step, when something sends one of them SIGTERM, as a
            scheduler does before it takes a machine; the ranks that got it end afterwards. It may save a checkpoint, if that
            takes no longer than the scheduler allows. Without it, such a rank ends at once.
        on_nan: what to do when a rank logs a value that is not finite: ``stop`` ends the loop at the same step on all ranks;
            ``rollback`` restores the last `snapshot` before that step on all ranks, and goes on with the next step; a function
            is called before the same step by all ranks that pass one, with an `Alarm`. The values are read a few times a
            second, so some steps have followed. In any case the notebook tells you once.
        on_spike: the same for a logged value with ``loss`` in its name that is far above the last ones; or ``skip``: if the
            loss of any rank jumps, no rank applies the update of this step. For that, log the loss before ``optimizer.step()``;
            it is read there, and the ranks of the default process group agree in a collective in each step.

    Raises:
        RuntimeError: ``on_failure`` is ``recover``, but the loop is not in a cell, or has no snapshots; or ``on_nan`` or
            ``on_spike`` is ``rollback``, and the loop has none.
        TypeError: ``steps`` is not an integer, or ``on_preempt`` can't be called.
        ValueError: ``steps`` is negative or more than 2**62, or ``on_failure``, ``on_nan`` or ``on_spike`` is something else.
    """
    if on_failure not in ("raise", "recover"):
        raise ValueError(f"live.loop(on_failure={_brief(on_failure)}): pass 'raise' or 'recover'")
    for what, hook in (("on_nan", on_nan), ("on_spike", on_spike)):
        words = ("stop", "rollback", "skip") if what == "on_spike" else ("stop", "rollback")
        if hook is not None and hook not in words and not callable(hook):
            raise ValueError(
                f"live.loop({what}={_brief(hook)}): pass {', '.join(map(repr, words))}, or a function of an alarm"
            )
    if on_preempt is not None and not callable(on_preempt):
        raise TypeError(f"live.loop(on_preempt={_brief(on_preempt)}): pass a function without arguments")
    steps = None if steps is None else _steps_of(steps)
    if steps is not None and steps < 0:
        raise ValueError(f"live.loop({_brief(steps)}): steps must be 0 or more")
    if steps is not None and steps > _MOST_STEPS:
        raise ValueError(
            f"live.loop({_brief(steps)}): more steps than a loop can count; use live.loop() for a loop without end"
        )
    if PROCESS.loops is None:
        return iter(range(steps)) if steps is not None else itertools.count()
    numbers: Iterator[int] = PROCESS.loops.begin(
        steps,
        recovers=on_failure == "recover",
        on_preempt=on_preempt,
        hooks={NOT_FINITE: on_nan, SPIKE: on_spike},
    )
    return numbers


def _steps_of(steps: Any) -> int:
    """Return a number of steps as an int; NumPy's integers are some, too.

    Raises:
        TypeError: it is no integer.
    """
    if not isinstance(steps, (bool, str)):
        with suppress(TypeError):
            return operator.index(steps)
    has_length = isinstance(steps, Sized) and not isinstance(steps, str)
    instead = "; for one step per item, write live.loop(len(...))" if has_length else ""
    raise TypeError(
        f"live.loop({_brief(steps)}): steps must be an integer or None, not a {type(steps).__name__}{instead}"
    )


def _brief(value: Any) -> str:
    """Return a short description of an argument; of a number, string or None its value."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    if not isinstance(value, (str, int, float, type(None))):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def snapshot(*unnamed: Any, every: int = 10, keep: int = 2, **things: Any) -> int | None:
    """Take snapshots of the training state during the next loop, in the memory of each rank and of a buddy rank.

    Call ``live.snapshot(model=model, optimizer=optimizer, every=10)`` before ``live.loop``. The loop then copies the named
    objects and the random state before the first step and every tenth step. A loop that recovers, or that runs again after
    ``%mesh rollback``, resumes from a snapshot: then this call restores the objects, and the loop starts with that step.

    Args:
        unnamed: refused, as each object needs a name.
        every: interval in steps.
        keep: number of newest snapshots to keep; at least 2, because some ranks may not have taken the last one when a rank
            dies.
        things: modules, optimizers, objects with ``state_dict()`` and ``load_state_dict()`` (schedulers, loaders), tensors,
            torch generators, lists, dicts and sets. Each rank passes its own shard of distributed objects.

    Returns:
        The first step of the loop, if a snapshot was restored; else None.

    Raises:
        RuntimeError: the snapshot to restore does not exist any more.
        TypeError: an object can't be restored, or has no name.
        ValueError: no object is named, the objects differ from those of the snapshot, or a number is too small.
    """
    _refuse_unnamed("snapshot", unnamed, "live.snapshot(model=model, optimizer=optimizer)")
    for name, number, least in (("every", every, 1), ("keep", keep, 2)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"live.snapshot({name}={_brief(number)}): pass an integer")
        if number < least:
            raise ValueError(f"live.snapshot({name}={number}): at least {least}")
    if PROCESS.loops is None or PROCESS.loops.snapshots is None:
        return None
    step: int | None = PROCESS.loops.snapshots.begin(things, every, keep)
    return step


def check(*unnamed: Any, every: int = 500, group: Any = None, **things: Any) -> None:
    """Compare the replicas of parameters and gradients between ranks, in every 500th step.

    Call it after the backward, when the ranks have exchanged their gradients, and before the optimizer's step::

        loss.backward()
        live.check(every=500)
        optimizer.step()

    It finds ranks that have drifted apart, and bits that have flipped in the memory of one rank. All ranks of the process group
    must call it in the same steps, because they exchange digests. Shards of FSDP and other DTensors are compared only with the
    ranks that hold the same shard. Buffers are not compared, because ranks may have different ones on purpose.

    Args:
        unnamed: refused, as each object needs a name.
        every: interval in steps; the first check is in step 0.
        group: the process group of the replicas, if they are not all ranks.
        things: modules, optimizers, tensors, and dicts and lists of tensors, by name. By default all modules that cells have
            defined.

    Raises:
        DriftError: replicas differ, raised by all ranks. It names the first tensor that differs, its ranks and by how much.
        RuntimeError: the call is not in a live loop, there is nothing to compare, or there is no process group; or the ranks
            call it in different steps, raised by all ranks.
        TypeError: ``every`` is not an integer, or an object has no name.
        ValueError: ``every`` is less than 1.
    """
    _refuse_unnamed("check", unnamed, "live.check(model=model, every=500)")
    _check_every("check", every)
    if PROCESS.loops is None:
        return
    step = _here("live.check()").step
    if step % every == 0:
        PROCESS.checks.check(step, things, group)


def repeat(
    function: Callable[[], ResultT], *unnamed: Any, every: int = 500, group: Any = None, **things: Any
) -> ResultT:
    """Run forward and backward, in every 500th step twice with the same random numbers, and compare the gradients.

    It finds gradients that one rank has computed wrongly, such as by a faulty GPU, before the ranks have exchanged them; after
    that, all ranks hold the same wrong ones, and `check` finds no difference::

        def backward():
            loss = model(batch).mean()
            loss.backward()
            return loss

        optimizer.zero_grad()
        loss = live.repeat(backward, every=500)
        optimizer.step()

    All ranks of the process group must call it in the same steps. Gradients, buffers of the modules and the global random
    generators are as after one run. The function must not change anything else: take the batch from the loader before it.

    Args:
        function: runs forward and backward, and may exchange gradients.
        unnamed: refused, as each module needs a name.
        every: interval in steps; the first comparison is in step 0.
        group: the process group that compares, if that is not all ranks.
        things: the modules, by name. By default all modules that cells have defined.

    Returns:
        What the function returns; the second time, if it runs twice.

    Raises:
        DriftError: the gradients differ, raised by all ranks before the update. It names the ranks and the first parameter.
        RuntimeError: the call is not in a live loop, there is no module, or the ranks call it in different steps.
        TypeError: the function can't be called, ``every`` is not an integer, or something is no module or has no name.
        ValueError: ``every`` is less than 1.
    """
    if not callable(function):
        raise TypeError(
            f"live.repeat({_brief(function)}): pass a function that runs forward and backward, such as live.repeat(backward)"
        )
    _refuse_unnamed("repeat", unnamed, "live.repeat(backward, model=model)")
    _check_every("repeat", every)
    for name, thing in things.items():
        if not callable(getattr(thing, "named_parameters", None)):
            raise TypeError(
                f"live.repeat({name}={_brief(thing)}): pass the modules whose gradients the function computes"
            )
    if PROCESS.loops is None:
        return function()
    step = _here("live.repeat()").step
    result: ResultT = PROCESS.checks.repeat(step, every, function, things, group)
    return result


def _check_every(function: str, every: Any) -> None:
    if not isinstance(every, int) or isinstance(every, bool):
        raise TypeError(f"live.{function}(every={_brief(every)}): pass an integer")
    if every < 1:
        raise ValueError(f"live.{function}(every={every}): at least 1")


def knob(name: str, value: T = _MISSING, low: float | None = None, high: float | None = None) -> T:
    """The value of a knob in this step: ``value``, until it is set from the notebook.

    Args:
        name: name of the knob.
        value: the default: a number, string, bool or None. Ranks with different defaults keep them until the knob is set.
        low: lower bound of values that it can be set to.
        high: upper bound.

    Raises:
        RuntimeError: the call is not in a live loop.
        TypeError: the value is missing, has an unsupported type, or has bounds and is not a number; or the name is no string.
        ValueError: the value is out of its bounds, not finite, or a string of more than 1,000 characters; the name is empty,
            or longer than 200 characters; or the loop has 200 knobs already.
    """
    if not isinstance(name, str):
        raise TypeError(f"live.knob({_brief(name)}, ...): the name of a knob must be a string")
    if not name:
        raise ValueError("live.knob(''): a knob needs a name")
    if problem := name_problem(name, (), 1):
        raise ValueError(f"live.knob: {problem}")
    if value is _MISSING:
        raise TypeError(f"live.knob({name!r}) needs a default, the value until it is set: live.knob({name!r}, 0.1)")
    if not isinstance(value, (int, float, str, bool, type(None))):
        instead = "; write float(...) or int(...)" if hasattr(value, "__float__") else ""
        raise TypeError(
            f"live.knob({name!r}) must be a number, string, bool or None, not a {type(value).__name__}{instead}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"live.knob({name!r}, {value}): a knob must be finite; use None for no value")
    if problem := text_problem(value) or integer_problem(value):
        raise ValueError(f"live.knob({name!r}, ...): {problem}")
    if low is not None or high is not None:
        _check_bounds(name, value, low, high)
    if PROCESS.loops is None:
        return value
    plain = float(value) if isinstance(value, float) else value  # NumPy's float64 is a subclass of float
    current: T = _here(f"live.knob({name!r})").knob(Knob(name, plain, low, high))
    return current


def _check_bounds(name: str, value: Any, low: float | None, high: float | None) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"live.knob({name!r}, {value!r}): only a number can have bounds")
    for bound in (low, high):
        if bound is not None and not isinstance(bound, (int, float)):
            raise TypeError(f"live.knob({name!r}): a bound must be a number, not a {type(bound).__name__}")
        if problem := integer_problem(bound):
            raise ValueError(f"live.knob({name!r}): {problem}")
        if bound is not None and not math.isfinite(bound):
            raise ValueError(f"live.knob({name!r}): a bound must be finite, not {bound}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"live.knob({name!r}): low={low:g} is more than high={high:g}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"live.knob({name!r}) is {value:g}, but must be {bounds_text(low, high)}")


def log(*unnamed: Any, **values: Any) -> None:
    """Log numbers, or tensors with one element, for this step, without waiting for the device.

    The view shows their means over ranks. ``samples``, ``tokens`` and ``flops`` (floating-point operations of the model, such
    as ``plan_of(model).step_flops``) count what this rank did in this step: the view shows their rates per second, and for
    ``flops`` also the fraction of what the devices can do (model FLOP utilisation), if that is known (see `peak`).

    Raises:
        RuntimeError: the call is not in a live loop.
        TypeError: a value is not a number, or has no name.
        ValueError: a number is too large for a float, or a count is less than 0 (counts in tensors are not checked). Or a name
            is empty or longer than 200 characters, or the loop has logged 1,000 other names.
    """
    _refuse_unnamed("log", unnamed, "live.log(loss=loss)")
    for name in PER_SECOND:
        if isinstance(done := values.get(name), Real) and done < 0:
            raise ValueError(f"live.log({name}={done}): the count of this rank in this step must be 0 or more")
    if PROCESS.loops is not None:
        _here("live.log()").log(values)


def trajectory(prompt: Any, completion: Any, reward: float | None = None, version: int | None = None) -> None:
    """Show what a model has generated: the view lists the last samples of the mesh with their rewards.

    It works in any code of a rank, also outside of a live loop, and anywhere else it does nothing. Call it for as many samples
    as you like: a few times a second, a rank sends the last 16, and the controller keeps the last 32 of a mesh.

    Args:
        prompt: the prompt, as text or token ids. Of more than 1,000 characters, the beginning and the end are shown.
        completion: what was generated, likewise.
        reward: its reward; a tensor is read at once.
        version: the version of the weights that generated it, such as ``Completion.version`` of a Generator.

    Raises:
        TypeError: a text is neither a str nor token ids, or a number is none.
        ValueError: the version has more than 63 bits.
    """
    if PROCESS.trajectories is not None:
        PROCESS.trajectories.add(prompt, completion, reward, version)
    else:
        make_trajectory(prompt, completion, reward, version)  # for its errors


def _refuse_unnamed(function: str, unnamed: tuple[Any, ...], example: str) -> None:
    """Refuse arguments without a name, which errors and curves need.

    Raises:
        TypeError: there are some.
    """
    if unnamed:
        raise TypeError(
            f"live.{function}() takes each thing under its name, not a bare {type(unnamed[0]).__name__}: {example}"
        )


def peak(flops: float) -> None:
    """Set the peak floating-point operations per second of this rank's device, at the precision of the training.

    Known GPUs do not need this: their default is the data sheet's value for dense bfloat16 matrices.

    Raises:
        ValueError: ``flops`` is not a number greater than 0.
    """
    if not isinstance(flops, Real) or isinstance(flops, bool) or not 0 < flops < 1e30:
        raise ValueError(f"live.peak({_brief(flops)}): pass the device's operations per second, such as 989e12")
    if PROCESS.loops is not None:
        PROCESS.loops.peak = float(flops)


def _here(what: str) -> Any:
    found = PROCESS.loops.current
    if found is None:
        raise RuntimeError(f"{what} works only inside `for step in live.loop(...)`")
    return found
