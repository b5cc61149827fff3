"""Collectives of a rank are counted: kind, process group, bytes, and for how long Python has waited for them.

Torch has a hook for that with NCCL alone (``_register_on_completion_hook``). Its flight recorder has no times of gloo, forgets
all but the last 2,000, and to read it holds the interpreter for 20 us an entry, of all of them each time. So the methods of
``ProcessGroup`` and ``Work.wait``, by which all that is written in Python goes, ``torch.distributed`` itself included, are
wrapped; what C++ begins (the reducer of DistributedDataParallel, functional collectives) is not seen. How many there were torch
says, group by group, so those that were not seen are told as a number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple
from weakref import ref

from monarch_kernel.net.memory.counters import Meters

__all__ = ["CollectiveMeter"]

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
}
"""Methods of a process group, as they are called from Python -> how users call what they do."""


_MAX_BEGUN = 1024


class _Kind(NamedTuple):
    group: str
    operation: str


class CollectiveMeter:
    """Counts what goes by the process groups of this process, once it is installed.

    Args:
        meters: take the counts.
        label: gives how users call a group, by torch's name and description of it.
    """

    def __init__(self, meters: Meters, label: Callable[[str, str], str]) -> None:
        self._meters = meters
        self._label = label
        self._labels: dict[str, str] = {}
        self._seen: dict[str, int] = {}
        self._begun: dict[int, tuple[ref[Any], _Kind]] = {}  # by address; those that nobody waits for are forgotten

    def install(self, dist: Any) -> None:
        """Wrap what collectives go by."""
        for method, operation in _NAMES.items():
            original = getattr(dist.ProcessGroup, method, None)
            if original is not None:
                setattr(dist.ProcessGroup, method, self._counting(original, operation))
        dist.Work.wait = self._waiting(dist.Work.wait)

    def count_unread(self, dist: Any) -> int:
        """How many collectives torch has counted in the groups there are, and we have not."""
        unread = 0
        for group in list(dist.distributed_c10d._world.pg_map):
            try:
                begun = int(group._get_sequence_number_for_group())
            except RuntimeError:  # it has none yet
                continue
            unread += max(0, begun - self._seen.get(group.group_name, 0))
        return unread

    def _counting(self, original: Callable[..., Any], operation: str) -> Callable[..., Any]:
        @wraps(original)
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            work = original(group, *args, **kwargs)
            name = group.group_name
            label = self._labels.get(name)
            if label is None:
                label = self._labels[name] = self._label(name, group.group_desc)
            self._seen[name] = self._seen.get(name, 0) + 1  # torch counts send and recv with the others
            if work is not None:
                if len(self._begun) >= _MAX_BEGUN:
                    self._forget()
                self._begun[id(work)] = ref(work), _Kind(label, operation)
            nbytes = max(map(_nbytes, (*args[:2], *kwargs.values())), default=0)
            self._meters.collect(label, operation, nbytes, seconds=time.perf_counter() - begun)
            return work

        return method

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            known = self._begun.pop(id(work), None)
            if known is None or known[0]() is not work:
                return original(work, *args, **kwargs)
            kind = known[1]
            begun = time.perf_counter()
            try:
                return original(work, *args, **kwargs)
            finally:
                self._meters.collect(*kind, 0, operations=0, seconds=time.perf_counter() - begun)

        return wait

    def _forget(self) -> None:
        self._begun = {key: known for key, known in self._begun.items() if known[0]() is not None}


def _nbytes(value: Any) -> int:
    """Bytes of a tensor, or of all in lists of them; 0 of anything else."""
    if type(value) is list or type(value) is tuple:
        return sum(map(_nbytes, value))
    if not _has_nbytes(type(value)):  # type: ignore[arg-type]
        return 0
    try:
        return int(value.nbytes)
    except RuntimeError:  # a sparse one has none of its own
        return int(value._indices().nbytes + value._values().nbytes) if value.is_sparse else 0


@cache
def _has_nbytes(kind: type) -> bool:
    return hasattr(kind, "nbytes")
