"""The rank's part of moving tensors: functions that an `Apply` message calls, in order with cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monarch_kernel.features.resharding.plan import Box, Part, shape_of
from monarch_kernel.features.resharding.reading import Held, Plain, Tally, TensorReading, new_thing
from monarch_kernel.features.resharding.state_dict import Leaf, Slot, leaves_of
from monarch_kernel.net.memory.layout import Layout, memory_of
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.handles import PROCESS
from monarch_kernel.runtime.worker.function_calls import APPLIED_IN

__all__ = ["Leaves", "describe", "lend", "read_state", "take", "take_box"]

Leaves = dict[str, Held | Plain]
"""The leaves of one rank, by path."""


def describe(names: Mapping[str, str]) -> Leaves:
    """Describe the leaves of variables of this rank.

    Args:
        names: name of a variable -> prefix of its paths.
    """
    return {path: _held(leaf, same) for path, (leaf, same) in _found(names).items()}


def lend(names: Mapping[str, str], owner: int) -> Leaves:
    """Describe the leaves of variables (see `describe`), and lend their memory until all leases of ``owner`` end."""
    exports = PROCESS.client.exports
    lent: Leaves = {}
    try:
        for path, (leaf, same) in _found(names).items():
            held = _held(leaf, same)
            if isinstance(held, Held) and isinstance(leaf, Leaf) and leaf.parts:
                first = lent[same] if same != path else None
                handle = first.handle if isinstance(first, Held) else exports.lend(leaf.memory, owner)
                held = held._replace(handle=handle)
            lent[path] = held
    except BaseException:  # also an interrupt
        exports.end_all_of(owner)
        raise
    return lent


def read_state(names: Mapping[str, str], sources: Sequence[Leaves], turn: int) -> Tally:
    """Read the leaves of sources into variables of this rank, in place, by equal paths.

    Args:
        names: name of a variable -> prefix of its paths.
        sources: the leaves of each source, with their leases; leaves that no source has stay unchanged here.
        turn: number of this rank among the readers.
    """
    found = _found(names)
    there: dict[str, Held | Plain] = {}
    for source in reversed(sources):
        there |= source
    reading = TensorReading(PROCESS.client, sources, turn)
    for path, (leaf, _) in found.items():
        if isinstance(leaf, Leaf) and path in there:
            reading.want(path, leaf.thing, leaf.memory, leaf.parts)
    tally = reading.go()
    for path, (leaf, _) in found.items():
        other = there.get(path)
        if isinstance(leaf, Slot) and isinstance(other, Plain):
            leaf.put(other.value)
    return tally


def take(name: str, sources: Sequence[Leaves], box: Box, turn: int) -> Tally:
    """Read a box of the sources' leaf at the empty path into a new tensor or array, and assign it to a variable."""
    APPLIED_IN.get()[name], tally = take_box(PROCESS.client, sources, box, turn)
    return tally


def take_box(client: Client, sources: Sequence[Leaves], box: Box, turn: int = 0) -> tuple[Any, Tally]:
    """Read a box of the sources' leaf at the empty path into a new tensor, or a NumPy array if the sources have one."""
    held = next(leaf for leaf in (source[""] for source in sources) if isinstance(leaf, Held))
    thing = new_thing(held.dtype, shape_of(box), held.kind)
    reading = TensorReading(client, sources, turn)
    reading.want("", thing, memory_of(thing), [Part(box, (0,) * len(box))])
    return thing, reading.go()


def _found(names: Mapping[str, str]) -> dict[str, tuple[Leaf | Slot, str]]:
    """Path -> the leaf there, and the path of the first one with the same memory."""
    namespace: dict[str, Any] = APPLIED_IN.get()
    seen: dict[tuple[int, Layout], str] = {}
    found = {}
    for name, start in names.items():
        for end, leaf in leaves_of(namespace, name).items():
            path = start + end
            same = path
            if isinstance(leaf, Leaf) and leaf.parts:
                same = seen.setdefault((leaf.memory.address, leaf.memory.layout), path)
            found[path] = leaf, same
    return found


def _held(leaf: Leaf | Slot, same: str) -> Held | Plain:
    if isinstance(leaf, Slot):
        return Plain(leaf.value)
    return Held(leaf.memory.layout.dtype, leaf.shape, leaf.parts, None, same, leaf.kind)
