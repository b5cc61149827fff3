"""Reads torch's flight recorder, which has the last collectives of this process, seldom and without what is not used.

Theory of operation
===================

The recorder keeps 500 collectives on ranks (torch's default is 2,000), and returns all of them at once: for gloo it can't tell
those that have ended. So a read takes some 6 ms, in which no other thread runs Python. As JSON it takes five times as long as
pickled without stacks.

Looks at a running rank, which views and cells repeat every second or so, therefore first compare the numbers of collectives
that torch has counted in each group with those of the last look (`FlightRecorder.may_pend`). A group whose number has grown is
in use: the rank has not waited in it since the last look. In a group whose number is that of the last read, in which nothing
pended, nothing pends now. The recorder is read only for other groups, and once in a while, because several threads may use one
group.

A read of 2,000 allocates 11 MiB for a moment. glibc keeps freed memory in the arena of the thread that had it, and makes up to
eight arenas for each core. Looks and aborts happen on threads that come and go, in any of these arenas. So one thread reads for
all of them: else each interrupt could make the process larger by 11 MiB, up to 176 MiB with two cores.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["FlightRecorder", "numbers_of"]


_READ_EVERY_S = 20.0
"""A look reads the recorder if the last read is older."""


class FlightRecorder:
    """The recorder, since the process group was formed.

    Attributes:
        since_ns: when the group was formed, by `time.time_ns`; earlier collectives are left out.
    """

    def __init__(self) -> None:
        self.since_ns = 0
        self._looked: dict[str, int] = {}
        self._quiet: dict[str, int] = {}  # group -> its number when nothing pended
        self._read_at = 0.0

    def entries(self) -> list[dict[str, Any]]:
        """Read the collectives of the current groups, oldest first; those with a false ``retired`` are pending."""
        return _of_current_groups(_READER.read(), self.since_ns)

    def may_pend(self, numbers: Mapping[str, int], now: float) -> bool:
        """Say whether a collective may have been pending since the last look.

        Args:
            numbers: torch's name of each group -> how many collectives torch has counted in it.
            now: the time, by `time.monotonic`.
        """
        looked, self._looked = self._looked, dict(numbers)
        if now >= self._read_at + _READ_EVERY_S and numbers != self._quiet:
            return True
        return any(number == looked.get(name, number) != self._quiet.get(name, 0) for name, number in numbers.items())

    def note(self, numbers: Mapping[str, int], entries: list[dict[str, Any]], now: float) -> None:
        """Note what a read has found.

        Args:
            numbers: torch's name of each group -> its number just before the read.
            entries: what was read.
            now: the time, by `time.monotonic`.
        """
        self._read_at = now
        busy = {each["process_group"][0] for each in entries if not each["retired"]}
        self._looked = dict(numbers)
        self._quiet = {name: number for name, number in numbers.items() if name not in busy}


def _of_current_groups(entries: Sequence[dict[str, Any]], since_ns: int) -> list[dict[str, Any]]:
    """Leave out what is older, and what code has started since then in a former group, which has the name of a current one."""
    former = {each.get("pg_id") for each in entries if each["time_created_ns"] < since_ns} - {None}
    return [each for each in entries if each["time_created_ns"] >= since_ns and each.get("pg_id") not in former]


def numbers_of(groups: Iterable[Any]) -> dict[str, int]:
    """Return torch's name of each group -> how many collectives torch has counted in it, in all its backends together."""
    return {str(group.group_name): sum(_number_in(group, device) for device in group._device_types) for group in groups}


def _number_in(group: Any, device: Any) -> int:
    try:
        return int(group._get_backend(device)._get_sequence_number_for_group())
    except RuntimeError:  # a backend without numbers
        return 0


class _Reader:
    """The thread that reads the recorder; it starts at the first read."""

    def __init__(self) -> None:
        self._start_again()
        os.register_at_fork(after_in_child=self._start_again)  # a fork has no such thread

    def _start_again(self) -> None:
        self._executor = ThreadPoolExecutor(1, "monarch-flight-recorder")

    def read(self) -> list[dict[str, Any]]:
        """Return the collectives that the recorder has, oldest first; none before torch.distributed is imported."""
        return self._executor.submit(_dump).result() if "torch.distributed" in sys.modules else []


_READER = _Reader()


def _dump() -> list[dict[str, Any]]:
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace", None)
    if dump is not None:
        found = pickle.loads(dump(includeCollectives=True, includeStackTraces=False, onlyActive=True))
    else:
        dump = getattr(c10d, "_dump_fr_trace_json", None)
        found = {} if dump is None else json.loads(dump(includeCollectives=True, onlyActive=True))
    return list(found.get("entries", ()))
