"""The merged trace has the format that Perfetto reads: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from monarch_kernel.features.profiling.merging import merge
from monarch_kernel.features.profiling.recording import Recording
from monarch_kernel.features.profiling.timeline import NameOfEnd, timeline_of
from monarch_kernel.features.profiling.trace import read_trace
from monarch_kernel.net.memory.counters import Transferred
from tests.features.profiling.synthetic import BEGIN_S, recordings

REQUIRED = {"X": {"name", "ts", "dur"}, "M": {"name", "args"}, "s": {"name", "cat", "id", "ts"}}
REQUIRED["f"] = REQUIRED["s"]


def check_format(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Check a trace against the format; gives its events."""
    events: list[dict[str, Any]] = trace["traceEvents"]
    slices: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for each in events:
        assert type(each["pid"]) is type(each["tid"]) is int, each
        assert isinstance(each["name"], str), each
        assert REQUIRED.get(each["ph"], {"ts"}) <= each.keys(), each
        assert min(each.get("ts", 0), each.get("dur", 0)) >= 0, each
        if each["ph"] == "X":
            slices[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    flows: defaultdict[tuple[str, str, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for each in events:
        if each["ph"] in ("s", "f"):
            ends = flows[each["cat"], each["name"], each["id"]]
            assert each["ph"] not in ends, f"two arrows have one id: {each}"
            ends[each["ph"]] = each
            within = slices[each["pid"], each["tid"]]
            assert any(start - 0.002 <= each["ts"] <= end + 0.002 for start, end in within), f"no slice: {each}"
    for ends in flows.values():
        assert ends.keys() == {"s", "f"}
        assert ends["s"]["ts"] <= ends["f"]["ts"]
    named = {each["pid"] for each in events if each["ph"] == "M" and each["name"] == "process_name"}
    assert named >= {each["pid"] for each in events}
    return events


def merged(known: Mapping[int, Recording], ahead_s: Mapping[int, float] | None = None) -> list[dict[str, Any]]:
    ahead_s = ahead_s or {}
    traces = {rank: read_trace(each.trace) for rank, each in known.items() if each.trace}
    timelines = {rank: timeline_of(each, traces.get(rank), 5, ahead_s.get(rank, 0.0)) for rank, each in known.items()}
    names = {rank: f"t[{rank}]" for rank in known}
    pieces = merge(timelines, traces, ahead_s, names, lambda place: f"line {place.line}")
    return check_format(json.loads("".join(pieces)))


def test_each_rank_is_a_process_with_its_own_threads() -> None:
    events = merged(recordings({2: 0.02}))
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert sorted(names.values()) == ["t[0]", "t[1]", "t[2]", "t[3]"]
    by_name = {names[each["pid"]] for each in events if each["name"] == "aten::addmm"}
    assert by_name == set(names.values())


def test_ranks_have_one_time_also_with_other_clocks() -> None:
    ahead_s = {1: 3.0, 3: -7.0}
    for known, ahead in ((recordings({}), {}), (recordings({}, ahead_s=ahead_s), ahead_s)):
        events = merged(known, ahead)
        starts = defaultdict(list)
        for each in events:
            if each["name"] in ("aten::addmm", "gloo:all_reduce #17"):
                starts[each["name"]].append(each["ts"])
        for name in ("aten::addmm", "gloo:all_reduce #17"):
            first = sorted(starts[name])[:4]
            assert first[-1] - first[0] < 1.0, name  # microseconds


def test_an_arrow_goes_from_the_last_rank_to_each_other_one() -> None:
    events = merged(recordings({2: 0.02}))
    arrows = [each for each in events if each["name"] == "last to arrive"]
    assert {each["pid"] for each in arrows if each["ph"] == "s"} == {300}
    assert len(arrows) == 2 * 3 * 5
    last = next(each for each in events if each["name"] == "gloo:all_reduce #17" and each["pid"] == 300)
    assert min(each["ts"] for each in arrows) == last["ts"]


def test_a_collective_whose_end_is_unknown_has_no_arrow() -> None:
    known = recordings({2: 0.02})
    known[0] = replace(known[0], trace=b"")
    arrows = [each for each in merged(known) if each["name"] == "last to arrive"]
    assert {each["pid"] for each in arrows if each["ph"] == "f"} == {200, 400}


def test_steps_and_lines_have_rows() -> None:
    events = merged(recordings({2: 0.02}))
    steps = [each["name"] for each in events if each["pid"] == 100 and each.get("cat") == "step"]
    assert steps == [f"step {at}" for at in range(1, 6)]
    lines = [each for each in events if each["pid"] == 300 and each.get("cat") == "line"]
    assert {each["name"] for each in lines} == {"line 8", "line 20", "line 21"}
    assert lines[0]["dur"] == pytest.approx(20_000, abs=4_100)


def test_collectives_that_overlap_have_their_own_rows() -> None:
    known = recordings({}, ranks=2)
    for rank, each in known.items():
        calls = [call._replace(at=BEGIN_S + 0.001 * at) for at, call in enumerate(each.collectives)]
        each = replace(each, collectives=tuple(calls), trace=b"")
        timeline = timeline_of(each, None, 5)
        ends = tuple(call._replace(end=BEGIN_S + 0.04) for call in timeline.collectives)
        timeline = replace(timeline, collectives=ends)
        events = [json.loads(text) for text in _lines(merge({rank: timeline}, {}, {}, {rank: "t"}, str))]
        rows: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for event in events:
            if event.get("cat") == "collective":
                rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        assert len(rows) == 5
        for spans in rows.values():
            assert all(one[1] <= other[0] for one, other in zip(sorted(spans), sorted(spans)[1:]))


def with_transfers(known: dict[int, Recording]) -> dict[int, Recording]:
    """Rank 0 sends two messages to rank 1, the second one before the first has arrived, and a value to process 9."""
    at = BEGIN_S + 0.01
    sent = [Transferred(at + 0.02 * i, 0.001, 4096, "gloo", -1, 1, is_message=True) for i in (0, 1)]
    received = [Transferred(at + 0.03 + 0.005 * i, 0.03, 4096, "gloo", 0, -1, is_message=True) for i in (0, 1)]
    known[0] = replace(known[0], transfers=(*sent, Transferred(at, 0.0, 100, "socket", 5, 9)))
    known[1] = replace(known[1], transfers=tuple(received))
    return known


def test_transfers_have_their_ends_size_and_rate() -> None:
    known = with_transfers(recordings({}, ranks=2))

    def name_of(rank: int) -> NameOfEnd:
        return lambda end, is_rank: f"t[{rank if end < 0 else end}]" if is_rank else f"process {end}"

    timelines = {rank: timeline_of(each, None, 5, name=name_of(rank)) for rank, each in known.items()}
    pieces = merge(timelines, {}, {}, {0: "t[0]", 1: "t[1]"}, str)
    events = check_format(json.loads("".join(pieces)))
    drawn = [each for each in events if each.get("cat") == "transfer" and each["ph"] == "X"]
    names = sorted((each["pid"], each["name"]) for each in drawn)
    assert names == [
        (100, "process 5 to process 9: 100 B by socket"),
        *[(100, "t[0] to t[1]: 4.0 KiB by gloo")] * 2,
        *[(200, "t[0] to t[1]: 4.0 KiB by gloo")] * 2,
    ]
    assert {each["args"].get("rate") for each in drawn if each["pid"] == 100} == {None, "3.9 MiB/s"}
    arrows = [each for each in events if each["name"] == "message"]
    assert [each["pid"] for each in arrows if each["ph"] == "s"] == [100, 100]
    assert [each["pid"] for each in arrows if each["ph"] == "f"] == [200, 200]
    rows = {each["tid"] for each in drawn if each["pid"] == 200}
    assert len(rows) == 2  # the rank waits for both at once


def _lines(pieces: Any) -> list[str]:
    return [json.dumps(each) for each in json.loads("".join(pieces))["traceEvents"]]


def test_memory_is_a_curve_of_each_process() -> None:
    known = recordings({})
    known = {rank: replace(each, held=((each.began, 3 << 20), (each.ended, 5 << 20))) for rank, each in known.items()}
    curves = [each for each in merged(known) if each["ph"] == "C"]
    assert [each["args"]["resident"] for each in curves] == [3.0, 5.0] * 4
    assert len({each["pid"] for each in curves}) == 4
