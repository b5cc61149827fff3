"""What a profile shows, as text and as a file."""

from __future__ import annotations

import gzip
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from monarch_kernel.base.text import aligned, format_nbytes, format_ranks, format_seconds, plain, plural
from monarch_kernel.errors import Failure, Frame
from monarch_kernel.features.profiling.analysis import LEAST, PARTS, Findings, analyse
from monarch_kernel.features.profiling.controller import ProfileControl
from monarch_kernel.features.profiling.merging import merge
from monarch_kernel.features.profiling.recording import Place, Recording
from monarch_kernel.features.profiling.timeline import NameOfEnd, Timeline, timeline_of
from monarch_kernel.features.profiling.trace import RankTrace, read_trace
from monarch_kernel.runtime.controller.host_compatibility import Clock
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.diagnostics.source_names import short_cell
from monarch_kernel.runtime.host.link_speeds import link_text, links_text

__all__ = ["Profile", "check_numbers", "profile"]

_GROWTH_NBYTES = 1 << 20
_MAX_STEPS = 10_000
_MAX_SECONDS = 3600.0
_MAX_WIDTH = 120
_MAX_PAIRS = 3

Rename = Callable[[Frame], Frame]


@dataclass(frozen=True)
class Profile:
    """The result of `ProcMesh.profile`.

    Attributes:
        mesh: name of the mesh, or of the slice.
        recordings: rank -> what it has recorded.
        failures: rank -> why it has recorded nothing.
        clocks: machine -> how its clock differs from the one here.
        findings: what the recordings show.
        timelines: rank -> what it did, by the clock here.
        traces: rank -> its trace, if it has one.
        files: the files that were written.
    """

    mesh: str
    recordings: Mapping[int, Recording] = field(repr=False)
    failures: Mapping[int, Failure] = field(repr=False)
    clocks: Mapping[str, Clock]
    findings: Findings
    timelines: Mapping[int, Timeline] = field(repr=False)
    traces: Mapping[int, RankTrace] = field(repr=False)
    files: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return self.text()

    def text(self, rename: Rename = lambda frame: frame) -> str:
        """Write what the profile shows, in about ten lines.

        Args:
            rename: returns a frame under the name by which the user knows its file.
        """
        found = self.findings
        lines = [self._title(), *aligned(_columns(found))]
        if found.straggler is not None:
            lines.append(_straggler_text(found, rename))
        elif found.late:
            lines.append(_even_text(found))
        if found.lines:
            lines.append(f"longest lines: {_lines_text(found, rename)}")
        if transfers := _transfers_text(self.timelines, max(1, found.steps), " a step" if found.steps else ""):
            lines.append(f"transfers: {transfers}")
            lines += [f"  {line}" for line in links_text({rank: each.links for rank, each in self.recordings.items()})]
        if memory := _memory_text({rank: [held for _, held in each.held] for rank, each in self.timelines.items()}):
            lines.append(memory)
        lines += self._notes()
        return "\n".join(map(plain, lines))

    def save(self, path: str | os.PathLike[str], rename: Rename = lambda frame: frame) -> list[str]:
        """Write a trace of all ranks, which https://ui.perfetto.dev opens, and the snapshots of the memory of GPUs beside it.

        Args:
            path: the file; compressed if its name ends with ``.gz``.
            rename: returns a frame under the name by which the user knows its file.

        Returns:
            The names of the files.

        Raises:
            OSError: a file can't be written.
        """
        path = Path(path).expanduser()
        names = {rank: f"{self.mesh}[{rank}] (pid {each.pid})" for rank, each in self.recordings.items()}
        ahead_s = {rank: self.clocks[each.machine].offset_s for rank, each in self.recordings.items()}
        labels = {rank: ", ".join(map(link_text, each.links)) for rank, each in self.recordings.items() if each.links}
        pieces = merge(self.timelines, self.traces, ahead_s, names, lambda place: _place_text(place, rename), labels)
        with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as file:
            for piece in pieces:
                file.write(piece)
        written = [str(path)]
        stem = path.name.removesuffix(".gz").removesuffix(".json")
        for rank, each in self.recordings.items():
            if each.memory:
                beside = path.with_name(f"{stem}.rank{rank}.pickle")
                beside.write_bytes(each.memory)
                written.append(str(beside))
        self.files.extend(written)
        return written

    def _title(self) -> str:
        found, n_ranks = self.findings, len(self.recordings)
        ranks = f"{n_ranks} rank{'s' * (n_ranks != 1)}"
        units = {each.unit for each in self.recordings.values() if each.unit}
        if not found.steps:
            return f"{self.mesh}: {ranks}, {_time(found.step_s)} without steps of live.loop or of an optimizer"
        steps = f"{found.steps} step{'s' * (found.steps != 1)} of {' and '.join(sorted(units))}"
        return f"{self.mesh}: {steps} on {ranks}, {_time(found.step_s)} each while torch.profiler records"

    def _notes(self) -> list[str]:
        notes = []
        problems: dict[str, list[int]] = {}
        for rank, each in self.recordings.items():
            if each.problem:
                problems.setdefault(each.problem, []).append(rank)
        notes += [f"{format_ranks(ranks)} without a trace: {problem}" for problem, ranks in problems.items()]
        if self.failures:
            why = next(iter(self.failures.values())).message
            notes.append(f"{format_ranks(self.failures)} recorded nothing: {why}")
        if len(self.clocks) > 1:
            error_s = max(clock.error_s for clock in self.clocks.values())
            agree = f"agree within {_time(error_s)}" if math.isfinite(error_s) else "could not be compared"
            notes.append(f"the clocks of {len(self.clocks)} machines {agree}")
        for path in self.files:
            size = format_nbytes(os.path.getsize(path)) if os.path.exists(path) else "gone"
            viewer = "https://docs.pytorch.org/memory_viz" if path.endswith(".pickle") else "https://ui.perfetto.dev"
            notes.append(f"{path} ({size}): open it at {viewer}")
        return notes


