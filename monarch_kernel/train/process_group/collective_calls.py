"""Calls of collectives as data: what one rank passes to a collective, and how the calls of two ranks differ. Pure.

Two calls fit if gloo gives the result that the user means. Shapes may differ where the elements and their order agree: by
dimensions of size 1, and by a flat view on one rank. Strides must agree where gloo takes the memory of a tensor as it is. What
each rank sends to each other rank may differ, as in an uneven all_gather or all_to_all, if the receiver expects the same number
of elements. The two calls of a message fit by the same rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import prod
from typing import Any, NamedTuple

from monarch_kernel.base.text import plural
from monarch_kernel.errors import format_ranks

__all__ = [
    "Arguments",
    "Call",
    "Tensor",
    "describe",
    "difference",
    "is_dense",
    "message_mismatch_text",
    "mismatch_text",
]

_MAX_TENSORS = 6
"""Tensors of one call that are described one by one; of the others only their number and their elements."""

_MAX_COUNTS = 64
"""Ranks up to which the numbers of elements for each rank are compared."""

_REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


class Tensor(NamedTuple):
    """What collectives need to know of a tensor.

    Attributes:
        dtype: without ``torch.``.
        shape: its sizes.
        layout: empty for a tensor that is not sparse.
        strides: where the collective takes its memory as it is; empty if it is contiguous.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str = ""
    strides: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def as_real(self) -> Tensor:
        """The same memory without complex numbers, as torch.distributed passes it to most collectives."""
        real = _REAL.get(self.dtype)
        if real is None:
            return self
        strides = (*(2 * each for each in self.strides), 1) if self.strides else ()
        return Tensor(real, (*self.shape, 2), self.layout, strides)

    @property
    def order(self) -> tuple[int, ...]:
        """The strides of the dimensions that have any."""
        return tuple(stride for size, stride in zip(self.shape, self.strides) if size != 1)

    def __str__(self) -> str:
        strides = f" with strides ({', '.join(map(str, self.strides))})" if self.strides else ""
        return f"{self.layout} {self.dtype} ({', '.join(map(str, self.shape))}){strides}".lstrip()


