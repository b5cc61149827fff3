"""The benchmark of links measures what it says, on hosts with a network between them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import cloudpickle
import pytest

from benchmarks import links
from tests.bed.bed import why_not
from tests.waiting import undisturbed_s


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if why := why_not():
        pytest.skip(why)
    monkeypatch.setattr(links, "ROUNDS", 1)
    monkeypatch.setattr(links, "CALLS", 5)
    cloudpickle.register_pickle_by_value(links)
    yield
    cloudpickle.unregister_pickle_by_value(links)


def test_calls_take_longer_where_the_network_does() -> None:
    found = links.measure_calls_with_delay()
    assert len(found) == 3
    for figures in found.values():
        assert figures["n"] == 5
        assert 2e6 * links.DELAY_S < figures["least"] <= figures["median"] <= figures["most"] < 1e6


def test_a_cut_is_told_after_the_silence_that_is_allowed() -> None:
    undisturbed: list[float] = []

    def clock() -> float:
        undisturbed.append(undisturbed_s())
        return time.monotonic()

    assert links.measure_cut(clock) > links.LOST_AFTER_S / 2
    begin, end = undisturbed
    assert end - begin < 1.5 * links.LOST_AFTER_S
