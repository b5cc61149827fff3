"""A pytest plugin: the tiers of the tests, and the report of tests that are too slow for the default tier.

A test chooses its tier by a marker:

- ``slow``: the slow tier. Real engines, browsers, notebooks, campaigns, and tests that take more than 5 s.
- ``timing``: the timing tier. It asserts on elapsed time, and runs alone and serially.
- no marker: the default tier. The timing tier also runs the tests of this and the slow tier that use the fixture ``bar``, with
  their bounds on elapsed time.

``--tier`` selects one tier; without it all named tests run, without the bounds of ``bar``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.timing import Bar

__all__ = ["LIMIT_S", "OWN_S", "SMOKE", "TEXT", "TIERS", "is_too_slow", "tiers_of"]

TIERS = ("default", "slow", "timing")

LIMIT_S = 5.0
"""Limit for a test of the default tier, in seconds: its body and its fixtures of function scope, but not shared fixtures."""

WORDS = {"slow": re.compile(r"\bmark\.slow\b"), "timing": re.compile(r"\bmark\.timing\b|\bbar\b")}
"""What a module contains that has a test of the tier."""

SMOKE = frozenset({"tests/lab/test_smoke.py::test_ranks_appear"})
"""Tests that stay in the default tier although they take longer: the one that opens JupyterLab in a browser."""

OWN_S = "own_s"
"""Property of the report of a test's body: the test's own time, in seconds."""

TEXT = "text"
"""Property of the report of a failure: its text."""


def is_too_slow(test: str, own_s: float) -> bool:
    """Whether a test took more than the default tier allows."""
    return own_s > LIMIT_S and test not in SMOKE


def tiers_of(item: pytest.Item) -> frozenset[str]:
    """The tiers that run a test."""
    if item.get_closest_marker("timing"):
        return frozenset({"timing"})
    tier = "slow" if item.get_closest_marker("slow") else "default"
    return frozenset({tier, "timing"} if "bar" in getattr(item, "fixturenames", ()) else {tier})


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=TIERS, help="run the tests of one tier only")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules without a test of the tier: to import and collect all takes a quarter of a minute in each process."""
    words = WORDS.get(config.getoption("tier") or "")
    if words is None or collection_path.suffix != ".py" or not collection_path.is_file():
        return None
    return None if words.search(collection_path.read_text(encoding="utf-8")) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("tier")
    if tier is None:
        return
    config.hook.pytest_deselected(items=[item for item in items if tier not in tiers_of(item)])
    items[:] = [item for item in items if tier in tiers_of(item)]


@pytest.fixture
def bar(request: pytest.FixtureRequest) -> Bar:
    """Bounds on elapsed time, which only the timing tier asserts."""
    return Bar(request.config.getoption("tier") == "timing" or request.node.get_closest_marker("timing") is not None)


class Stopwatch:
    """Measures each test's own time, and notes it in the test's reports."""

    def __init__(self) -> None:
        self._setup_s = self._shared_s = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """Leave out the set-up of a shared fixture, which happens in the first test that needs it."""
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self._shared_s += time.perf_counter() - begin

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "setup":
            self._setup_s, self._shared_s = max(0.0, call.duration - self._shared_s), 0.0
        elif report.when == "call":
            report.user_properties.append((OWN_S, round(self._setup_s + call.duration, 3)))
        if report.failed:
            report.user_properties.append((TEXT, report.longreprtext))
        return report


class Slowest:
    """Collects the tests of a run that take more than the default tier allows, and prints them at its end."""

    def __init__(self) -> None:
        self.too_slow: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        own_s = dict(report.user_properties).get(OWN_S) if report.when == "call" else None
        if isinstance(own_s, float) and is_too_slow(report.nodeid, own_s):
            self.too_slow[report.nodeid] = own_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.too_slow:
            return
        terminalreporter.section(f"over {LIMIT_S:g} s: for the slow tier, if they are as slow on an idle machine")
        for test, own_s in sorted(self.too_slow.items(), key=lambda pair: -pair[1]):
            terminalreporter.line(f"{own_s:6.1f} s  {test}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Stopwatch())
    if config.getoption("tier") == "default" and not hasattr(config, "workerinput"):  # a worker of xdist prints nothing
        config.pluginmanager.register(Slowest())
