"""Recorded blocks on a rank: the operations of a function of the program, done by one record.

A block is an entry like any other (`worker.Entry`), whose record has the tensors that were arguments of the function. Its steps
are operations with other entries. The tensors that a step takes are arguments of the function, tensors that existed before, or
results of earlier steps, which are *locals* of the call. A local is dropped after its last use. Those that were alive after the
recording, such as gradients, are *kept*: each call gives them new values under the ids that the program knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from monarch_kernel.features.tensors.messages import DefineBlock

__all__ = ["ARGUMENT", "BEFORE", "KEPT", "LOCAL", "BlockEntry"]

LOCAL, ARGUMENT, BEFORE, KEPT = range(4)
"""Kinds of operands: a local, an argument, a tensor that existed before, the value of a local that the last call has kept."""

_PER_CALL = 1 << 40


class Doing(Protocol):
    """Does operations on tensors (`worker.Interpreter`)."""

    tensors: dict[int, Any]

    def do(self, entry: Any, ids: Sequence[int], literals: Sequence[Any], first: int, op: int) -> None:
        """Do an operation, and store its results from an id on."""
        ...


class _Step(NamedTuple):
    entry: Any
    operands: list[tuple[int, int]]
    literals: list[Any]
    first: int
    op: int
    last_used: list[int]


class BlockEntry:
    """A block that records refer to.

    Args:
        message: its definition.
        entries: the entries of its steps, by number.
        doing: does the steps.
    """

    takes_only_tensors = True
    n_ints = n_floats = 0
    depth = 0
    """Number of blocks that run, one within another."""

    def __init__(self, message: DefineBlock, entries: dict[int, Any], doing: Doing) -> None:
        self.n_tensors = message.n_arguments
        self.returns = [True] * len(message.results)
        self.changed: list[int] = []
        self._doing = doing
        self._results = message.results
        self._kept = dict(message.kept)
        self._steps = [
            _Step(entries[entry], list(zip(operands[::2], operands[1::2])), [*ints, *floats], first, op, [])
            for entry, op, first, operands, ints, floats in message.steps
        ]
        self._n_locals = message.n_locals
        self._note_last_uses()

    def _note_last_uses(self) -> None:
        last: dict[int, int] = {}
        for place, step in enumerate(self._steps):
            made = 1 if step.entry.returns is None else sum(step.entry.returns)
            last.update(dict.fromkeys(range(step.first, step.first + made), place))
            last.update({number: place for kind, number in step.operands if kind == LOCAL})
        for number, place in last.items():
            if number not in self._kept and number not in self._results:
                self._steps[place].last_used.append(number)

    def function(self, *arguments: Any) -> list[Any]:
        """Do the steps; a step that fails poisons what depends on it."""
        tensors = self._doing.tensors
        BlockEntry.depth += 1
        base = -_PER_CALL * BlockEntry.depth  # ids of tensors of the program are positive
        given = base - len(arguments)
        tensors.update(zip(range(given, base), arguments))
        starts = (base, given, 0)
        try:
            for step in self._steps:
                ids = [self._kept[n] if kind == KEPT else starts[kind] + n for kind, n in step.operands]
                self._doing.do(step.entry, ids, step.literals, base + step.first, step.op)
                for number in step.last_used:
                    tensors.pop(base + number, None)
            results = [tensors[base + number] for number in self._results]
            tensors.update({id: tensors[base + number] for number, id in self._kept.items()})
            return results
        finally:
            BlockEntry.depth -= 1
            for id in range(given, base + self._n_locals):
                tensors.pop(id, None)

    def call(self, values: Sequence[Any]) -> Any:
        """Do the steps; a block has only tensors."""
        return self.function(*values)
