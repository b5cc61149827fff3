"""Compares two records: what differs, in the order in which it took effect, and what differs first. Pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from monarch_kernel.base.text import format_ranks, one_line, plural
from monarch_kernel.features.record.collecting import NO_DIGEST
from monarch_kernel.features.record.reading import RecordReader
from monarch_kernel.features.record.tables import FIRST_COMPARABLE, Cell, Check, Metric

__all__ = ["Difference", "Differences", "compare"]

_WHAT = {"batch": "batch", "parameters": "parameters", "generators": "random generators"}
_ORDER = ("knob", "batch", "generators", "metric", "parameters")
"""Of what differs in one step, the cause comes before its effects."""

_NOUNS = {
    "cells": ("cell", ""),
    "batches": ("batch", "batches"),
    "metrics": ("metric", ""),
    "generators": ("generator", ""),
    "parameters": ("set of parameters", "sets of parameters"),
}
"""What is compared, one and several."""

_PLACES = ("python", "platform", "host", "git_commit", "git_diff", "folder")


@dataclass(frozen=True)
class Difference:
    """One difference between two records.

    Attributes:
        kind: ``package``, ``run``, ``cell``, ``file``, ``data``, ``knob``, ``batch``, ``generators``, ``metric``,
            ``parameters`` or ``length``.
        text: what differs.
        cell: the id of the cell; 0 if it is none.
        loop: the number of the loop; 0 if it is none.
        step: the step; -1 if it is none.
        is_result: whether it is a result, and not only a circumstance.
    """

    kind: str
    text: str
    cell: int = 0
    loop: int = 0
    step: int = -1
    is_result: bool = False

    def __str__(self) -> str:
        return one_line(self.text)


@dataclass(frozen=True)
class Differences:
    """How two records differ.

    Attributes:
        all: the differences: those of the environment first, then by cell and step.
        compared: how many values of each kind both records have, and were compared.
    """

    all: tuple[Difference, ...]
    compared: Mapping[str, int]

    @property
    def first(self) -> Difference | None:
        """The difference that took effect first; None if there is none."""
        return next((each for each in self.all if each.kind != "run"), None)

    @property
    def are_equal(self) -> bool:
        """Whether all results that both records have are equal."""
        return not any(each.is_result for each in self.all)

    @property
    def counts(self) -> str:
        """How many values of each kind were compared: ``2 cells, 6 batches``."""
        return ", ".join(plural(count, *_NOUNS[kind]) for kind, count in self.compared.items() if count) or "nothing"

    def __bool__(self) -> bool:
        return bool(self.all)

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def __str__(self) -> str:
        head = f"compared: {self.counts}"
        if self.first is None:
            return f"{head}; no difference"
        return "\n".join([head, f"first difference: {self.first}", *(f"  {each}" for each in self.all)])

    __repr__ = __str__


def compare(old: RecordReader, new: RecordReader, *, until_step: int | None = None, mesh: str = "") -> Differences:
    """Compare two records.

    Args:
        old: the first record.
        new: the second one.
        until_step: compare only what comes before this step of each loop.
        mesh: the second record is a replay of the first: compare only the cells of this mesh, and no others, and no step in
            which the first was cut off.
    """
    compared = dict.fromkeys(_NOUNS, 0)
    found = [*_packages(old, new), *_places(old, new)]
    with_digests = (old.version < FIRST_COMPARABLE) == (new.version < FIRST_COMPARABLE)
    if not with_digests:
        text = (
            "digests of batches and parameters are not compared: one record is of an earlier version of monarch_kernel"
        )
        found.append(Difference("run", text))
    old_cells, new_cells = _cells(old, mesh), _cells(new, mesh)
    compared["cells"] = min(len(old_cells), len(new_cells))
    found += _of_files(old, new)
    found += _of_data(old, new)
    loops_old: dict[int, list[int]] = {}
    loops_new: dict[int, list[int]] = {}
    for reader, loops in ((old, loops_old), (new, loops_new)):
        for loop in reader.loops:
            loops.setdefault(loop.cell, []).append(loop.id)
    steps = (_by_loop(old, until_step, with_digests), _by_loop(new, until_step, with_digests))
    for one, other in _pairs(old_cells, new_cells):
        if one is None or other is None:
            cell = one or other
            assert cell is not None
            which = "the first" if other is None else "the second"
            found.append(Difference("cell", f"only {which} record has cell [{cell.number}]", cell.id))
            continue
        if one.code != other.code:
            found.append(_code(one, other))
        elif one.outcome != other.outcome and other.outcome and until_step is None and not (mesh and _is_cut(one)):
            text = f"cell [{one.number}]: {one.outcome or 'no end'} -> {other.outcome}"
            found.append(Difference("outcome", text, one.id, is_result=True))
        mine, theirs = loops_old.get(one.id, []), loops_new.get(other.id, [])
        if len(mine) != len(theirs) and not (mesh and _is_cut(one)):
            text = f"cell [{one.number}] has {plural(len(mine), 'loop')} -> {plural(len(theirs), 'loop')}"
            found.append(Difference("length", text, one.id, is_result=True))
        for a, b in zip(mine, theirs):
            had, has = steps[0].get(a, {}), steps[1].get(b, {})
            if mesh and (cut := old.cut_before(a)) is not None:
                end = min(cut, _complete_before(had))
                had, has = ({key: value for key, value in each.items() if key[2] < end} for each in (had, has))
            found += _of_loop(one, a, had, has, compared)
    return Differences(tuple(found), compared)


def _is_cut(cell: Cell) -> bool:
    """Whether a cell was interrupted, or the record ends before it."""
    return cell.outcome in ("", "interrupted")


def _complete_before(steps: _Steps) -> float:
    """The first step that fewer ranks have reported than other steps; infinite if there is none."""
    counts = {
        key: value.ranks if key[0] == "metric" else len(value.digests) - value.digests.count(NO_DIGEST)
        for key, value in steps.items()
        if key[0] in ("metric", "batch")
    }
    most: dict[tuple[str, str], int] = {}
    for (kind, name, _), count in counts.items():
        most[kind, name] = max(most.get((kind, name), 0), count)
    return min((step for (kind, name, step), count in counts.items() if count < most[kind, name]), default=math.inf)


def _cells(reader: RecordReader, mesh: str) -> list[Cell]:
    if mesh:
        return [cell for cell in reader.cells if cell.mesh == mesh]
    on_ranks = {cell.number for cell in reader.cells if cell.mesh}
    return [
        cell
        for cell in reader.cells
        # A cell that ranks ran is there twice: as it was typed, and as they ran it.
        if cell.mesh or not (cell.number in on_ranks or cell.code.lstrip().startswith("%mesh record"))
    ]


def _pairs(old: list[Cell], new: list[Cell]) -> Iterator[tuple[Cell | None, Cell | None]]:
    """Pair the cells of two records: those with equal code, and between these the others in their order."""
    matcher = difflib.SequenceMatcher(None, [cell.hash for cell in old], [cell.hash for cell in new], autojunk=False)
    for _, a, b, c, d in matcher.get_opcodes():
        yield from zip_longest(old[a:b], new[c:d])


def _packages(old: RecordReader, new: RecordReader) -> Iterator[Difference]:
    prefix = "package:"
    names = sorted({key for key in (*old.run, *new.run) if key.startswith(prefix)})
    pairs = [(name.removeprefix(prefix), old.run.get(name), new.run.get(name)) for name in names]
    if changed := [(name, one, other) for name, one, other in pairs if one != other]:
        changed.sort(key=lambda each: (each[0] not in ("torch", "numpy", "monarch_kernel"), each[0]))
        shown = [f"{name} {one or 'none'} -> {other or 'none'}" for name, one, other in changed[:8]]
        more = f", and {len(changed) - 8} more" if len(changed) > 8 else ""
        yield Difference("package", f"packages differ: {', '.join(shown)}{more}")


def _places(old: RecordReader, new: RecordReader) -> Iterator[Difference]:
    keys = [*_PLACES, *sorted(key for key in {*old.run, *new.run} if key.startswith(("env:", "mesh:")))]
    for key in keys:
        one, other = old.run.get(key), new.run.get(key)
        if one == other or (key.startswith("mesh:") and None in (one, other)):  # a replay has a mesh of another name
            continue
        if key == "git_diff":
            yield Difference("run", "the changes that are not committed differ")
        else:
            yield Difference("run", f"{key.removeprefix('env:')} differs: {one or 'none'} -> {other or 'none'}")


def _of_files(old: RecordReader, new: RecordReader) -> Iterator[Difference]:
    for path, (hashed, _) in old.files.items():
        if path in new.files and new.files[path][0] != hashed:
            yield Difference("file", f"{path} has changed")


def _of_data(old: RecordReader, new: RecordReader) -> Iterator[Difference]:
    had = {each.path: each for each in old.data_files}
    for path, other in {each.path: each for each in new.data_files}.items():
        if path in had and (had[path].nbytes, had[path].hash) != (other.nbytes, other.hash):
            sizes = f": {had[path].nbytes:,} -> {other.nbytes:,} bytes" if had[path].nbytes != other.nbytes else ""
            yield Difference("data", f"the data file {path} has changed{sizes}")


def _code(one: Cell, other: Cell) -> Difference:
    lines = [
        line
        for line in difflib.unified_diff(one.code.splitlines(), other.code.splitlines(), n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    shown = "; ".join(line.strip() for line in lines[:4])
    return Difference("cell", f"cell [{one.number}] differs: {shown}{' …' * (len(lines) > 4)}", one.id)


_Steps = dict[tuple[str, str, int], Any]
"""Kind, name and step -> a value."""


def _by_loop(reader: RecordReader, until_step: int | None, with_digests: bool) -> dict[int, _Steps]:
    found: dict[int, _Steps] = {}
    end = math.inf if until_step is None else until_step

    def put(loop: int, kind: str, name: str, step: int, value: Any) -> None:
        found.setdefault(loop, {})[kind, name, step] = value

    for metric in reader.metrics:
        if metric.step < end:
            put(metric.loop, "metric", metric.name, metric.step, metric)
    for check in (*reader.batches, *reader.checks) if with_digests else ():
        if check.step < end or (check.kind != "batch" and check.step <= end):
            put(check.loop, check.kind, "", check.step, check)
    for knob in reader.knobs:
        if not knob.is_default and knob.step < end:
            put(knob.loop, "knob", knob.name, knob.step, knob.value)
    return found


def _of_loop(cell: Cell, loop: int, old: _Steps, new: _Steps, compared: dict[str, int]) -> Iterator[Difference]:
    counted = {"batch": "batches", "metric": "metrics", "generators": "generators", "parameters": "parameters"}
    where = f"cell [{cell.number}], "
    firsts: list[Difference] = []
    seen: set[tuple[str, str]] = set()
    keys = sorted(old.keys() | new.keys(), key=lambda key: (key[2], _ORDER.index(key[0]), key[1]))
    for kind, name, step in keys:
        one, other = old.get((kind, name, step)), new.get((kind, name, step))
        if kind == "knob":
            if one != other and (kind, name) not in seen:
                seen.add((kind, name))
                text = f"{where}step {step:,}: {name} is {_knob_text(one)} -> {_knob_text(other)}"
                firsts.append(Difference("knob", text, cell.id, loop, step))
            continue
        if one is None or other is None:
            continue
        if kind == "metric" and (one.size != 1 or other.size != 1) and one.size != other.size:
            continue
        compared[counted[kind]] += 1
        if (kind, name) not in seen and (text := _difference(kind, one, other)):
            seen.add((kind, name))
            firsts.append(Difference(kind, f"{where}step {step:,}: {text}", cell.id, loop, step, True))
    yield from firsts
    ends = [max((key[2] for key in of if key[0] in ("batch", "metric")), default=-1) for of in (old, new)]
    if -1 in ends and ends[0] != ends[1]:
        which = "first" if ends[0] == -1 else "second"
        yield Difference("length", f"{where}loop {loop}: the {which} record has no values", cell.id, loop, 0, True)
    elif ends[0] != ends[1]:
        text = f"{where}loop {loop} comes to step {ends[0]:,} -> {ends[1]:,}"
        yield Difference("length", text, cell.id, loop, min(ends) + 1, True)


def _difference(kind: str, one: Any, other: Any) -> str:
    if isinstance(one, Metric):
        values = (one.mean, one.min, one.max, one.ranks), (other.mean, other.min, other.max, other.ranks)
        if all(_same(a, b) for a, b in zip(*values)):
            return ""
        if one.ranks != other.ranks:
            return f"{one.name} comes from {one.ranks} -> {other.ranks} ranks"
        return f"{one.name} differs: {one.mean!r} -> {other.mean!r}"
    ranks = list(_ranks(one, other))
    if not ranks:
        return ""
    verb = "differ" if kind != "batch" else "differs"
    return f"{_WHAT[kind]} {verb} on {_rank_text(ranks)}{' (loader)' if kind == 'batch' else ''}"


def _ranks(one: Check, other: Check) -> Iterable[int]:
    for rank in range(max(len(one.digests), len(other.digests))):
        a = one.digests[rank] if rank < len(one.digests) else NO_DIGEST
        b = other.digests[rank] if rank < len(other.digests) else NO_DIGEST
        if a != b:
            yield rank


def _rank_text(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"


def _same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


def _knob_text(value: Any) -> str:
    return "not set" if value is None else repr(value)
