"""Issues calls of functions, of the program or of actors, as operations: finds the layouts of results, and makes the tensors.

A *callee* is a function whose results have layouts that the program can't know. There are three ways to them: another function
that runs on fake tensors here, to wait for the first call with arguments of these layouts, or to wait for each call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.utils import _pytree as pytree

from monarch_kernel.actor.per_rank import cells_of
from monarch_kernel.errors import TensorError
from monarch_kernel.features.tensors.functions import MAX_RESULTS
from monarch_kernel.features.tensors.messages import DefineCall, DefineFunction
from monarch_kernel.features.tensors.records import Slot
from monarch_kernel.features.tensors.sending import SENDING
from monarch_kernel.net.wire.codec import dump
from monarch_kernel.tensor.device import Device, Entry, common_device
from monarch_kernel.tensor.distributed_tensor import DistributedTensor
from monarch_kernel.tensor.issue import result_of
from monarch_kernel.tensor.lines import user_place
from monarch_kernel.tensor.propagation import LAYOUTS, LEAF, Outcome, Result, propagate_by
from monarch_kernel.tensor.reading import described_result

__all__ = ["WAYS", "Callee", "Propagate", "await_result", "call", "call_for_value", "device_for"]

Propagate = Callable[..., Any] | str
"""A function of fake tensors, or ``cached`` or ``inspect``."""

WAYS = ("cached", "inspect", "mocked")


class Callee:
    """A function that ranks call.

    Args:
        function: The function, or its name.
        name: What errors call it.
    """

    def __init__(self, function: Any, name: str) -> None:
        self.function = function
        self.name = name
        self._numbers: WeakKeyDictionary[Device, int] = WeakKeyDictionary()

    def number_on(self, device: Device) -> int:
        """The number under which the ranks know the function, which they get at the first call."""
        number = self._numbers.get(device)
        if number is None:
            number = device.stream.new_entry()
            sources = {} if isinstance(self.function, str) else cells_of(self.function)
            payload, frames = dump((self.function, sources), f"function {self.name}", roots={self.name: self.function})
            device.stream.define(device.target, DefineFunction(payload, number), frames)
            self._numbers[device] = number
        return number


class _Arguments(NamedTuple):
    """The arguments of a call.

    Attributes:
        tensors: The distributed tensors in them, in order.
        payload: The arguments with slots for these, pickled.
        frames: Large parts of it.
        has_references: Whether other objects in the arguments refer to distributed tensors, such as modules.
    """

    tensors: list[DistributedTensor]
    payload: Any
    frames: Any
    has_references: bool


def device_for(args: Any, active: Device | None, what: str) -> Device:
    """Return the device of a call: that of its tensors, or else the active one.

    Raises:
        TensorError: There is none, or the tensors are on several.
    """
    device: Device | None = None
    for each in pytree.tree_leaves(args):
        if isinstance(each, DistributedTensor) and each._part.device is not device:
            device = common_device(device, each._part.device)
    device = device or active
    if device is None:
        raise TensorError(f"{what} needs a mesh: pass distributed tensors, or call it in mesh.activate()")
    return device


def _pack(callee: Callee, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Arguments:
    flat, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = [each for each in flat if isinstance(each, DistributedTensor)]
    slots = iter(range(len(tensors)))
    marked = [Slot(next(slots)) if isinstance(each, DistributedTensor) else each for each in flat]
    there = pytree.tree_unflatten(marked, tree)
    references: list[Any] = []
    SENDING.parts = references
    try:
        payload, frames = dump(there, f"the arguments of {callee.name}", roots={"args": there[0], "kwargs": there[1]})
    finally:
        SENDING.parts = None
    return _Arguments(tensors, payload, frames, bool(references))


def call(callee: Callee, device: Device, args: Sequence[Any], kwargs: Mapping[str, Any], propagate: Propagate) -> Any:
    """Call a function on the ranks of a device, and return its result with distributed tensors in it."""
    given = _pack(callee, args, kwargs)
    key = _key(("call", callee.number_on(device)), given)
    entry = device.entries.get(key) if key is not None else None
    if entry is not None:
        return _call(device, entry, given)
    outcome = _outcome(callee, device, key, args, kwargs, propagate)
    if outcome is None:
        return _call_and_wait(callee, device, given, key if propagate == "cached" else None)
    entry = _define(callee, device, given, outcome)
    if key is None:
        return _call(device, entry, given, is_last=True)
    device.entries[key] = entry
    return _call(device, entry, given)


def await_result(
    callee: Callee,
    device: Device,
    number: int,
    about: tuple[Any, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    propagate: Propagate,
) -> Any:
    """Make the ranks of a device wait for the result of an actor, and return it with distributed tensors in it.

    Args:
        callee: Waits for a result on a rank.
        device: The ranks.
        number: The number of the result.
        about: What was called.
        args: The arguments of the endpoint.
        kwargs: Its other arguments.
        propagate: As for `tensor.remote`.
    """
    key = _key(("rref", *about), _pack(callee, args, kwargs))
    outcome = _outcome(callee, device, key, args, kwargs, propagate)
    given = _pack(callee, (number,), {})
    if outcome is None:
        return _call_and_wait(callee, device, given, key if propagate == "cached" else None)
    return _call(device, _define(callee, device, given, outcome), given, is_last=True)


def _outcome(
    callee: Callee,
    device: Device,
    key: tuple[Any, ...] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    propagate: Propagate,
) -> Outcome | None:
    """Return the results of a call; None if only the ranks know, or there is no tensor in them: then a failure has no place."""
    outcome = device.outcomes.get(key) if key is not None else None
    if outcome is None and not isinstance(propagate, str):
        outcome = propagate_by(propagate, callee.name, args, kwargs)
    return outcome if outcome is not None and any(part.layout for part in outcome.parts or ()) else None


def _call(device: Device, entry: Entry, given: _Arguments, *, is_last: bool = False) -> Any:
    first, op = _record(device, entry, given)
    if is_last:
        _drop(device, entry)
    return result_of(device, entry, first, op, (), {})


def call_for_value(callee: Callee, device: Device, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Call a function on the ranks of a device, and return the id under which they keep the whole result."""
    given = _pack(callee, args, kwargs)
    entry = _define(callee, device, given, None, n_results=-1)
    first, _ = _record(device, entry, given)
    _drop(device, entry)
    return first