def check_numbers(steps: int, seconds: float) -> None:
    """Refuse numbers with which a profile is not possible.

    Raises:
        ValueError: a number is out of its range.
    """
    if not isinstance(steps, int) or not 1 <= steps <= _MAX_STEPS:
        raise ValueError(f"steps must be between 1 and {_MAX_STEPS:,}, not {steps!r}")
    if not 0 < seconds <= _MAX_SECONDS:
        raise ValueError(f"seconds must be above 0, and at most {_MAX_SECONDS:g}, not {seconds!r}")


def profile(
    runtime: Runtime,
    name: str,
    procs: Mapping[int, int],
    *,
    steps: int,
    seconds: float,
    memory: bool,
) -> Profile:
    """Record what ranks do, and compare them.

    Args:
        runtime: the controller.
        name: name of the mesh, or of the slice.
        procs: rank -> its process.
        steps: the number of steps.
        seconds: the most that it may take.
        memory: whether to record allocations.

    Raises:
        RuntimeError: no rank has recorded anything.
    """
    control = ProfileControl(runtime)
    answers = dict(zip(procs, control.record(list(procs.values()), steps, seconds, memory=memory), strict=True))
    recordings = {rank: each for rank, each in answers.items() if isinstance(each, Recording)}
    failures = {rank: each for rank, each in answers.items() if isinstance(each, Failure)}
    if not recordings:
        raise RuntimeError(f"{name}: no rank has recorded anything: {next(iter(failures.values())).message}")
    clocks = control.clocks({procs[rank]: each for rank, each in recordings.items()})
    traces = {rank: read_trace(each.trace) for rank, each in recordings.items() if each.trace}
    ends = {end for each in recordings.values() for transfer in each.transfers for end in transfer[4:6]}
    places = dict(zip(ends, runtime.queries.places(list(ends)), strict=True))
    whole = name.partition("[")[0]

    def name_of(recorder: int) -> NameOfEnd:
        def named(end: int, is_rank: bool) -> str:
            if is_rank:
                return f"{whole}[{recorder if end < 0 else end}]"
            mesh, rank = places[end]
            return f"{mesh}[{rank}]" if mesh else "program"

        return named

    timelines = {
        rank: timeline_of(each, traces.get(rank), steps, clocks[each.machine].offset_s, name_of(rank))
        for rank, each in recordings.items()
    }
    return Profile(name, recordings, failures, clocks, analyse(timelines), timelines, traces)


def _columns(found: Findings) -> list[tuple[str, list[str], bool]]:
    """One row for each part of a step, with its mean and the rank with the most."""
    means, shares, most, ranks = [], [], [], []
    for at in range(len(PARTS)):
        by_rank = {rank: seconds[at] for rank, seconds in found.parts.items()}
        mean = sum(by_rank.values()) / len(by_rank)
        worst = max(by_rank, key=by_rank.__getitem__)
        means.append(_time(mean))
        shares.append(f"{100 * mean / found.step_s:.0f} %" if found.step_s else "")
        most.append(_time(by_rank[worst]))
        ranks.append(f"[{worst}]" if by_rank[worst] > 0 else "")
    columns = [
        ("part of a step" if found.steps else "part", list(PARTS), False),
        ("mean", means, True),
        ("", shares, True),
    ]
    return [*columns, ("most", most, True), ("", ranks, False)] if len(found.parts) > 1 else columns


