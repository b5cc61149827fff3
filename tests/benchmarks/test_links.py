"""The benchmark of links measures what its output says, on hosts with a network between them."""

from __future__ import annotations

from collections.abc import Iterator

import cloudpickle
import pytest

from benchmarks import links
from tests.bed.bed import why_not
from tests.support.timing import Bar


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if why := why_not():
        pytest.skip(why)
    monkeypatch.setattr(links, "ROUNDS", 1)
    monkeypatch.setattr(links, "CALLS", 5)
    cloudpickle.register_pickle_by_value(links)
    yield
    cloudpickle.unregister_pickle_by_value(links)


@pytest.mark.slow
def test_calls_take_at_least_the_network_delay(bar: Bar) -> None:
    found = links.measure_calls_with_delay()
    assert len(found) == 3
    for figures in found.values():
        assert figures["n"] == 5
        assert 0 < figures["least"] <= figures["median"] <= figures["most"]
        bar.check_above(figures["least"] / 1e6, 2 * links.DELAY_S, "a call over the network")
        bar.check(figures["most"] / 1e6, 1.0, "a call over the network")


@pytest.mark.slow
def test_a_cut_is_reported_after_the_allowed_silence(bar: Bar) -> None:
    took_s = links.measure_cut()
    assert took_s > 0
    bar.check_above(took_s, links.LOST_AFTER_S / 2, "the report of a cut")
    bar.check(took_s, 1.5 * links.LOST_AFTER_S, "the report of a cut")
