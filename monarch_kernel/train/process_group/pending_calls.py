"""What the threads of a rank wait for in torch.distributed: collectives that have not ended, and other calls that block.

Torch's flight recorder has most collectives. It has no entries for gloo's point-to-point calls, for ``monitored_barrier``, and
for stores; the counts of collectives (`collective_counts`) and the native waits (`native_waits`) know those.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from math import prod
from typing import Any

from monarch_kernel.runtime.diagnostics.stacks import Collective
from monarch_kernel.runtime.diagnostics.thread_frames import frames_of
from monarch_kernel.runtime.worker.imports import is_importing
from monarch_kernel.train.process_group import call_check, collective_counts, native_waits, noting_groups, operators
from monarch_kernel.train.process_group.collective_counts import BlockedCall, CollectiveMeter
from monarch_kernel.train.process_group.collective_purposes import Purposes
from monarch_kernel.train.process_group.flight_recorder import FlightRecorder, numbers_of
from monarch_kernel.train.process_group.labels import label_of
from monarch_kernel.train.process_group.native_waits import NativeWaits

__all__ = ["PendingCalls"]

_MAX_DEPTH = 1000
_IMPORTS_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.001


class PendingCalls:
    """The calls of torch.distributed in this process that have not ended; for any thread.

    Args:
        world_size: The number of ranks of the mesh.
        meter: Knows the calls that block a thread.
        waits: Knows the waits in native code.
        purposes: Knows what the collectives are for that torch starts itself.
    """

    def __init__(self, world_size: int, meter: CollectiveMeter, waits: NativeWaits, purposes: Purposes) -> None:
        self._world_size = world_size
        self._meter = meter
        self._waits = waits
        self._purposes = purposes
        self._recorder = FlightRecorder()

    def begin_at(self, time_ns: int) -> None:
        """Leave out what the flight recorder has from before this time: it was in groups that no longer exist."""
        self._recorder.since_ns = time_ns

    def oldest_s(self, others: Collection[int]) -> float:
        """Age in seconds of the oldest pending collective that none of these threads has started; 0 if there is none.

        A wait that the flight recorder does not have counts, too, such as that of a thread of the user in a ``recv``.
        """
        pending = (entry for entry in self._recorder.entries() if not entry["retired"])
        oldest = min(
            (each["time_created_ns"] for each in pending if int(each["thread_id"]) not in others), default=None
        )
        recorded_s = 0.0 if oldest is None else max(1e-9, (time.time_ns() - oldest) / 1e9)
        return max(recorded_s, self._waits.oldest_s(others))

    def waits_s(self, thread: int) -> float:
        """For how long a thread, given by its `threading.get_ident`, has been in a call of torch.distributed; 0 if in none."""
        if "torch.distributed" not in sys.modules:
            return 0.0
        if (waited_s := self._waits.waits_s(thread)) > 0:
            return waited_s
        frame = sys._current_frames().get(thread)
        ours = (collective_counts, operators, noting_groups, call_check, native_waits)  # they wait
        calls = (_distributed().__file__, *(each.__file__ for each in ours))
        return 1e-9 if frame is not None and frame.f_code.co_filename in calls else 0.0

    def in_torch(self) -> list[int]:
        """The threads that may wait for pending collectives in C++ code of torch, as a backward pass does; none that imports.

        A thread that imports a module for torch is waited for: a module of which a half is imported can't be imported again.
        """
        started = {int(entry["thread_id"]) for entry in self._recorder.entries() if not entry["retired"]}
        torch = f"{os.path.dirname(sys.modules['torch'].__file__ or '')}/"
        deadline = time.monotonic() + _IMPORTS_WITHIN_S
        while True:
            stacks = {thread: frames_of(thread, _MAX_DEPTH) for thread in started if self._waits.waits_s(thread) == 0}
            if not any(map(is_importing, stacks.values())) or time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_EVERY_S)
        return [
            thread
            for thread, frames in stacks.items()
            if not is_importing(frames) and any(each.f_code.co_filename.startswith(torch) for each in frames)
        ]

    def listed(self, brief: bool = False) -> tuple[tuple[Collective, ...], dict[str, int]]:
        """Pending collectives, oldest first, and for each process group the number of the last collective started.

        Args:
            brief: whether collectives that torch has recorded may be left out in groups where more were started since the last
                call, so that none of them has been pending since then.
        """
        if "torch.distributed" not in sys.modules:  # none was started
            return (), {}
        world = _distributed()._world
        names = dict(world.pg_names)  # without NON_GROUP_MEMBER, the placeholder of groups that this rank is not in
        members = {
            names[group]: tuple(sorted(it)) for group, it in dict(world.pg_group_ranks).items() if group in names
        }
        counts, now = numbers_of(list(world.pg_map)), time.monotonic()
        recorded: list[dict[str, Any]] = []
        if not brief or self._recorder.may_pend(counts, now):
            recorded = self._recorder.entries()
            self._recorder.note(counts, recorded, now)
        labels = _Labels()
        reached = labels.reached(recorded)
        found = [
            _recorded_collective(entry, labels.of(entry), members.get(entry["process_group"][0], ()), self._purposes)
            for entry in recorded
            if not entry["retired"]
        ]
        for thread, (since, call) in self._meter.blocked().items():
            numbers = world.pg_group_ranks.get(_group_named(world, call.group), {})
            found.append(_blocked_collective(call, {number: rank for rank, number in numbers.items()}, since, thread))
        everyone, blocked = tuple(range(self._world_size)), {each.thread for each in found}
        found += [  # any rank may be the one that sets the keys
            Collective(what, 0, members=everyone, age_s=time.monotonic() - since, thread=thread)
            for thread, (since, what) in self._waits.for_keys().items()
            if thread not in blocked
        ]
        return tuple(sorted(found, key=lambda each: -each.age_s)), reached


class _Labels:
    """The labels of the groups in one content of the flight recorder, which names a group in each entry."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}

    def of(self, entry: dict[str, Any]) -> str:
        """Return the label of the group of an entry."""
        name, about = entry["process_group"]
        label = self._known.get((name, about))
        if label is None:
            label = self._known[name, about] = label_of(name, about)
        return label

    def reached(self, entries: Sequence[dict[str, Any]]) -> dict[str, int]:
        """Return for each group the number of the last collective started."""
        found: dict[str, int] = {}
        for entry in entries:
            label = self.of(entry)
            found[label] = max(found.get(label, 0), int(entry["collective_seq_id"]))
        return found


