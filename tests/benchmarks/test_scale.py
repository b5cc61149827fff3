"""The simulation of many hosts counts the messages that exist, and charts place their points."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

import monarch_kernel.actor
from benchmarks.costs import Costs
from benchmarks.plot import Chart, Curve, draw
from benchmarks.simulate import simulate
from monarch_kernel.runtime.controller import host_tree, output_order

COSTS = Costs(
    ipc_s=3e-6,
    ipc_byte_s=1e-10,
    tcp_s=3e-6,
    tcp_byte_s=1e-9,
    pipe_s=15e-6,
    rank_call_s=200e-6,
    rank_cell_s=500e-6,
    agent_up_s=0.5,
    fork_s=6e-3,
)


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monarch_kernel.actor, "unhandled_fault_hook", lambda failure: None)
    monkeypatch.setattr(output_order, "OUTPUT_GRACE_S", 600.0)


@pytest.mark.usefixtures("_alone")
def test_a_tree_has_more_messages_but_fewer_direct_hosts_and_loses_no_more_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flat = simulate(12, 2, COSTS, 50e-6, 1.25e9)
    monkeypatch.setattr(host_tree, "FAN_OUT", 3)
    tree = simulate(12, 2, COSTS, 50e-6, 1.25e9)  # the simulation itself checks that only ranks of the lost host fail
    assert (flat["direct_hosts"], tree["direct_hosts"]) == (12, 3)
    assert flat["call_messages"] == 24  # one message to each host, and one with the answers of its ranks
    assert tree["call_messages"] >= 24
    assert flat["below_lost"] == 0 < tree["below_lost"]
    assert flat["up_ms"] > 1e3 * (COSTS.agent_up_s + 2 * COSTS.fork_s)
    assert 1000 <= flat["loss_ms"] < tree["loss_ms"]
    assert flat["ranks_after_loss"] >= 2


def test_a_chart_places_its_points() -> None:
    text = draw([Chart("a title", "hosts", [Curve("calls & cells", [(1, 0.5), (100, 50.0)])])], columns=1)
    svg = ElementTree.fromstring(text)
    points = [
        (float(circle.get("cx", "")), float(circle.get("cy", "")))
        for circle in svg.iter()
        if circle.tag.endswith("circle")
    ]
    (left, low), (right, high) = points
    assert left < right
    assert low > high  # y goes down in a picture
    assert "calls &amp; cells" in text
