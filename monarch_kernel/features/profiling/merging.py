"""Merges the traces of ranks into one. Pure.

The format is Google's "Trace Event Format", as JSON: Perfetto (https://ui.perfetto.dev) and chrome://tracing open it. Each rank
is a process in it, with the threads of torch.profiler, and more rows above them: the steps, the line of the user's code, the
collectives, and the transfers. An arrow goes from the last rank that has arrived at a collective to each of the others, and
from each message to its end on the rank that receives it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from monarch_kernel.base.text import format_nbytes
from monarch_kernel.features.profiling.recording import Place, Sample
from monarch_kernel.features.profiling.timeline import Collective, Timeline, Transfer
from monarch_kernel.features.profiling.trace import Event, RankTrace

__all__ = ["merge"]

_MIB = 1 << 20
_KEPT_PHASES = ("X", "B", "E", "C", "i", "I", "s", "t", "f")
_PIDS = 100
"""Numbers for the processes of one rank: the rank itself, and its devices."""

_STEPS, _LINES, _CALLS, _TRANSFERS = 1, 2, 3, 600
_OWN = 1000
"""Rows with smaller numbers are ours."""

_Messages = defaultdict[
    tuple[str, str], tuple[list[tuple[int, int, float, float]], list[tuple[int, int, float, float]]]
]
"""Source and target of messages -> where they are drawn on the rank that sends, and on the one that receives."""

_MAX_ROWS = 300
"""Transfers of one rank that are drawn at once."""

_IDS = 100_000_000
_GAP_S = 0.02
_MARGIN_S = 1e-6
"""Seconds since 1970 are exact to a quarter of a microsecond, and no event may be before the first one."""


def merge(
    timelines: Mapping[int, Timeline],
    traces: Mapping[int, RankTrace],
    ahead_s: Mapping[int, float],
    names: Mapping[int, str],
    describe: Callable[[Place], str],
    labels: Mapping[int, str] | None = None,
) -> Iterator[str]:
    """Merge the traces of ranks; yields the pieces of a JSON text.

    Args:
        timelines: rank -> what it did, by the clock of the controller.
        traces: rank -> its trace, if it has one.
        ahead_s: rank -> by how much the clock of its machine is ahead of the controller's.
        names: rank -> the name of its process.
        describe: writes a line of code.
        labels: rank -> what is beside the name of its process, such as the speeds of its links.
    """
    base_s = _first(timelines, traces, ahead_s)
    yield '{"schemaVersion": 1, "displayTimeUnit": "ms", '
    yield f'"baseTimeNanoseconds": {round(base_s * 1e9)}, "traceEvents": ['
    is_first = True
    for event in chain(_labels(labels or {}), _merged(timelines, traces, ahead_s, names, describe, base_s)):
        yield ("\n" if is_first else ",\n") + json.dumps(event)
        is_first = False
    yield "\n]}\n"


def _first(timelines: Mapping[int, Timeline], traces: Mapping[int, RankTrace], ahead_s: Mapping[int, float]) -> float:
    """The time of the first event, from which the times in a trace count."""
    found = [each.start for each in timelines.values()]
    found += [each.samples[0].at - each.samples[0].lasts_s for each in timelines.values() if each.samples]
    for rank, trace in traces.items():
        times = (each["ts"] for each in trace.events if isinstance(each.get("ts"), (int, float)))
        if (first := min(times, default=None)) is not None:
            found.append(trace.base_s + first / 1e6 - ahead_s.get(rank, 0.0))
    return min(found, default=0.0) - _MARGIN_S


def _merged(
    timelines: Mapping[int, Timeline],
    traces: Mapping[int, RankTrace],
    ahead_s: Mapping[int, float],
    names: Mapping[int, str],
    describe: Callable[[Place], str],
    base_s: float,
) -> Iterator[Event]:
    places: dict[tuple[int, int], tuple[int, float, float]] = {}  # rank and index of a collective -> where it is drawn
    messages: _Messages = defaultdict(lambda: ([], []))
    for rank, timeline in timelines.items():
        pid = (rank + 1) * _PIDS
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": names[rank]}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        yield from _titles(pid, {_STEPS: "steps", _LINES: "lines of Python"})
        for at, (one, other) in enumerate(zip(timeline.marks, timeline.marks[1:])):
            yield _slice(f"step {at + 1}", "step", pid, _STEPS, one - base_s, other - base_s, {})
        for sample, start, end in _runs(timeline.samples):
            yield _slice(describe(sample), "line", pid, _LINES, start - base_s, end - base_s, {})
        for at_s, nbytes in timeline.held:
            ts = round((at_s - base_s) * 1e6, 3)
            yield {
                "ph": "C",
                "name": "memory (MiB)",
                "pid": pid,
                "tid": 0,
                "ts": ts,
                "args": {"resident": nbytes / _MIB},
            }
        yield from _calls(rank, pid, timeline.collectives, base_s, places)
        yield from _transfers(rank, pid, timeline.transfers, base_s, messages)
        if (trace := traces.get(rank)) is not None:
            yield from _of_rank(rank, pid, trace, base_s + ahead_s.get(rank, 0.0), names[rank])
    yield from _arrows(timelines, places, base_s)
    yield from _message_arrows(messages)


def _labels(labels: Mapping[int, str]) -> Iterator[Event]:
    for rank, label in labels.items():
        pid = (rank + 1) * _PIDS
        yield {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": label}}


def _titles(pid: int, rows: Mapping[int, str]) -> Iterator[Event]:
    for tid, title in rows.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": title}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid - _OWN}}


def _slice(name: str, cat: str, pid: int, tid: int, start_s: float, end_s: float, args: Mapping[str, Any]) -> Event:
    start = round(start_s * 1e6, 3)
    end = round(end_s * 1e6, 3)
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": max(0.0, round(end - start, 3)),
        "args": dict(args),
    }


def _runs(samples: Sequence[Sample]) -> Iterator[tuple[Place, float, float]]:
    """Join the looks that follow each other at the same line: place, start and end."""
    last: tuple[Place, float, float] | None = None
    for each in samples:
        start = each.at - each.lasts_s
        if last is not None:
            start = max(start, last[2])
        if last is not None and each.place == last[0] and start - last[2] < _GAP_S:
            last = last[0], last[1], each.at
            continue
        if last is not None:
            yield last
        last = None if each.place is None else (each.place, start, each.at)
    if last is not None:
        yield last


def _calls(
    rank: int,
    pid: int,
    collectives: Sequence[Collective],
    base_s: float,
    places: dict[tuple[int, int], tuple[int, float, float]],
) -> Iterator[Event]:
    """Draw collectives in as many rows as there are at once, because slices in a row may not overlap."""
    rows: list[float] = []
    for at, call in sorted(enumerate(collectives), key=lambda each: each[1].start):
        row = next((row for row, over in enumerate(rows) if over <= call.start), len(rows))
        if row == len(rows):
            rows.append(0.0)
            yield from _titles(pid, {_CALLS + row: "collectives"})
        rows[row] = call.end
        group = f" {call.label}" if call.label else ""
        args = {"number": call.key[2], "group": call.label or "default", "ranks": list(call.key[1])}
        event = _slice(
            f"{call.operation}{group} #{call.key[2]}",
            "collective",
            pid,
            _CALLS + row,
            call.start - base_s,
            call.end - base_s,
            args,
        )
        places[rank, at] = (_CALLS + row, event["ts"], event["ts"] + event["dur"])
        yield event


def _transfers(
    rank: int, pid: int, transfers: Sequence[Transfer], base_s: float, messages: _Messages
) -> Iterator[Event]:
    """Draw transfers in as many rows as there are at once, and note where the messages are."""
    rows: list[float] = []
    for each in sorted(transfers, key=lambda each: each.start):
        if each.start < base_s:  # before the recording
            continue
        row = next((row for row, over in enumerate(rows) if over <= each.start), len(rows))
        if row == _MAX_ROWS:
            continue
        if row == len(rows):
            rows.append(0.0)
            yield from _titles(pid, {_TRANSFERS + row: "transfers"})
        rows[row] = each.end
        seconds = each.end - each.start
        args = {"from": each.source, "to": each.target, "path": each.path, "bytes": each.nbytes}
        if seconds > 0:
            args["rate"] = f"{format_nbytes(each.nbytes / seconds)}/s"
        name = f"{each.source} to {each.target}: {format_nbytes(each.nbytes)} by {each.path}"
        tid = _TRANSFERS + row
        event = _slice(name, "transfer", pid, tid, each.start - base_s, each.end - base_s, args)
        if each.is_message:
            is_received = each.target.endswith(f"[{rank}]")
            messages[each.source, each.target][is_received].append((pid, tid, event["ts"], event["ts"] + event["dur"]))
        yield event


def _message_arrows(messages: _Messages) -> Iterator[Event]:
    """Draw an arrow from each message that was sent to its part on the rank that has received it."""
    number = 0
    for sent, received in messages.values():
        left = sorted(received, key=lambda each: each[3])
        for pid, tid, start, _ in sorted(sent, key=lambda each: each[2]):
            at = next((at for at, each in enumerate(left) if each[3] >= start), None)
            if at is None:
                continue
            to_pid, to_tid, to_start, _ = left.pop(at)
            number += 1
            arrow = {"cat": "transfer", "name": "message", "id": number}
            yield {"ph": "s", **arrow, "pid": pid, "tid": tid, "ts": start}
            yield {"ph": "f", "bp": "e", **arrow, "pid": to_pid, "tid": to_tid, "ts": max(to_start, start)}


def _arrows(
    timelines: Mapping[int, Timeline], places: Mapping[tuple[int, int], tuple[int, float, float]], base_s: float
) -> Iterator[Event]:
    by_key: defaultdict[Any, list[tuple[int, int]]] = defaultdict(list)
    for rank, timeline in timelines.items():
        for at, call in enumerate(timeline.collectives):
            by_key[call.key].append((rank, at))
    number = 0
    for ends in by_key.values():
        if len(ends) < 2:
            continue
        last = max(ends, key=lambda each: places[each][1])
        for each in ends:
            if each == last:
                continue
            _, sent, _ = places[last]
            tid, start, end = places[each]
            if end < sent:  # when it was over is not known
                continue
            number += 1
            arrow = {"cat": "collective", "name": "last to arrive", "id": number}
            yield {"ph": "s", **arrow, "pid": (last[0] + 1) * _PIDS, "tid": places[last][0], "ts": sent}
            yield {"ph": "f", "bp": "e", **arrow, "pid": (each[0] + 1) * _PIDS, "tid": tid, "ts": max(start, sent)}


def _of_rank(rank: int, pid: int, trace: RankTrace, base_s: float, name: str) -> Iterator[Event]:
    """Move the events of a rank to its own processes, rows and identifiers, and to the common time."""
    shift_us = (trace.base_s - base_s) * 1e6
    pids: dict[Any, int] = {}
    tids: dict[tuple[Any, Any], int] = {}
    ids: dict[Any, int] = {}
    own = _own_pid(trace.events)
    for event in trace.events:
        phase = event.get("ph")
        old = event.get("pid")
        if not isinstance(old, int):  # notes of the profiler about itself
            continue
        if old not in pids:
            pids[old] = pid if old == own else pid + len(pids) + 1
        thread = (old, event.get("tid"))
        if thread not in tids:
            tids[thread] = _OWN + len(tids)
        if phase == "M":
            if event.get("name") in ("thread_name", "thread_sort_index") or (
                event.get("name") == "process_name" and pids[old] != pid
            ):
                args = dict(event.get("args", {}))
                if event["name"] == "process_name":
                    args["name"] = f"{name}: device {old}"
                yield {"ph": "M", "name": event["name"], "pid": pids[old], "tid": tids[thread], "args": args}
            continue
        if phase not in _KEPT_PHASES or not isinstance(event.get("ts"), (int, float)):
            continue
        moved = {**event, "pid": pids[old], "tid": tids[thread], "ts": round(event["ts"] + shift_us, 3)}
        if "id" in event:
            known = ids.setdefault((event.get("cat"), event.get("name"), event["id"]), len(ids))
            moved["id"] = (rank + 1) * _IDS + known
        yield moved


def _own_pid(events: Sequence[Event]) -> Any:
    """The process of the operators, as there are more for devices."""
    return next((each.get("pid") for each in events if each.get("cat") in ("cpu_op", "user_annotation")), None)