def _straggler_text(found: Findings, rename: Rename) -> str:
    assert found.straggler is not None
    rank, late, place, more_s = found.straggler
    text = f"[{rank}] is last in {late.last} of {plural(late.of, 'collective')} with long waits, by {_time(late.by_s)}"
    if place is None:
        return f"{text}; no line takes it longer than the others"
    each = " a step" if found.steps else ""
    return f"{text}; its time is {_in(place, rename)}, {_time(more_s)}{each} more than on other ranks"


def _even_text(found: Findings) -> str:
    latest = max(found.late, key=lambda rank: found.late[rank].lost_s)
    late = found.late[latest]
    lost_s = late.lost_s / max(1, found.steps)
    each = " a step" if found.steps else ""
    why = "no rank is late all the time"
    if 0 < found.steps < LEAST:
        why = f"{plural(found.steps, 'step')} can't tell whether a rank is always late, {LEAST} can"
    return (
        f"{why}: [{latest}] costs the others the most, {_time(lost_s)}{each}, and is last in "
        f"{late.last} of {plural(late.of, 'collective')} with long waits"
    )


def _memory_text(held: Mapping[int, Sequence[int]]) -> str:
    """Describe the resident memory of processes: the most, and the most growth; empty if it was not recorded."""
    most = {rank: max(each) for rank, each in held.items() if each}
    if not most:
        return ""
    growth = {rank: held[rank][-1] - held[rank][0] for rank in most}
    first, grown = max(most, key=most.__getitem__), max(growth, key=growth.__getitem__)
    text = f"memory of the processes: {format_nbytes(most[first])} at most ([{first}])"
    if growth[grown] < _GROWTH_NBYTES:
        return f"{text}; none has grown by {format_nbytes(_GROWTH_NBYTES)} in this time"
    return f"{text}; [{grown}] has grown by {format_nbytes(growth[grown])} in this time"


def _lines_text(found: Findings, rename: Rename) -> str:
    texts = []
    for line in found.lines:
        uneven = (
            f" ([{line.rank}] {_time(line.most_s)})" if line.most_s > 1.5 * line.mean_s and len(found.parts) > 1 else ""
        )
        texts.append(f"{_time(line.mean_s)} {_place_text(line.place, rename)}{uneven}")
    return "; ".join(texts)


def _transfers_text(timelines: Mapping[int, Timeline], steps: int, each: str) -> str:
    """Say which processes have sent the most to which; empty if none has sent anything."""
    found: defaultdict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
    for rank, timeline in timelines.items():
        for source, target, path, nbytes, start, end, is_message in timeline.transfers:
            is_elsewhere = is_message and not source.endswith(f"[{rank}]")  # the rank that sends has it, too
            if not is_elsewhere and timeline.start <= end <= timeline.end:
                found[source, target, path].append((nbytes, end - start))
    texts = []
    for (source, target, path), sent in sorted(found.items(), key=lambda pair: -sum(nbytes for nbytes, _ in pair[1])):
        nbytes, seconds = (sum(column) for column in zip(*sent))
        rate = f", {format_nbytes(nbytes / seconds)}/s" if seconds else ""
        texts.append(f"{source} to {target} {format_nbytes(nbytes / steps)}{each} by {path}{rate}")
    hidden = len(texts) - _MAX_PAIRS
    more = f"; and {hidden} more pair{'s' * (hidden != 1)}" if hidden > 0 else ""
    return "; ".join(texts[:_MAX_PAIRS]) + more


def _in(place: Place, rename: Rename) -> str:
    where = _where(place, rename)
    return f"at {where}" if place.function == "<module>" else f"in {place.function}() ({where})"


def _place_text(place: Place, rename: Rename) -> str:
    function = "" if place.function == "<module>" else f", in {place.function}"
    return f"{_where(place, rename)}{function}"[:_MAX_WIDTH]


def _where(place: Place, rename: Rename) -> str:
    return f"{short_cell(rename(Frame(place.file, place.line, place.function)).file)}, line {place.line}"


def _time(seconds: float) -> str:
    if seconds >= 9.995:
        return format_seconds(seconds)
    if seconds >= 0.9995:
        return f"{seconds:.1f} s"
    ms = seconds * 1000
    return f"{ms:.0f} ms" if ms >= 9.95 or ms == 0 else f"{ms:.1f} ms"
