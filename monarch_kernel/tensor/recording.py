"""Recorded functions: the operations of a function of distributed tensors, which ranks repeat at one message.

Theory of operation
===================

The first calls run the function as always, and note its operations. When two calls in a row have done the same ones, the ranks
get them as a block (`features.tensors.blocks`), and later calls send only its arguments. So nothing is assumed about the
function: an optimizer that makes its state in the first step is recorded from the second one on, and a function whose numbers
differ from call to call is refused.

Tensors that the function has made and that are alive after it are its result, or were *kept* by it, such as gradients in
``parameter.grad``. A call of the block gives kept tensors new values. If the function takes what its last call has kept, so
does the block.

A block is for arguments of the same layouts, the same other arguments, and the same modes of modules (``training``).
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils import _pytree as pytree

from monarch_kernel.base.text import plural
from monarch_kernel.errors import TensorError
from monarch_kernel.features.tensors.blocks import ARGUMENT, BEFORE, KEPT, LOCAL
from monarch_kernel.features.tensors.messages import DefineBlock
from monarch_kernel.tensor.device import Device, Entry, common_device
from monarch_kernel.tensor.distributed_tensor import DistributedTensor, Part
from monarch_kernel.tensor.issue import result_of
from monarch_kernel.tensor.lines import user_place
from monarch_kernel.tensor.on_mesh import active_device
from monarch_kernel.tensor.propagation import LAYOUTS, Outcome, Result

__all__ = ["Recorded", "record"]

MAX_RUNS = 5
"""Number of calls that run the function before it is refused."""

MAX_BLOCKS = 32
"""Number of kinds of arguments."""

Operand = tuple[int, int]


class _Step(NamedTuple):
    """An operation of a run.

    Attributes:
        entry: Its number on the ranks.
        operands: The tensors that it takes.
        ints: Integers that are arguments.
        floats: Floats that are arguments.
    """

    entry: int
    operands: tuple[Operand, ...]
    ints: tuple[int, ...]
    floats: tuple[float, ...]


class _Op(NamedTuple):
    op: int
    first: int
    title: str


class Run:
    """The operations of one call of a function.

    Args:
        device: The ranks that do them.
        name: The name of the function.
        arguments: The tensors that are arguments.
        before: The run before this one.
    """

    def __init__(self, device: Device, name: str, arguments: Sequence[DistributedTensor], before: Run | None) -> None:
        self.steps: list[_Step] = []
        self.ops: list[_Op] = []
        self.kept: dict[int, int] = {}  # local -> id
        self.n_locals = 0
        self.n_arguments = len(arguments)
        self._device = device
        self._name = name
        self._thread = threading.get_ident()
        self._arguments = {each._part.id: place for place, each in enumerate(arguments)}
        self._before = {} if before is None else {id: local for local, id in before.kept.items()}
        self._locals: dict[int, int] = {}  # id -> local
        self._made: dict[int, weakref.ref[Part]] = {}

    # -- while the function runs

    def check(self, device: Device) -> None:
        if device is not self._device or threading.get_ident() != self._thread:
            raise TensorError(
                f"{self._name} is recorded, so its operations have to be on the mesh of its arguments, and of one thread"
            )

    def refuse_wait(self, title: str) -> NoReturn:
        raise TensorError(
            f"{title} waits for values of the ranks, and a recorded function can't: return the tensor, and read it outside"
        )

    def add(
        self, entry: Entry, op: int, first: int, ids: Sequence[int], ints: Sequence[int], floats: Sequence[float]
    ) -> None:
        self.steps.append(_Step(entry.number, tuple(self._operand(id) for id in ids), tuple(ints), tuple(floats)))
        self.ops.append(_Op(op, self.n_locals, entry.title))
        for id in range(first, first + entry.n_new):
            self._locals[id] = self.n_locals
            self.n_locals += 1

    def _operand(self, id: int) -> Operand:
        if id in self._locals:
            return LOCAL, self._locals[id]
        if id in self._arguments:
            return ARGUMENT, self._arguments[id]
        return (KEPT, self._before[id]) if id in self._before else (BEFORE, id)

    def made(self, part: Part) -> None:
        self._made[part.id] = weakref.ref(part)

    # -- after it

    def local_of(self, tensor: DistributedTensor) -> int | None:
        """The local that a tensor is; None if the function has not made it."""
        return self._locals.get(tensor._part.id)

    def finish(self, results: Sequence[int]) -> None:
        """Find out which tensors the function has kept, besides its results."""
        gc.collect()
        for id, local in self._locals.items():
            made = self._made.get(id)
            if local not in results and made is not None and made() is not None:
                self.kept[local] = id

    def difference(self, other: Run) -> str:
        """Say how another run differs; empty if it has done the same."""
        for place, (mine, theirs) in enumerate(zip(self.steps, other.steps)):
            if mine != theirs:
                line = self._device.lines.describe(other.ops[place].op)
                where = f"operation {place + 1}, {other.ops[place].title}" + (f" in {line}" if line else "")
                if mine.entry == theirs.entry and mine.operands == theirs.operands:
                    return (
                        f"{where}, has other numbers: {[*mine.ints, *mine.floats]} and {[*theirs.ints, *theirs.floats]}; make "
                        "them arguments of the function, or tensors"
                    )
                return (
                    f"{where}, is another one, or takes another tensor; make what differs an argument of the function"
                )
        if len(self.steps) != len(other.steps):
            return f"one call has {len(self.steps)} operations and the next one {len(other.steps)}"
        return "" if self.kept.keys() == other.kept.keys() else "another number of tensors is kept after each call"

    def captured(self) -> list[Part]:
        """The tensors that existed before, which must live as long as the block."""
        ids = {number for step in self.steps for kind, number in step.operands if kind == BEFORE}
        ids |= set(self.kept.values())
        return [
            each._part
            for each in gc.get_objects()
            if type(each) is DistributedTensor and "_part" in each.__dict__ and each._part.id in ids
        ]


class _Block:
    """A recorded run that the ranks know.

    Attributes:
        entry: Its entry.
        results: The result; tensors that the function has made are parts of the outcome, others are constants.
        keeps: What must not be dropped.
    """

    def __init__(self, device: Device, run: Run, results: Any, name: str) -> None:
        flat, tree = pytree.tree_flatten(results)
        locals_of_results: list[int] = []
        parts = []
        for each in flat:
            local = run.local_of(each) if isinstance(each, DistributedTensor) else None
            if local is None:
                parts.append(Result(constant=each))
            else:
                locals_of_results.append(local)
                parts.append(Result(layout=LAYOUTS.of(each)))
        self.entry = Entry(device.stream.new_entry(), name, Outcome(tuple(parts), tree))
        self.keeps = run.captured()
        for op in run.ops:
            device.lines.keep(op.op)
        steps = [
            (
                step.entry,
                op.op,
                op.first,
                [number for operand in step.operands for number in operand],
                list(step.ints),
                list(step.floats),
            )
            for step, op in zip(run.steps, run.ops)
        ]
        kept = list(run.kept.items())
        device.stream.define(
            device.target,
            DefineBlock(
                device.target.number, self.entry.number, run.n_arguments, run.n_locals, steps, locals_of_results, kept
            ),
        )


class _Kind:
    """Calls with arguments of one kind."""

    def __init__(self) -> None:
        self.runs = 0
        self.last: Run | None = None
        self.block: _Block | None = None


class Recorded:
    """A recorded function; see `record`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._name = getattr(function, "__qualname__", repr(function)).replace("<locals>.", "")
        self._kinds: dict[Any, _Kind] = {}

    def __repr__(self) -> str:
        return f"<recorded {self._name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, or repeat what it has done.

        Raises:
            TensorError: It takes no distributed tensor and no mesh is active, or it waits for values, or does something else in
                each call.
        """
        flat, tree = pytree.tree_flatten((args, kwargs))
        tensors = [each for each in flat if isinstance(each, DistributedTensor)]
        device = self._device(tensors)
        key = (device, tree, torch.is_grad_enabled(), *map(_key_of, flat), *_same(tensors), *self._modes(flat))
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_BLOCKS:
                raise TensorError(
                    f"{self._name} was called with {MAX_BLOCKS} kinds of arguments: pass numbers that differ as tensors"
                )
            kind = self._kinds[key] = _Kind()
        if kind.block is None or device.session.recorder is not None:
            return self._run(kind, device, tensors, args, kwargs)
        entry = kind.block.entry
        first, op = device.record(entry, [each._part.id for each in tensors], (), (), user_place(sys._getframe(1)))
        return result_of(device, entry, first, op, (), {})

    def describe(self) -> str:
        """Say what the ranks repeat: for each kind of arguments the number of operations, and how often each is there."""
        lines = []
        for kind in self._kinds.values():
            run = kind.last
            if run is None:
                continue
            state = "recorded" if kind.block is not None else f"not recorded after {plural(kind.runs, 'call')}"
            counts: dict[str, int] = {}
            for op in run.ops:
                counts[op.title] = counts.get(op.title, 0) + 1
            listed = ", ".join(f"{title} {n}" for title, n in sorted(counts.items(), key=lambda item: -item[1]))
            lines.append(
                f"{self._name}: {state}; {plural(len(run.steps), 'operation')}, "
                f"{plural(len(run.kept), 'tensor')} kept: {listed}"
            )
        return "\n".join(lines) or f"{self._name}: not called yet"

    def _device(self, tensors: Sequence[DistributedTensor]) -> Device:
        device: Device | None = None
        for each in tensors:
            if each._part.device is not device:
                device = common_device(device, each._part.device)
        device = device or active_device()
        if device is None:
            raise TensorError(
                f"{self._name} is recorded, so one of its arguments has to be a distributed tensor, or its mesh has to be "
                "active: call it in mesh.activate()"
            )
        return device

    def _modes(self, flat: Sequence[Any]) -> Iterator[bool]:
        for each in (*flat, *_used_by(self._function)):
            if isinstance(each, torch.nn.Module):
                yield from (module.training for module in each.modules())

    def _run(
        self, kind: _Kind, device: Device, tensors: Sequence[DistributedTensor], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        session = device.session
        if session.recorder is not None:  # within another recorded function
            return self._function(*args, **kwargs)
        run = session.recorder = Run(device, self._name, tensors, kind.last)
        try:
            results = pytree.tree_map_only(
                DistributedTensor, lambda each: each.detach(), self._function(*args, **kwargs)
            )
        finally:
            session.recorder = None
        found = [run.local_of(each) for each in pytree.tree_leaves(results) if isinstance(each, DistributedTensor)]
        run.finish([local for local in found if local is not None])
        before, kind.last = kind.last, run
        kind.runs += 1
        difference = "it ran once" if before is None else before.difference(run)
        if not difference:
            kind.block = _Block(device, run, results, self._name)
        elif kind.runs >= MAX_RUNS:
            kind.runs = 0
            kind.last = None
            raise TensorError(f"{self._name} can't be recorded, as its calls differ: {difference}")
        return results


def _key_of(value: Any) -> Any:
    if isinstance(value, DistributedTensor):
        return value._part.layout, value.requires_grad
    if isinstance(value, torch.nn.Module):
        return id(value)
    if isinstance(value, torch.Tensor) or hasattr(value, "__array__"):
        raise TensorError(
            "a recorded function takes no tensors of this process: move them to the ranks with mesh.put(x)"
        )
    return type(value), repr(value)


def _same(tensors: Sequence[DistributedTensor]) -> Iterator[int]:
    """For each tensor, the place of the first one that is the same."""
    first: dict[int, int] = {}
    for place, each in enumerate(tensors):
        yield first.setdefault(each._part.id, place)


def _used_by(function: Callable[..., Any]) -> Iterator[Any]:
    """Yield the objects that a function refers to by its closure and by global names."""
    code = getattr(function, "__code__", None)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue
    if code is not None:
        names = function.__globals__
        yield from (names[name] for name in code.co_names if name in names)
    if (owner := getattr(function, "__self__", None)) is not None:
        yield owner


def record(function: Callable[..., Any]) -> Recorded:
    """Make a function of distributed tensors one whose operations the ranks repeat, at one message for each call.

    The first calls run the function. As soon as two calls in a row have done the same operations, calls only send the tensors
    among the arguments. Python code of the function does not run then, and other arguments are constants. The result has no
    history for autograd; a backward pass belongs into the function. A function without such arguments runs on the active mesh.
    """
    return function if isinstance(function, Recorded) else Recorded(function)
