"""Messages about distributed tensors, between the controller and ranks."""

from __future__ import annotations

from typing import Any

from monarch_kernel.errors import Failure
from monarch_kernel.features.tensors.records import Wholes
from monarch_kernel.net.wire.codec import add_messages
from monarch_kernel.net.wire.messages import Message, Payload

__all__ = [
    "AbandonResult",
    "DefineBlock",
    "DefineCall",
    "DefineFunction",
    "DefineOp",
    "DescribeResult",
    "DescribeTensors",
    "FetchTensors",
    "FunctionInterrupted",
    "InterruptFunction",
    "MeasureTensors",
    "OpsDone",
    "PutTensor",
    "ReportOps",
    "RunOps",
    "ShowTensor",
]


# controller -> rank; handled in order with cells


class DefineOp(Message, frozen=True):
    """Say what records of an entry mean; ``args`` and ``kwargs`` are templates (`records`).

    Attributes:
        name: The operation, such as ``aten::add.Tensor``, or ``monarch::rank_index`` for one of this package.
        target: The group of ranks whose batches have such records.
        entry: The number of the entry.
        args: Templates of the positional arguments.
        kwargs: Templates of the other arguments.
        counts: How many tensors, integers and floats a record has.
        returns: For each part of the result, whether it is a new tensor; None if the result is one new tensor.
        changed: The indexes of the tensors, among those of a record, that the operation changes.
        default_dtype: The default dtype of the program.
        is_learned: Whether the program asks for the layouts of the result (`DescribeResult`); ``returns`` is the largest number
            of tensors in it.
        wholes: The shapes, strides and dtypes of the result of an operation on sharded tensors, if the program knows them: each
            rank would find them out by itself, at the cost of half a search for torch's rule.
    """

    name: str
    target: int
    entry: int
    args: list[Any]
    kwargs: dict[str, Any]
    counts: tuple[int, int, int]
    returns: list[bool] | None
    changed: list[int]
    default_dtype: str = "float32"
    is_learned: bool = False
    wholes: Wholes | None = None


class DefineFunction(Message, frozen=True):
    """Take a function of the program, or its name, with the text of cells; its number is unique in the session."""

    payload: Payload
    function: int


class DefineCall(Message, frozen=True):
    """Say what records of an entry mean that calls a function of the program.

    Attributes:
        payload: The arguments, with a `records.Slot` in place of each tensor.
        target: As in `DefineOp`.
        entry: The number of the entry.
        function: The number of the function.
        name: The name of the function, for errors.
        n_tensors: How many tensors a record has.
        n_results: The number of ids for tensors in the result; -1 if the whole result is kept under one id.
        layouts: Those of the tensors in the result (`records.TensorLayout`); None if they are not known.
    """

    payload: Payload
    target: int
    entry: int
    function: int
    name: str
    n_tensors: int
    n_results: int
    layouts: list[tuple[tuple[int, ...], tuple[int, ...], int, str, str, tuple[str, ...]]] | None


class DefineBlock(Message, frozen=True):
    """Say what records of an entry mean that does many operations (`blocks`).

    Attributes:
        target: As in `DefineOp`.
        entry: The number of the entry.
        n_arguments: How many tensors a record has.
        n_locals: How many tensors the steps make.
        steps: For each operation its entry, its number in the session, the number of its first local, its operands, each a
            kind and a number, its integers and its floats.
        results: The locals that are results.
        kept: Locals that are tensors of the program after each call, with their ids.
    """

    target: int
    entry: int
    n_arguments: int
    n_locals: int
    steps: list[tuple[int, int, int, list[int], list[int], list[float]]]
    results: list[int]
    kept: list[tuple[int, int]]


class RunOps(Message, frozen=True):
    """Do a batch of operations (`records`), and free tensors.

    Attributes:
        words: Integers of 64 bits.
        floats: Numbers that are arguments, in the order of the records; floats of 64 bits.
        first: The number of the first operation in the session.
        target: The group of ranks that the batch is for, to which `OpsDone` refers.
        follows: Whether the ranks were sent nothing else by the program since the batch before, which was for the same ones.
    """

    words: bytes
    floats: bytes
    first: int
    target: int
    follows: bool


class PutTensor(Message, frozen=True):
    """Take a tensor of the program; it counts as an operation of the target."""

    payload: Payload
    tensor: int
    target: int


class FetchTensors(Message, frozen=True):
    """Ask for the values of tensors; those that are poisoned come as a `records.Poison`."""

    id: int
    tensors: tuple[int, ...]


class DescribeTensors(Message, frozen=True):
    """Ask for the layouts of tensors (`records.TensorLayout`); those that are poisoned come as a `records.Poison`."""

    id: int
    tensors: tuple[int, ...]


class DescribeResult(Message, frozen=True):
    """Ask for the result of a function with unknown layouts: the structure, and the layouts of the tensors in it."""

    id: int
    first: int


class ShowTensor(Message, frozen=True):
    """Ask for a short text about a tensor."""

    id: int
    tensor: int


class MeasureTensors(Message, frozen=True):
    """Ask how many tensors the rank holds, and how much memory they take."""

    id: int


class ReportOps(Message, frozen=True):
    """Ask for an `OpsDone` of a target after all operations so far."""

    target: int


# controller -> rank; handled at once


class AbandonResult(Message, frozen=True):
    """A call whose result an operation waits for (`results`) has failed before the actor got to it."""

    number: int
    failure: Failure


class InterruptFunction(Message, frozen=True):
    """Interrupt the function of the program that an operation calls, or do not begin it.

    Attributes:
        op: The number of the operation.
        abort: Whether to abort process groups if it does not stop otherwise.
    """

    op: int
    abort: bool


# rank -> controller


class FunctionInterrupted(Message, frozen=True):
    """A request that was interrupted waited for a function of the program; other ranks call the same one."""

    op: int
    abort: bool


class OpsDone(Message, frozen=True):
    """A rank has done that many operations that were issued for a target."""

    target: int
    count: int


add_messages(*(globals()[name] for name in __all__))
