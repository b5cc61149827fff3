"""Reads the traces of torch.profiler. Pure."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.features.profiling.spans import Spans, union

__all__ = ["Event", "RankTrace", "read_trace"]

Event = dict[str, Any]

_LOADER = "enumerate(DataLoader)#"
_COMMUNICATION = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")
_NOT_COMPUTE = (*_COMMUNICATION, "c10d::", "_c10d_functional::", "record_param_comms", "autograd::engine::")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_NCCL_KERNEL = "nccl"


@dataclass(frozen=True)
class RankTrace:
    """What the trace of a rank shows; times are in seconds since 1970, by the clock of its machine.

    Attributes:
        events: all its events.
        base_s: the time that is 0 in the events.
        compute: when operators have computed; on a GPU, when kernels have run.
        loader: when Python has waited for a batch of a DataLoader.
        communication: name, start and end of collectives, in order.
        is_on_gpu: whether kernels have run on a GPU.
    """

    events: Sequence[Event]
    base_s: float = 0.0
    compute: Spans = field(default_factory=list)
    loader: Spans = field(default_factory=list)
    communication: tuple[tuple[str, float, float], ...] = ()
    is_on_gpu: bool = False


def read_trace(data: bytes) -> RankTrace:
    """Read a trace of torch.profiler.

    Args:
        data: the JSON, compressed by gzip.

    Raises:
        ValueError: it is not a trace.
    """
    try:
        known = json.loads(gzip.decompress(data))
        events: list[Event] = [each for each in known["traceEvents"] if each.get("cat") != "Trace"]
        base_s = int(known.get("baseTimeNanoseconds", 0)) / 1e9
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise ValueError(f"this is not a trace of torch.profiler: {error!r}") from error
    slices = [each for each in events if each.get("ph") == "X" and "ts" in each and "dur" in each]
    kernels = [each for each in slices if each.get("cat") in _ON_GPU]

    def span(event: Event) -> tuple[float, float]:
        return base_s + event["ts"] / 1e6, base_s + (event["ts"] + event["dur"]) / 1e6

    if kernels:
        compute = union(span(each) for each in kernels if not each["name"].lower().startswith(_NCCL_KERNEL))
    else:
        compute = union(span(each) for each in _leaves(slices) if not each["name"].startswith(_NOT_COMPUTE))
    kind = "gpu_user_annotation" if kernels else "user_annotation"
    calls = [each for each in slices if each["name"].startswith(_COMMUNICATION) and each.get("cat") == kind]
    return RankTrace(
        events,
        base_s,
        compute,
        union(span(each) for each in slices if each["name"].startswith(_LOADER)),
        tuple(sorted(((each["name"], *span(each)) for each in calls), key=lambda call: call[1])),
        bool(kernels),
    )


def _leaves(slices: Iterable[Event]) -> Iterator[Event]:
    """Yield the operators that call no other operator."""
    threads: defaultdict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for each in slices:
        if each.get("cat") == "cpu_op":
            threads[each.get("pid"), each.get("tid")].append(each)
    for of_thread in threads.values():
        of_thread.sort(key=lambda each: (each["ts"], -each["dur"]))
        for at, each in enumerate(of_thread):
            if at + 1 == len(of_thread) or of_thread[at + 1]["ts"] >= each["ts"] + each["dur"]:
                yield each
