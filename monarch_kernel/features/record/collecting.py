"""Joins what ranks say of the steps of loops, so that a record has one row for each step. Pure, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.features.record.packing import BATCHES, Summary, pack_digests, pack_metrics
from monarch_kernel.net.wire.messages import Logged

__all__ = ["NO_DIGEST", "Collector", "Rows", "StepDigests"]

Rows = Iterable[tuple[str, Sequence[Any]]]
"""Statements of SQL with their parameters."""

_KINDS = ("batch", "parameters", "generators")
_NBYTES = 8

NO_DIGEST = bytes(_NBYTES)
"""Stands for a rank that has sent none."""

_KEPT = 20_000
"""Steps of a metric that wait for further ranks; older ones are final."""

_BLOCK = 512
"""Steps in a block (`packing`). The newest steps, up to twice as many, are rows, as ranks may still report them."""

StepDigests = tuple[int, Mapping[str, bytes]]
"""A step, and the digest of each kind."""

_METRIC = "INSERT OR REPLACE INTO metric VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_DATA = "INSERT OR REPLACE INTO data VALUES (?, ?, ?)"
_BLOCKS = "INSERT INTO block VALUES (NULL, ?, ?, ?, ?, ?)"
_CHECK = 'INSERT OR REPLACE INTO "check" VALUES (?, ?, ?, ?)'


@dataclass
class _Loop:
    """What is known of the last steps of one loop."""

    metrics: dict[tuple[int, int], dict[int, Logged]] = field(default_factory=dict)  # name, step -> rank -> value
    digests: dict[tuple[str, int], dict[int, bytes]] = field(default_factory=dict)  # kind, step -> rank -> digest
    changed_metrics: set[tuple[int, int]] = field(default_factory=set)
    changed_digests: set[tuple[str, int]] = field(default_factory=set)
    metric_rows: dict[int, dict[int, Summary]] = field(
        default_factory=dict
    )  # name -> step -> what is a row, in no block
    batch_rows: dict[int, bytes] = field(default_factory=dict)


class Collector:
    """Collects values and digests by loop and step; `due` gives the rows that have changed since its last call."""

    def __init__(self) -> None:
        self._loops: dict[int, _Loop] = {}
        self._names: dict[str, int] = {}
        self._new_names: list[str] = []

    def logged(self, loop: int, rank: int, values: Mapping[str, Sequence[Logged]]) -> Rows:
        """A rank has logged values in a loop. The rows come with `due`."""
        of = self._loops.setdefault(loop, _Loop())
        for name, each in values.items():
            if name not in self._names:
                self._names[name] = len(self._names) + 1
                self._new_names.append(name)
            for value in each:
                key = self._names[name], value.step
                of.metrics.setdefault(key, {})[rank] = value
                of.changed_metrics.add(key)
        return ()

    def noted(self, loop: int, rank: int, steps: Iterable[StepDigests]) -> None:
        """A rank has sent digests of steps of a loop."""
        of = self._loops.setdefault(loop, _Loop())
        for step, digests in steps:
            for kind, digest in digests.items():
                if kind in _KINDS:
                    of.digests.setdefault((kind, step), {})[rank] = digest[:_NBYTES].ljust(_NBYTES, b"\0")
                    of.changed_digests.add((kind, step))

    def back(self, loop: int, step: int) -> Rows:
        """A loop goes back to a step: what it has from there on will come again. Returns statements that remove it."""
        of = self._loops.setdefault(loop, _Loop())
        of.metrics = {key: ranks for key, ranks in of.metrics.items() if key[1] < step}
        of.digests = {key: ranks for key, ranks in of.digests.items() if key[1] < step}
        of.changed_metrics &= of.metrics.keys()
        of.changed_digests &= of.digests.keys()
        for name, rows in of.metric_rows.items():
            of.metric_rows[name] = {at: row for at, row in rows.items() if at < step}
        of.batch_rows = {at: row for at, row in of.batch_rows.items() if at < step}
        return [
            *(
                (f'DELETE FROM "{table}" WHERE loop = ? AND step >= ?', (loop, step))
                for table in ("metric", "data", "check")
            ),
            ("DELETE FROM block WHERE loop = ? AND first >= ?", (loop, step)),
            ("UPDATE block SET until = min(until, ?) WHERE loop = ?", (step, loop)),
        ]

    def forget(self, loop: int) -> Rows:
        """Return the rows of a loop that is long over, and drop the rest of it."""
        of = self._loops.pop(loop, None)
        return [*self._names_due(), *_rows(loop, of)] if of is not None else ()

    def due(self) -> Rows:
        """Return the rows that have changed."""
        rows = self._names_due()
        for loop, of in self._loops.items():
            rows += _rows(loop, of)
            while len(of.metrics) > _KEPT:
                del of.metrics[next(iter(of.metrics))]
            while len(of.digests) > _KEPT:
                del of.digests[next(iter(of.digests))]
        return rows

    def _names_due(self) -> list[tuple[str, Sequence[Any]]]:
        names, self._new_names = self._new_names, []
        return [("INSERT OR IGNORE INTO name VALUES (?, ?)", (self._names[name], name)) for name in names]


def _rows(loop: int, of: _Loop) -> list[tuple[str, Sequence[Any]]]:
    rows: list[tuple[str, Sequence[Any]]] = []
    for name, step in sorted(of.changed_metrics):
        summary = Summary(step, *_summary(of.metrics[name, step]))
        of.metric_rows.setdefault(name, {})[step] = summary
        rows.append((_METRIC, (loop, name, *summary)))
    for kind, step in sorted(of.changed_digests):
        joined = _joined(of.digests[kind, step])
        if kind == "batch":
            of.batch_rows[step] = joined
        rows.append((_DATA, (loop, step, joined)) if kind == "batch" else (_CHECK, (loop, step, kind, joined)))
    of.changed_metrics.clear()
    of.changed_digests.clear()
    for name, by_step in of.metric_rows.items():
        for steps in _full_blocks(by_step):
            block = pack_metrics([by_step.pop(step) for step in steps])
            rows.append((_BLOCKS, (loop, name, steps[0], steps[-1] + 1, block)))
            rows.append(("DELETE FROM metric WHERE loop = ? AND name = ? AND step <= ?", (loop, name, steps[-1])))
    for steps in _full_blocks(of.batch_rows):
        block = pack_digests([(step, of.batch_rows.pop(step)) for step in steps])
        rows.append((_BLOCKS, (loop, BATCHES, steps[0], steps[-1] + 1, block)))
        rows.append(("DELETE FROM data WHERE loop = ? AND step <= ?", (loop, steps[-1])))
    return rows


def _full_blocks(by_step: Mapping[int, Any]) -> list[list[int]]:
    """Return the steps of each block that is full, the oldest first."""
    if len(by_step) < 2 * _BLOCK:
        return []
    steps = sorted(by_step)
    return [steps[at : at + _BLOCK] for at in range(0, len(steps) - 2 * _BLOCK + 1, _BLOCK)]


def _summary(ranks: Mapping[int, Logged]) -> tuple[float | None, float | None, float | None, int, int]:
    """Mean, least and greatest value of ranks, their number, and the number of steps. Equal values are stored once.

    `math.fsum` is exact, so the order in which ranks report does not matter.
    """
    values = [value for _, value in sorted(ranks.items())]
    size = max(value.size for value in values)
    means = [value.total / value.count for value in values if value.count]
    if not means:
        return None, None, None, len(values), size
    count = sum(value.count for value in values)
    mean = math.fsum(value.total for value in values) / count
    if min(means) == max(means) == mean:
        return mean, None, None, len(values), size
    return mean, min(means), max(means), len(values), size


def _joined(ranks: Mapping[int, bytes]) -> bytes:
    """The digests of ranks 0, 1, 2 ... one after another."""
    return b"".join(ranks.get(rank, NO_DIGEST) for rank in range(max(ranks) + 1))