class Arguments(NamedTuple):
    """What a rank passes to a collective, as far as the collective has it.

    Attributes:
        inputs: the tensors that this rank gives. A list for each rank of the group in ``gather`` and the like.
        outputs: the tensors that this rank receives into.
        op: name of the reduction, such as ``sum``.
        root: rank of the root in the group; -1 if there is none.
        sent: rows of the input for each rank, if the user has given them.
        received: rows of the output for each rank, if the user has given them.
    """

    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    op: str = ""
    root: int = -1
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """The call of a collective by one rank.

    Attributes:
        operation: such as ``all_reduce``.
        tensors: those that the ranks compare.
        more: number of further tensors.
        numel: number of elements of all tensors.
        op: name of the reduction; empty if there is none.
        root: rank of the root in the group; -1 if there is none.
        sent: number of elements for each other rank, or for each by its rank; None if the collective has no such rule.
        received: number of elements that this rank expects from each other rank, or from each by its rank.
    """

    operation: str
    tensors: tuple[Tensor, ...] = ()
    more: int = 0
    numel: int = 0
    op: str = ""
    root: int = -1
    sent: int | tuple[int, ...] | None = None
    received: int | tuple[int, ...] | None = None

    @property
    def is_uneven(self) -> bool:
        """Whether it sends or expects another number of elements for each rank, so that even equal calls may not fit."""
        return isinstance(self.sent, tuple) or isinstance(self.received, tuple)

    def encode(self) -> bytes:
        """The call as bytes; equal calls have equal bytes."""
        return json.dumps(astuple(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Call:
        """Make a call of its bytes."""
        operation, tensors, more, numel, op, root, sent, received = json.loads(data)
        shaped = tuple(Tensor(dtype, tuple(shape), layout, tuple(strides)) for dtype, shape, layout, strides in tensors)
        return cls(operation, shaped, more, numel, op, root, _counts(sent), _counts(received))

    @property
    def tensors_text(self) -> str:
        """The tensors in one line: ``float32 (4), int64 (2, 3)``."""
        return ", ".join(map(str, self.tensors)) + (f" and {plural(self.more, 'more tensor')}" if self.more else "")

    def text(self, members: Sequence[int]) -> str:
        """The call in one line: ``all_reduce of float32 (4), sum``.

        Args:
            members: global rank of each rank of the group.
        """
        tensors = self.tensors_text
        root = f"{'to' if self.operation in ('reduce', 'gather') else 'from'} rank {members[self.root]}"
        parts = [
            f"{self.operation} of {tensors}" if tensors else self.operation,
            self.op,
            root if 0 <= self.root < len(members) else "",
            _each("sends", self.sent) if self.operation in ("all_to_all", "scatter") else "",
            _each("expects", self.received) if self.operation in ("all_to_all", "all_gather", "gather") else "",
        ]
        return ", ".join(filter(None, parts))


def describe(operation: str, given: Arguments, rank: int, size: int) -> Call:
    """Describe a call.

    Args:
        operation: such as ``all_reduce``.
        given: its arguments.
        rank: rank of the caller in the group.
        size: number of ranks in the group.
    """
    inputs = tuple(each.as_real() for each in given.inputs)
    outputs = tuple(each.as_real() for each in given.outputs)
    root = given.root
    sent: int | tuple[int, ...] | None = None
    received: int | tuple[int, ...] | None = None
    compared = inputs
    if operation == "all_gather" and len(inputs) == 1:
        sent = inputs[0].numel
        received = _shares(outputs, size) if outputs else sent
    elif operation == "gather":
        sent = inputs[0].numel
        received = _shares(outputs, size) if rank == root and len(outputs) == size else None
    elif operation == "scatter":
        compared = outputs
        sent = _shares(inputs, size) if rank == root and len(inputs) == size else None  # else torch refuses the list
        received = outputs[0].numel
    elif operation == "all_to_all":
        compared = inputs[:1] or outputs[:1]
        sent = _rows(inputs[0], given.sent) if given.sent else _shares(inputs, size)
        received = _rows((outputs or inputs)[0], given.received) if given.received else _shares(outputs or inputs, size)
    elif operation == "broadcast":
        compared = inputs or outputs
    numel = sum(each.numel for each in compared)
    more = max(0, len(compared) - _MAX_TENSORS)
    return Call(operation, compared[:_MAX_TENSORS], more, numel, given.op, root, sent, received)


def difference(one: Call, rank: int, other: Call, other_rank: int) -> str:
    """What keeps the calls of two ranks from being one collective, such as ``dtypes``; empty if they fit.

    Args:
        one: call of a rank.
        rank: this rank in the group.
        other: call of another rank.
        other_rank: that rank in the group.
    """
    if one.operation != other.operation:
        return "collectives"
    if one.root != other.root:
        return "roots"
    if one.op != other.op:
        return "reductions"
    if one.operation == "all_to_all":
        return _difference_in_exchange(one, rank, other, other_rank)
    if len(one.tensors) != len(other.tensors) or one.more != other.more:
        lists = one.operation == "reduce_scatter"  # one rank may pass a list, another one tensor with the same elements
        return "" if lists and one.numel == other.numel else "numbers of tensors"
    if any(a.layout != b.layout for a, b in zip(one.tensors, other.tensors)):
        return "layouts"
    if any(a.dtype != b.dtype and (a.numel or b.numel) for a, b in zip(one.tensors, other.tensors)):
        return "dtypes"
    if one.sent is not None or one.received is not None:
        uneven = _goes_astray(one, rank, other, other_rank)
    else:
        uneven = one.numel != other.numel or any(a.numel != b.numel for a, b in zip(one.tensors, other.tensors))
    if uneven:
        return "sizes"
    both = [(a, b) for a, b in zip(one.tensors, other.tensors) if a.numel == b.numel]
    if not all(_same_order(a, b) for a, b in both):
        return "shapes"
    return "strides" if any(a.order != b.order and a.numel for a, b in both) else ""


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements of a tensor fill its memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides) if size != 1):
        if size and stride != expected:
            return False
        expected *= size
    return True


def mismatch_text(
    calls: Mapping[int, tuple[Call, str]], what: str, members: Sequence[int], group: str, number: int
) -> str:
    """The text of the error: the calls of all ranks that have made one, with their lines.

    Args:
        calls: rank in the group -> its call and the line that made it.
        what: the `difference` of two of them.
        members: global rank of each rank of the group.
        group: label of the group for users; empty for the default one.
        number: number of the collective in its group, counted from 1.
    """
    of = _group_text(group)
    operations = {call.operation for call, _ in calls.values()}
    called = (
        f"{operations.pop()} with different {_all_differences(calls, what)}"
        if len(operations) == 1
        else "different collectives"
    )
    lines = [f"the ranks of the {of} call {called} (its collective {number}); it was refused"]
    folded: dict[str, list[int]] = {}
    for rank in sorted(calls):
        call, line = calls[rank]
        folded.setdefault(f"{call.text(members)}" + (f": {line}" if line else ""), []).append(members[rank])
    lines += [f"  {format_ranks(ranks)} {text}" for text, ranks in folded.items()]
    if what == "sizes":
        lines += _astray_text({rank: call for rank, (call, _) in calls.items()}, members)
    missing = [member for rank, member in enumerate(members) if rank not in calls]
    if missing:
        lines.append(f"  {format_ranks(missing)} had not called it yet, or can't be compared")
    return "\n".join(lines)