def _recorded_collective(entry: dict[str, Any], label: str, members: tuple[int, ...], purposes: Purposes) -> Collective:
    """Describe a collective that the flight recorder has."""
    operation, thread = str(entry["profiling_name"]).partition(":")[2], int(entry["thread_id"])
    return Collective(
        operation=operation,
        number=int(entry["collective_seq_id"]),
        group=label,
        members=members,
        shapes=_shapes_text(entry["input_sizes"]),
        age_s=max(0.0, (time.time_ns() - entry["time_created_ns"]) / 1e9),
        thread=thread,
        purpose=purposes.of(operation, sum(map(prod, entry["input_sizes"])), thread),
    )


def _shapes_text(shapes: Iterable[Sequence[int]]) -> str:
    return ", ".join("x".join(map(str, shape)) or "()" for shape in shapes)


def _blocked_collective(call: BlockedCall, ranks: dict[int, int], since: float, thread: int) -> Collective:
    """Describe a call that blocks a thread; ``ranks`` has the rank in the mesh of each rank in the group."""
    return Collective(
        operation=call.operation,
        number=0,
        group=call.label,
        members=call.members or tuple(sorted(ranks.values())),
        shapes=_shapes_text(call.shapes),
        age_s=time.monotonic() - since,
        thread=thread,
        peer=None if call.peer is None else ranks.get(call.peer),
        tag=call.tag,
    )


def _group_named(world: Any, name: str) -> Any:
    """The group with torch's name; the default group for an empty name."""
    return next((group for group, each in dict(world.pg_names).items() if each == name), world.default_pg)


def _distributed() -> Any:
    """torch.distributed's own module as `Any`, because few of its names are typed."""
    import torch.distributed

    return torch.distributed.distributed_c10d
