"""A profile is about ten lines, which name ranks and lines as users know them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

from monarch_kernel.errors import Failure
from monarch_kernel.features.profiling.analysis import analyse
from monarch_kernel.features.profiling.handle import Profile
from monarch_kernel.features.profiling.recording import Recording
from monarch_kernel.features.profiling.timeline import NameOfEnd, timeline_of
from monarch_kernel.features.profiling.trace import read_trace
from monarch_kernel.net.memory.counters import Transferred
from monarch_kernel.runtime.controller.host_compatibility import Clock
from tests.features.profiling.synthetic import recordings


def profile(known: dict[int, Recording], failures: dict[int, Failure] | None = None) -> Profile:
    traces = {rank: read_trace(each.trace) for rank, each in known.items() if each.trace}

    def name_of(rank: int) -> NameOfEnd:
        own = {-1: f"t[{rank}]"}
        return lambda end, is_rank: own.get(end, f"t[{end}]") if is_rank else f"process {end}" if end else "program"

    timelines = {rank: timeline_of(each, traces.get(rank), 5, name=name_of(rank)) for rank, each in known.items()}
    return Profile("t", known, failures or {}, {"here": Clock(0.0, 0.0)}, analyse(timelines), timelines, traces)


def test_a_straggler_is_named_with_its_line() -> None:
    assert str(profile(recordings({2: 0.02}))).split("\n") == [
        "t: 5 steps of live.loop on 4 ranks, 65 ms each while torch.profiler records",
        "part of a step        mean          most",
        "compute              40 ms  62 %   40 ms  [0]",
        "waiting for others   15 ms  23 %   20 ms  [0]",
        "transfer            5.0 ms   8 %  5.0 ms  [2]",
        "loader                0 ms   0 %    0 ms",
        "rest                5.0 ms   8 %   20 ms  [2]",
        "[2] is last in 5 of 5 collectives with long waits, by 20 ms; its time is in augment() (cell [12], line 8), "
        "20 ms a step more than on other ranks",
        "longest lines: 40 ms cell [12], line 20; 5.0 ms cell [12], line 8, in augment ([2] 20 ms)",
    ]


def test_a_healthy_run_names_no_rank() -> None:
    text = str(profile(recordings({})))
    assert "no rank is late all the time" in text
    assert "is last in 5" not in text.replace("and is last in", "")


def test_a_few_steps_name_no_rank_and_say_so() -> None:
    known = recordings({2: 0.02})
    known = {rank: replace(each, marks=each.marks[:3]) for rank, each in known.items()}
    text = str(profile(known))
    assert (
        "\n2 steps can't tell whether a rank is always late, 4 can: [2] costs the others the most, 20 ms a step" in text
    )


def test_what_is_missing_is_said() -> None:
    known = recordings({2: 0.02})
    known[1] = replace(known[1], trace=b"", problem="torch 2.6 can't record all threads")
    lines = str(profile(known, {7: Failure("lost", "Lost", "the rank is dead")})).split("\n")
    assert "[1] without a trace: torch 2.6 can't record all threads" in lines
    assert "[7] recorded nothing: the rank is dead" in lines


def test_code_without_steps_says_so() -> None:
    known = {rank: replace(each, unit="", marks=()) for rank, each in recordings({2: 0.02}).items()}
    assert str(profile(known)).startswith("t: 4 ranks, 325 ms without steps of live.loop or of an optimizer\n")


def test_the_largest_transfers_are_named_once_with_the_speeds_of_links(tmp_path: Path) -> None:
    known = recordings({2: 0.02})
    at = known[0].marks[0] + 0.05
    message = Transferred(at, 0.25, 5 << 20, "gloo", -1, 1, is_message=True)
    values = tuple(Transferred(at, 0.0, size, "socket", 0, proc) for proc, size in enumerate((500, 5, 50), 1))
    links = (("eth0", 3.125e9),)
    known[0] = replace(known[0], transfers=(message, *values), links=links)
    known[1] = replace(known[1], transfers=(message._replace(source=0, target=-1),))
    lines = str(profile(known)).split("\n")
    transfers = (
        "transfers: t[0] to t[1] 1.0 MiB a step by gloo, 20 MiB/s; program to process 1 100 B a step by socket; "
        "program to process 3 10 B a step by socket; and 1 more pair"
    )
    assert transfers in lines
    assert lines[lines.index(transfers) + 1] == "  links of [0], each way: eth0 2.9 GiB/s"
    path = tmp_path / "trace.json"
    profile(known).save(path)
    labels = [each for each in json.loads(path.read_text())["traceEvents"] if each["name"] == "process_labels"]
    assert [(each["pid"], each["args"]) for each in labels] == [(100, {"labels": "eth0 2.9 GiB/s"})]


def test_the_trace_is_written_also_compressed(tmp_path: Path) -> None:
    known = recordings({2: 0.02})
    known[3] = replace(known[3], memory=b"snapshot")
    found = profile(known)
    path = str(tmp_path / "trace.json")
    assert found.save(path) == [path, str(tmp_path / "trace.rank3.pickle")]
    found.save(tmp_path / "trace.json.gz")
    events = json.loads(Path(path).read_text())["traceEvents"]
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"] == events
    assert "cell [12], line 8, in augment" in {each["name"] for each in events}
    assert f"{path} (" in str(found)
    assert "https://ui.perfetto.dev" in str(found)


def test_the_memory_of_processes_is_described_if_it_is_recorded() -> None:
    mib = 1 << 20
    known = recordings({})
    assert "memory" not in str(profile(known))
    for growth, text in ((0, "none has grown by 1.0 MiB"), (64, "[3] has grown by 64 MiB")):
        for rank, each in known.items():
            held = [(each.began, (200 + rank) * mib), (each.ended, (200 + rank + growth * (rank == 3)) * mib)]
            known[rank] = replace(each, held=tuple(held))
        most = 203 + growth
        assert f"\nmemory of the processes: {most} MiB at most ([3]); {text} in this time" in str(profile(known))
