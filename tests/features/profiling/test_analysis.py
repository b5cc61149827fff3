"""The parts of a step add up, and the rank that others wait for is named with the line that takes it longer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from monarch_kernel.features.profiling.analysis import PARTS, Findings, analyse
from monarch_kernel.features.profiling.recording import Place, Recording, Started
from monarch_kernel.features.profiling.timeline import Collective, Timeline, timeline_of
from monarch_kernel.features.profiling.trace import read_trace
from tests.features.profiling.synthetic import AUGMENT, BEGIN_S, TRAIN, event, packed, recordings


def findings(known: Mapping[int, Recording], ahead_s: Mapping[int, float] | None = None, steps: int = 5) -> Findings:
    return analyse(
        {
            rank: timeline_of(
                each, read_trace(each.trace) if each.trace else None, steps, (ahead_s or {}).get(rank, 0.0)
            )
            for rank, each in known.items()
        }
    )


def part(found: Findings, rank: int, name: str) -> float:
    return found.parts[rank][PARTS.index(name)]


def test_the_time_of_a_step_is_divided() -> None:
    found = findings(recordings({2: 0.02}))
    assert (found.steps, found.step_s) == (5, pytest.approx(0.065, abs=1e-4))
    for rank in range(4):
        is_slow = rank == 2
        assert part(found, rank, "compute") == pytest.approx(0.04, abs=1e-3)
        assert part(found, rank, "waiting for others") == pytest.approx(0.0 if is_slow else 0.02, abs=1e-3)
        assert part(found, rank, "transfer") == pytest.approx(0.005, abs=1e-3)
        assert part(found, rank, "rest") == pytest.approx(0.02 if is_slow else 0.0, abs=1e-3)
        assert sum(found.parts[rank]) == pytest.approx(found.step_s, abs=1e-6)


def test_the_rank_that_others_wait_for_is_named_with_its_line() -> None:
    found = findings(recordings({2: 0.02}))
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.place) == (2, AUGMENT)
    assert (found.straggler.late.last, found.straggler.late.of) == (5, 5)
    assert found.straggler.late.by_s == pytest.approx(0.02, abs=1e-3)
    assert found.straggler.more_s == pytest.approx(0.02, abs=0.005)


def test_the_line_before_the_collective_is_not_blamed_for_an_earlier_one() -> None:
    """All ranks compute just before they reduce; what differs lies before that."""
    found = findings(recordings({0: 0.01, 1: 0.01, 2: 0.04, 3: 0.01}))
    assert found.straggler is not None
    assert found.straggler.place == AUGMENT


def test_no_rank_is_named_if_none_is_slow() -> None:
    assert findings(recordings({})).straggler is None
    assert findings(recordings({0: 0.02, 1: 0.02, 2: 0.02, 3: 0.021})).straggler is None


def test_a_rank_is_not_named_for_one_step() -> None:
    known = recordings({2: 0.02}, steps=1)
    assert findings(known).straggler is None


def test_the_loader_has_its_own_time() -> None:
    found = findings(recordings({}, loader_s=0.03))
    for rank in range(4):
        assert part(found, rank, "loader") == pytest.approx(0.03, abs=1e-3)
        assert part(found, rank, "compute") == pytest.approx(0.04, abs=1e-3)


def test_clocks_that_differ_are_corrected() -> None:
    ahead_s = {0: 0.0, 1: 3.0, 2: 3.0, 3: -7.0}
    found = findings(recordings({2: 0.02}, ahead_s=ahead_s), ahead_s)
    assert found.straggler is not None
    assert found.straggler.rank == 2
    assert part(found, 3, "waiting for others") == pytest.approx(0.02, abs=1e-3)


def test_ranks_are_compared_without_a_trace() -> None:
    known = {rank: replace(each, trace=b"", problem="no torch") for rank, each in recordings({2: 0.02}).items()}
    found = findings(known)
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.place) == (2, AUGMENT)
    assert part(found, 0, "rest") == pytest.approx(0.065, abs=1e-3)


def test_only_collectives_that_all_known_ranks_have_are_compared() -> None:
    known = recordings({2: 0.02})
    known[1] = replace(known[1], collectives=known[1].collectives[2:])
    found = findings(known)
    assert found.late[2].of == 3
    del known[3]  # the profile of a slice
    assert findings(known).late[2].of == 3


def test_code_without_steps_is_measured_as_a_whole() -> None:
    known = {rank: replace(each, unit="", marks=()) for rank, each in recordings({2: 0.02}).items()}
    found = findings(known)
    assert (found.steps, found.step_s) == (0, pytest.approx(0.325, abs=1e-3))
    assert part(found, 0, "waiting for others") == pytest.approx(0.1, abs=2e-3)
    assert found.straggler is not None
    assert found.straggler.place == AUGMENT


def test_only_the_steps_that_were_wanted_count() -> None:
    assert findings(recordings({2: 0.02}, steps=9), steps=5).steps == 5
    assert findings(recordings({2: 0.02}, steps=3), steps=5).steps == 3


def test_the_longest_lines_are_listed() -> None:
    found = findings(recordings({2: 0.02}))
    assert [line.place for line in found.lines[:1]] == [TRAIN]
    line = next(line for line in found.lines if line.place == AUGMENT)
    assert (line.rank, line.most_s) == (2, pytest.approx(0.02, abs=0.005))


def test_a_collective_that_runs_beside_an_operator_is_no_wait() -> None:
    """As the gradients of DistributedDataParallel, which are reduced while others are computed."""
    known = {}
    for rank in range(2):
        events = [
            event("aten::mm", BEGIN_S, BEGIN_S + 0.08),
            event("gloo:all_reduce", BEGIN_S + 0.02, BEGIN_S + 0.1, "user_annotation", tid=8),
        ]
        call = Started("0", "", (0, 1), 1, "gloo:all_reduce", BEGIN_S + 0.02 + 0.01 * rank)
        known[rank] = Recording(
            1, "here", BEGIN_S, BEGIN_S + 0.1, "x", (BEGIN_S, BEGIN_S + 0.1), (), (call,), packed(events)
        )
    found = findings(known)
    assert part(found, 0, "waiting for others") == pytest.approx(0.0, abs=1e-4)
    assert part(found, 0, "transfer") == pytest.approx(0.02, abs=1e-4)
    assert part(found, 0, "compute") == pytest.approx(0.08, abs=1e-4)


def test_on_a_gpu_kernels_count_and_not_the_calls_of_the_cpu() -> None:
    events = [
        event("aten::mm", BEGIN_S, BEGIN_S + 0.001),
        event("nccl:all_reduce", BEGIN_S + 0.001, BEGIN_S + 0.002, "user_annotation"),
        event("ampere_sgemm", BEGIN_S + 0.01, BEGIN_S + 0.05, "kernel", pid=0),
        event("ncclDevKernel_AllReduce", BEGIN_S + 0.05, BEGIN_S + 0.09, "kernel", pid=0),
        event("nccl:all_reduce", BEGIN_S + 0.05, BEGIN_S + 0.09, "gpu_user_annotation", pid=0),
    ]
    call = Started("0", "", (0, 1), 1, "nccl:all_reduce", BEGIN_S + 0.001)
    trace = read_trace(packed(events))
    assert trace.is_on_gpu
    timeline = timeline_of(Recording(1, "here", BEGIN_S, BEGIN_S + 0.1, collectives=(call,)), trace, 5)
    (found,) = timeline.collectives
    assert (found.start, found.end) == pytest.approx((BEGIN_S + 0.05, BEGIN_S + 0.09), abs=1e-4)
    assert timeline.compute == [pytest.approx((BEGIN_S + 0.01, BEGIN_S + 0.05), abs=1e-4)]


def test_a_text_that_is_no_trace_is_refused() -> None:
    for data in (b"", b"x", packed([])[:20]):
        with pytest.raises(ValueError, match="not a trace"):
            read_trace(data)


def test_a_line_is_found_by_the_function_with_the_most_time() -> None:
    """The time in a function with many lines counts together."""
    known = recordings({2: 0.02})
    places = [Place("<remote cell [12]>", 8 + at, "augment") for at in range(4)]
    samples = [
        each._replace(place=places[at % 4]) if each.place == AUGMENT else each
        for at, each in enumerate(known[2].samples)
    ]
    known[2] = replace(known[2], samples=tuple(samples))
    found = findings(known).straggler
    assert found is not None
    assert found.place is not None
    assert found.place.function == "augment"
    assert found.more_s == pytest.approx(0.02, abs=0.005)


def test_a_rank_is_named_by_steps_where_a_step_has_many_collectives() -> None:
    """As with FSDP: the waits of a step are spread over its collectives, and in some of them another rank is the last one."""
    timelines = {}
    for rank in range(3):
        calls = []
        for step in range(8):
            for number in range(6):
                late_s = 0.02 if rank == 1 and number % 2 else 0.012 if rank == 2 and number == 2 else 0.0
                start = step + number / 10 + late_s
                calls.append(Collective(("0", (0, 1, 2), 6 * step + number), "", "gloo:all_gather", start, start))
        timelines[rank] = Timeline(-0.01, 7.99, 8, tuple(step - 0.01 for step in range(9)), collectives=tuple(calls))
    found = analyse({rank: replace(each, end=0.49) for rank, each in timelines.items()}).straggler
    assert found is not None
    assert (found.rank, found.late.last, found.late.of) == (1, 24, 32)
    few = analyse({rank: replace(each, marks=(), steps=0, end=0.49) for rank, each in timelines.items()})
    assert few.straggler is None


def test_a_long_wait_before_the_steps_hides_no_slow_rank() -> None:
    timelines = {}
    for rank in range(3):
        starts = [step + 0.02 * (rank == 1) for step in range(9)]
        starts[0] -= 0.0 if rank == 2 else 0.9
        calls = tuple(
            Collective(("0", (0, 1, 2), number), "", "gloo:all_reduce", at, at) for number, at in enumerate(starts)
        )
        timelines[rank] = Timeline(0.5, 1.0, 8, tuple(step + 0.5 for step in range(9)), collectives=calls)
    found = analyse(timelines).straggler
    assert found is not None
    assert (found.rank, found.late.last, found.late.of) == (1, 8, 8)