def _drop(device: Device, entry: Entry) -> None:
    """Make the ranks drop an entry that has only one record, unless that may become a step of a block."""
    if device.session.recorder is None:
        device.stream.drop_entry(device.target, entry.number)


def _key(about: tuple[Any, ...], given: _Arguments) -> tuple[Any, ...] | None:
    """The key of calls with such arguments; None if they are large, or refer to tensors in other objects."""
    if given.frames or given.has_references:
        return None
    return (*about, given.payload.data, *(each._part.layout for each in given.tensors))


def _define(callee: Callee, device: Device, given: _Arguments, outcome: Outcome | None, n_results: int = 1) -> Entry:
    number = callee.number_on(device)
    device.make_room()
    layouts = None
    if outcome is not None:
        layouts = [
            (each.shape, each.stride, each.offset, str(each.dtype)[6:], each.device.type, each.placements)
            for each in (part.layout for part in outcome.parts or ())
            if each is not None
        ]
        n_results = len(layouts)
    if given.has_references:  # the ranks resolve them when they get the definition: after all operations so far
        device.stream.before_request()
    entry = Entry(device.stream.new_entry(), callee.name, outcome or Outcome(None, LEAF))
    if outcome is None:
        entry.n_new = abs(n_results)
    device.stream.define(
        device.target,
        DefineCall(
            given.payload,
            device.target.number,
            entry.number,
            number,
            callee.name,
            len(given.tensors),
            n_results,
            layouts,
        ),
        given.frames,
    )
    return entry


def _record(device: Device, entry: Entry, given: _Arguments) -> tuple[int, int]:
    return device.record(entry, [each._part.id for each in given.tensors], (), (), user_place(sys._getframe(2)))


def _call_and_wait(callee: Callee, device: Device, given: _Arguments, key: tuple[Any, ...] | None) -> Any:
    """Call a function, wait for the layouts of its result, and note them under a key."""
    entry = _define(callee, device, given, None, MAX_RESULTS)
    first, op = _record(device, entry, given)
    _drop(device, entry)
    recorder = device.session.recorder
    if recorder is not None and key is None:  # otherwise only this call waits
        device.frees.extend(range(first, first + MAX_RESULTS))
        recorder.refuse_wait(callee.name)
    try:
        structure, layouts = described_result(device, first, callee.name)
    except BaseException:
        device.frees.extend(range(first, first + MAX_RESULTS))
        raise
    known = [LAYOUTS.make(*layout) for layout in layouts]
    made = [device.new(layout, first + i, op) for i, layout in enumerate(known)]
    flat, tree = pytree.tree_flatten(structure)
    if recorder is not None and not known:
        recorder.refuse_wait(callee.name)
    if key is not None and known:
        parts = tuple(
            Result(layout=known[each.index]) if type(each) is Slot else Result(constant=each) for each in flat
        )
        device.outcomes[key] = Outcome(parts, tree)
    return pytree.tree_unflatten([made[each.index] if type(each) is Slot else each for each in flat], tree)
