"""Collectives that C++ starts are counted together now and then, and every report has all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from monarch_kernel.features.profiling.arrivals import Arrivals
from monarch_kernel.net.memory.counters import CollectiveKind, Meters
from monarch_kernel.train.process_group import collective_counts
from monarch_kernel.train.process_group.call_check import CallCheck
from monarch_kernel.train.process_group.collective_counts import CollectiveMeter
from monarch_kernel.train.process_group.operators import Noted

KIND = CollectiveKind("", "all_reduce", "gloo", 4)
NO_CHECK = cast("CallCheck", SimpleNamespace(message_of_cpp=lambda group: None))
GROUP: Any = SimpleNamespace(name="0", ranks=4, members=(0, 1, 2, 3), moved={})


class Counted:
    """A meter, and how often it has woken the thread that reports."""

    def __init__(self) -> None:
        self.meters = Meters(0)
        self.news = 0
        self.meters.on_news = self._wake
        self.meter = CollectiveMeter(self.meters, lambda name, description: "", NO_CHECK)
        self.number = 0

    def _wake(self) -> None:
        self.news += 1

    def start(self, at: float, nbytes: int) -> None:
        self.number += 1
        self.meter.operators.add(Noted(at, GROUP, KIND, nbytes, nbytes, False, (0, 0), False, self.number), None)

    def report(self, *, is_last: bool = False) -> tuple[int, int, int]:
        """The operations, bytes and bytes in of the next report; nothing if nothing has changed."""
        collected = self.meters.changes(is_last=is_last).collected
        assert len(collected) <= 1
        return (collected[0].operations, collected[0].nbytes, collected[0].nbytes_in) if collected else (0, 0, 0)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    monkeypatch.setattr(collective_counts, "ARRIVALS", Arrivals())
    return Counted()


def test_a_report_has_every_collective_to_the_byte(counted: Counted) -> None:
    for i in range(1_000):
        counted.start(5.0 + i * 0.0001, 8 + 4 * (i % 3))
    nbytes = sum(8 + 4 * (i % 3) for i in range(1_000))
    nbytes_in = sum(2 * 3 * (8 + 4 * (i % 3)) // 4 for i in range(1_000))
    assert counted.report() == (1_000, nbytes, nbytes_in)
    assert counted.report() == (0, 0, 0)
    (arrived,) = collective_counts.ARRIVALS.take()
    assert arrived.numbers == tuple(sorted(arrived.numbers))
    assert arrived.numbers[-1] > 900


def test_the_first_collective_after_the_last_report_wakes_the_thread_that_reports(counted: Counted) -> None:
    counted.start(5.0, 8)
    assert counted.news == 1
    counted.start(5.01, 8)
    assert counted.report(is_last=True)[0] == 2
    assert counted.report(is_last=True) == (0, 0, 0)  # the thread ends here
    counted.start(5.02, 8)
    assert counted.news == 2
    counted.start(5.03, 8)
    assert counted.report(is_last=True)[0] == 4


def test_collectives_that_are_aborted_are_taken_out_of_the_counts(counted: Counted) -> None:
    for i in range(5):
        counted.start(5.0 + i * 0.01, 40)
    pending = [SimpleNamespace(group="", operation="all_reduce", members=(0, 1, 2, 3))] * 2
    counted.meter.aborted(lambda: (cast("Any", pending), None), None)
    assert counted.report() == (3, 120, 180)