def _all_differences(calls: Mapping[int, tuple[Call, str]], what: str) -> str:
    """Name what differs between the first call and each other one, such as ``dtypes and sizes``; ``what`` comes first."""
    first = min(calls)
    others = (difference(calls[first][0], first, call, rank) for rank, (call, _) in sorted(calls.items()))
    *most, last = dict.fromkeys([what, *filter(None, others)])
    return f"{', '.join(most)} and {last}" if most else last


def message_mismatch_text(
    sent: tuple[Call, str], received: tuple[Call, str], what: str, source: int, target: int, group: str, tag: int
) -> str:
    """The text of the error: the send and the receive of one message, with their lines.

    Args:
        sent: the call of the rank that sends, and the line that made it.
        received: the call of the rank that receives, and the line.
        what: their `difference`.
        source: global rank that sends.
        target: global rank that receives.
        group: label of the group for users; empty for the default one.
        tag: of the message.
    """
    tagged = f" with tag {tag}" if tag else ""
    lines = [
        f"two ranks of the {_group_text(group)} call send and recv of one message{tagged} with different {what}; "
        "it was refused"
    ]
    for rank, verb, (call, line) in (
        (source, f"to rank {target}", sent),
        (target, f"from rank {source}", received),
    ):
        operation = "send" if rank == source else "recv"
        lines.append(f"  [{rank}] {operation} of {call.tensors_text}, {verb}" + (f": {line}" if line else ""))
    return "\n".join(lines)


def _group_text(group: str) -> str:
    name = group if group.startswith("[") else repr(group)  # ranks need no quotes
    return f"process group {name}" if group else "default process group"


def _difference_in_exchange(one: Call, rank: int, other: Call, other_rank: int) -> str:
    if _goes_astray(one, rank, other, other_rank):
        return "sizes"
    flows = _for_rank(one.sent, other_rank) or _for_rank(other.sent, rank)
    return "dtypes" if flows and [a.dtype for a in one.tensors] != [b.dtype for b in other.tensors] else ""


def _goes_astray(one: Call, rank: int, other: Call, other_rank: int) -> bool:
    """Whether one of two ranks sends another number of elements than the other expects."""
    for sender, receiver, source, target in ((one, other, rank, other_rank), (other, one, other_rank, rank)):
        sent, expected = _for_rank(sender.sent, target), _for_rank(receiver.received, source)
        if sent is not None and expected is not None and sent != expected:
            return True
    return False


def _astray_text(calls: Mapping[int, Call], members: Sequence[int]) -> list[str]:
    """Name the first two ranks of which one sends another number of elements than the other expects, if numbers are by rank."""
    for source, sender in calls.items():
        for target, receiver in calls.items():
            sent, expected = _for_rank(sender.sent, target), _for_rank(receiver.received, source)
            if (sender.is_uneven or receiver.is_uneven) and None not in (sent, expected) and sent != expected:
                elements = "element" if sent == 1 else "elements"
                return [
                    f"  [{members[source]}] sends {sent} {elements} to [{members[target]}], which expects {expected}"
                ]
    return []


def _for_rank(counts: int | tuple[int, ...] | None, rank: int) -> int | None:
    return counts[rank] if isinstance(counts, tuple) else counts


def _same_order(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors with the same number of elements have them in the same order."""
    a = [size for size in one.shape if size != 1]
    b = [size for size in other.shape if size != 1]
    return a == b or len(a) <= 1 or len(b) <= 1 or not one.numel


def _shares(tensors: Sequence[Tensor], size: int) -> int | tuple[int, ...] | None:
    """Elements for each rank: of a tensor in equal parts, or of a list with one tensor per rank."""
    if len(tensors) == size:
        return _even(tuple(each.numel for each in tensors))
    return tensors[0].numel // size if len(tensors) == 1 else None


def _rows(tensor: Tensor, rows: Sequence[int]) -> int | tuple[int, ...] | None:
    per_row = prod(tensor.shape[1:])
    return _even(tuple(each * per_row for each in rows))


def _even(counts: tuple[int, ...]) -> int | tuple[int, ...] | None:
    if len(set(counts)) == 1:
        return counts[0]
    return counts if len(counts) <= _MAX_COUNTS else None


def _each(verb: str, counts: int | tuple[int, ...] | None) -> str:
    return f"{verb} {'+'.join(map(str, counts))} elements" if isinstance(counts, tuple) else ""


def _counts(value: Any) -> int | tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) else value
