"""Counts the collectives of a rank: their kind, process group, bytes, and the time that Python has waited for them.

Torch has a completion hook for NCCL only (``_register_on_completion_hook``). Its flight recorder has no durations for gloo,
keeps only the last 2,000 entries, and a read holds the interpreter for 20 us per entry, each time for all entries. So this
module wraps the methods of ``ProcessGroup``, and ``Work.wait``, through which all Python code goes, including
``torch.distributed`` itself. Collectives that C++ code starts (the reducer of DistributedDataParallel, functional collectives)
bypass them. Torch counts all collectives of a group, so the report includes the number of those that were missed.

The flight recorder has no entries for gloo's sends, receives and ``monitored_barrier`` either, so the meter notes these calls,
and the waits for them, while they block a thread (`CollectiveMeter.blocked`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar
from weakref import ref

from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.train.process_group.call_check import CallCheck

__all__ = ["BlockedCall", "CollectiveMeter"]

T = TypeVar("T")

_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "monitored_barrier": "monitored_barrier",
}
"""Methods of a process group that Python code calls -> name of the collective for users."""


_MAX_STARTED = 1024
_WITH_PEER = ("send", "recv")
_NOT_RECORDED = ("send", "recv", "recv_anysource", "monitored_barrier")
"""Methods whose calls the flight recorder of torch does not have for gloo."""


class BlockedCall(NamedTuple):
    """A call that the flight recorder does not have, and for which a thread waits.

    Attributes:
        operation: such as ``send``.
        group: torch's name of the group; empty for the default one.
        label: the name of the group for users.
        peer: rank in the group that a send or receive is for; None for others.
        shapes: shapes of the tensors, such as ``4x8``.
        tag: the tag of a send or receive.
        members: the ranks in the mesh that take part, where the group does not exist yet.
    """

    operation: str
    group: str
    label: str
    peer: int | None = None
    shapes: str = ""
    tag: int = 0
    members: tuple[int, ...] = ()


class _Kind(NamedTuple):
    group: str
    operation: str
    call: BlockedCall | None = None


class CollectiveMeter:
    """Counts the collectives in the process groups of this process, once it is installed.

    Args:
        meters: receive the counts.
        label: returns the label of a group for users, given torch's name and description of it.
        check: compares each call with those of other ranks first. Both share one wrapper of each method, because a wrapper
            costs some microseconds where a collective takes a hundred.
    """

    def __init__(self, meters: Meters, label: Callable[[str, str], str], check: CallCheck) -> None:
        self._meters = meters
        self._check = check
        self._label = label
        self._labels: dict[str, str] = {}
        self._seen: dict[str, int] = {}
        self._started: dict[int, tuple[ref[Any], _Kind]] = {}  # by address; dead ones are dropped
        self._blocked: dict[int, tuple[float, BlockedCall]] = {}  # thread -> since when, and in which call

    def install(self, dist: Any) -> None:
        """Wrap the methods through which collectives go."""
        for method, operation in _NAMES.items():
            original = getattr(dist.ProcessGroup, method, None)
            if original is not None:
                setattr(dist.ProcessGroup, method, self._counting(original, method, operation))
        dist.Work.wait = self._waiting(dist.Work.wait)

    def blocked(self) -> dict[int, tuple[float, BlockedCall]]:
        """Return the calls that block a thread now and that the flight recorder does not have.

        Returns:
            thread -> when it began to wait, by the clock `time.monotonic`, and the call.
        """
        return self._blocked.copy()

    def run(self, call: BlockedCall, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call a function, and note meanwhile that this thread may wait in a call."""
        thread = threading.get_ident()
        self._blocked[thread] = time.monotonic(), call
        try:
            return function(*args, **kwargs)
        finally:
            self._blocked.pop(thread, None)

    def count_unread(self, dist: Any) -> int:
        """The number of collectives in existing groups that torch has counted and this meter has missed."""
        unread = 0
        for group in list(dist.distributed_c10d._world.pg_map):
            try:
                started = int(group._get_sequence_number_for_group())
            except RuntimeError:  # no number yet
                continue
            unread += max(0, started - self._seen.get(group.group_name, 0))
        return unread

    def _counting(self, original: Callable[..., Any], method_name: str, operation: str) -> Callable[..., Any]:
        check = self._check
        is_recorded = method_name not in _NOT_RECORDED

        @wraps(original)
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            number = check.start(group, method_name, args, kwargs, started)
            name = group.group_name
            label = self._labels.get(name)
            if label is None:
                label = self._labels[name] = self._label(name, group.group_desc)
            call: BlockedCall | None = None
            try:
                if is_recorded:
                    work = original(group, *args, **kwargs)
                else:
                    call = BlockedCall(operation, name, label, *_of_message(original.__name__, args))
                    work = self.run(call, original, group, *args, **kwargs)
            except BaseException as error:
                check.failed(group, number, error)
                raise
            if number < 0:
                check.uncompared(group, number)
            self._seen[name] = self._seen.get(name, 0) + 1  # torch counts send and recv, too
            if work is not None:
                if len(self._started) >= _MAX_STARTED:
                    self._forget()
                self._started[id(work)] = ref(work), _Kind(label, operation, call)
            nbytes = max(map(_nbytes, (*args[:2], *kwargs.values())), default=0)
            self._meters.collect(label, operation, nbytes, seconds=time.perf_counter() - started)
            return work

        return method

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        check = self._check

        @wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            known = self._started.pop(id(work), None)
            if known is None or known[0]() is not work:
                try:
                    return original(work, *args, **kwargs)
                except RuntimeError as error:
                    check.explain(error)
                    raise
            group, operation, call = known[1]
            started = time.perf_counter()
            try:
                if call is None:
                    return original(work, *args, **kwargs)
                return self.run(call, original, work, *args, **kwargs)
            except RuntimeError as error:
                check.explain(error)
                raise
            finally:
                self._meters.collect(group, operation, 0, operations=0, seconds=time.perf_counter() - started)

        return wait

    def _forget(self) -> None:
        self._started = {key: known for key, known in self._started.items() if known[0]() is not None}


def _of_message(method: str, args: tuple[Any, ...]) -> tuple[int | None, str, int]:
    """Return the peer, the shapes of the tensors, and the tag of a send or receive."""
    if not args or not isinstance(args[0], list):
        return None, "", 0
    shapes = ", ".join("x".join(map(str, each.shape)) or "()" for each in args[0] if hasattr(each, "shape"))
    peer, *tag = args[1:] if method in _WITH_PEER and len(args) > 1 else (None, *args[1:])
    return peer, shapes, tag[0] if tag and isinstance(tag[0], int) else 0


def _nbytes(value: Any) -> int:
    """Bytes of a tensor, or of the tensors in nested lists; 0 for other values."""
    if type(value) is list or type(value) is tuple:
        return sum(map(_nbytes, value))
    if not _has_nbytes(type(value)):  # type: ignore[arg-type]
        return 0
    try:
        return int(value.nbytes)
    except RuntimeError:  # sparse tensors have no nbytes
        return int(value._indices().nbytes + value._values().nbytes) if value.is_sparse else 0


@cache
def _has_nbytes(kind: type) -> bool:
    return hasattr(kind, "nbytes")
