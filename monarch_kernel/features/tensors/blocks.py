"""Recorded blocks on a rank: the operations of a function of the program, done by one record.

A block is an entry like any other (`worker.Entry`), whose record has the tensors that were arguments of the function. Its steps
are operations with other entries. The tensors that a step takes are arguments of the function, tensors that existed before, or
results of earlier steps, which are *locals* of the call. A local is dropped after its last use. Those that were alive after the
recording, such as gradients, are *kept*: each call gives them new values under the ids that the program knows.

Locals have no ids: a list has the values of a call, and each step knows the places of its operands in it. If a step fails, they
get ids, so that the interpreter can tell what depends on it, and it does the other steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from monarch_kernel.features.tensors.functions import flat_results
from monarch_kernel.features.tensors.messages import DefineBlock

__all__ = ["ARGUMENT", "BEFORE", "KEPT", "LOCAL", "BlockEntry"]

LOCAL, ARGUMENT, BEFORE, KEPT = range(4)
"""Kinds of operands: a local, an argument, a tensor that existed before, the value of a local that the last call has kept."""

_GONE = object()
"""The value of a local before it is made and after its last use."""


class Doing(Protocol):
    """Does operations on tensors (`worker.Interpreter`)."""

    tensors: dict[int, Any]

    def do(self, entry: Any, ids: Sequence[int], literals: Sequence[Any], first: int, op: int) -> None:
        """Do an operation, and store its results from an id on."""
        ...

    def fail(self, entry: Any, ids: Sequence[int], first: int, op: int, error: Exception) -> None:
        """Handle the failure of an operation, which would have stored its results from an id on."""
        ...

    def note_results(self, ids: range) -> None:
        """Note the ids of the results of one operation."""
        ...

    def drop(self, ids: Iterable[int]) -> None:
        """Drop tensors."""
        ...


class _Step(NamedTuple):
    """An operation of a block.

    Attributes:
        operands: The places of the tensors that it takes.
        first: The place of its first result.
        last_used: The places of the locals that no later step takes.
    """

    entry: Any
    operands: list[int]
    literals: list[Any]
    first: int
    op: int
    last_used: list[int]

    @property
    def n_results(self) -> int:
        return 1 if self.entry.returns is None else sum(self.entry.returns)


class BlockEntry:
    """A block that records refer to.

    The values of a call are its locals, then its arguments, then the tensors outside of the block that steps take.

    Args:
        message: its definition.
        entries: the entries of its steps, by number.
        doing: does the steps after one has failed.
    """

    takes_only_tensors = True
    n_ints = n_floats = 0
    is_failing = False
    """Whether a step of the block that runs has failed."""

    def __init__(self, message: DefineBlock, entries: dict[int, Any], doing: Doing) -> None:
        self.n_tensors = message.n_arguments
        self.returns = [True] * len(message.results)
        self.changed: list[int] = []
        self._doing = doing
        self._results = message.results
        self._kept = dict(message.kept)
        self._no_locals = [_GONE] * message.n_locals
        self._outside: list[int] = []  # ids
        self._steps = [
            _Step(entries[entry], self._places(operands), [*ints, *floats], first, op, [])
            for entry, op, first, operands, ints, floats in message.steps
        ]
        self._note_last_uses()

    def _places(self, operands: Sequence[int]) -> list[int]:
        """The places of operands, which are pairs of a kind and a number."""
        places = []
        given, outside = len(self._no_locals), len(self._no_locals) + self.n_tensors
        for kind, number in zip(operands[::2], operands[1::2]):
            if kind in (LOCAL, ARGUMENT):
                places.append(number if kind == LOCAL else given + number)
                continue
            id = self._kept[number] if kind == KEPT else number
            if id not in self._outside:
                self._outside.append(id)
            places.append(outside + self._outside.index(id))
        return places

    def _note_last_uses(self) -> None:
        last: dict[int, int] = {}
        for index, step in enumerate(self._steps):
            last.update(dict.fromkeys(range(step.first, step.first + step.n_results), index))
            last.update({place: index for place in step.operands if place < len(self._no_locals)})
        for place, index in last.items():
            if place not in self._kept and place not in self._results:
                self._steps[index].last_used.append(place)

    def function(self, *arguments: Any) -> list[Any]:
        """Do the steps; a step that fails poisons what depends on it."""
        tensors = self._doing.tensors
        values = [*self._no_locals, *arguments, *[tensors.get(id, _GONE) for id in self._outside]]
        n_done = 0
        try:
            for entry, operands, literals, first, _, last_used in self._steps:
                if entry.takes_only_tensors:
                    result = entry.function(*[values[place] for place in operands])
                else:
                    result = entry.call([*[values[place] for place in operands], *literals])
                if entry.returns is None:
                    values[first] = result
                elif entry.returns:
                    place = first
                    for is_new, part in zip(entry.returns, flat_results(result)):
                        if is_new:
                            values[place] = part
                            place += 1
                    part = None  # it may have the memory of others
                result = None
                for place in last_used:
                    values[place] = _GONE
                n_done += 1
        except Exception as error:
            self._go_on(n_done, values, error)
            error.__traceback__ = None  # its frames refer to tensors
        tensors.update({id: values[place] for place, id in self._kept.items()})
        return [values[place] for place in self._results]

    def call(self, values: Sequence[Any]) -> Any:
        """Do the steps; a block has only tensors."""
        return self.function(*values)

    def _go_on(self, n_done: int, values: list[Any], error: Exception) -> None:
        """Handle the failure of a step, and do those after it, by ids."""
        doing, tensors = self._doing, self._doing.tensors
        base = -len(values)  # ids of tensors of the program are positive
        n_inside = len(values) - len(self._outside)
        ids = [*range(base, base + n_inside), *self._outside]
        try:
            tensors.update({base + place: value for place, value in enumerate(values[:n_inside]) if value is not _GONE})
            for step in self._steps[:n_done]:
                if step.n_results > 1:
                    doing.note_results(range(base + step.first, base + step.first + step.n_results))
            failed, *others = self._steps[n_done:]
            BlockEntry.is_failing = True
            doing.fail(failed.entry, [ids[place] for place in failed.operands], base + failed.first, failed.op, error)
            for step in others:
                operands = [ids[place] for place in step.operands]
                doing.do(step.entry, operands, step.literals, base + step.first, step.op)
            for place in (*self._kept, *self._results):
                values[place] = tensors[base + place]
        finally:
            BlockEntry.is_failing = False
            doing.drop(range(base, base + n_inside))
