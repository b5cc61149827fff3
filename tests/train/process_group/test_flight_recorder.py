"""When a look at a rank reads torch's flight recorder."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

from monarch_kernel.train.process_group import flight_recorder
from monarch_kernel.train.process_group.flight_recorder import FlightRecorder


def entry(group: str, *, retired: bool) -> dict[str, Any]:
    return {"process_group": (group, "default_pg"), "retired": retired}


def read(recorder: FlightRecorder, numbers: dict[str, int], *pending: str, now: float = 0.0) -> None:
    recorder.note(numbers, [entry(each, retired=False) for each in pending] + [entry("0", retired=True)], now)


def test_the_first_look_at_a_group_in_use_reads() -> None:
    assert not FlightRecorder().may_pend({"0": 0}, 0.0)
    assert FlightRecorder().may_pend({"0": 7}, 0.0)


def test_a_loop_that_goes_on_is_not_read_for() -> None:
    recorder = FlightRecorder()
    read(recorder, {"0": 7})
    assert not any(recorder.may_pend({"0": number}, 0.0) for number in range(8, 20))


def test_a_group_that_stands_still_is_read_for_until_nothing_pends() -> None:
    recorder = FlightRecorder()
    read(recorder, {"0": 7})
    assert not recorder.may_pend({"0": 8}, 0.0)
    assert recorder.may_pend({"0": 8}, 0.0)
    read(recorder, {"0": 8}, "0")
    assert recorder.may_pend({"0": 8}, 0.0)
    read(recorder, {"0": 8})
    assert not recorder.may_pend({"0": 8}, 1e6)


def test_one_group_may_stand_still_while_another_one_is_in_use() -> None:
    recorder = FlightRecorder()
    read(recorder, {"0": 7, "1": 3}, "1")
    assert recorder.may_pend({"0": 8, "1": 3}, 0.0)
    read(recorder, {"0": 9, "1": 3})
    assert not recorder.may_pend({"0": 10, "1": 3}, 0.0)


def test_it_is_read_once_in_a_while_for_a_group_that_threads_share() -> None:
    recorder = FlightRecorder()
    read(recorder, {"0": 7})
    assert not recorder.may_pend({"0": 8}, 19.0)
    assert recorder.may_pend({"0": 9}, 21.0)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[flight_recorder._Reader]:
    """A thread of the test's own that reads, in place of the one of the process."""
    reader = flight_recorder._Reader()
    monkeypatch.setattr(flight_recorder, "_READER", reader)
    monkeypatch.setitem(sys.modules, "torch.distributed", sys.modules.get("torch.distributed", ModuleType("dist")))
    yield reader
    reader._executor.shutdown()


def test_one_thread_reads_for_all_others(reader: flight_recorder._Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread that reads could make another arena of the allocator large for good."""
    readers = []

    def dump() -> list[dict[str, Any]]:
        readers.append(threading.get_ident())
        return [{"time_created_ns": 1}]

    monkeypatch.setattr(flight_recorder, "_dump", dump)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda turn: FlightRecorder().entries(), range(6)))
    assert found == [[{"time_created_ns": 1}]] * 6
    assert FlightRecorder().entries() == found[0]
    assert len(set(readers)) == 1
    assert readers[0] != threading.get_ident()


def test_what_code_starts_in_a_former_group_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(number: int, group_id: int, at_ns: int) -> dict[str, Any]:
        about = {"collective_seq_id": number, "pg_id": group_id, "time_created_ns": at_ns}
        return {**entry("0", retired=True), **about}

    former, again, current = started(4, 0, 10), started(5, 0, 30), started(1, 1, 40)
    recorder = FlightRecorder()
    recorder.since_ns = 20
    reader = ModuleType("reader")
    reader.read = lambda: [former, again, current]  # type: ignore[attr-defined]
    monkeypatch.setattr(flight_recorder, "_READER", reader)
    assert recorder.entries() == [current]
    reader.read = lambda: [  # type: ignore[attr-defined]
        {"time_created_ns": 10, "process_group": ("0", "")},
        {"time_created_ns": 30, "process_group": ("0", "")},
    ]
    assert len(recorder.entries()) == 1  # a torch whose entries have no such number
