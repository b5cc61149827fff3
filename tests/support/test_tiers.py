"""Each tier selects its tests, bounds on elapsed time count only in the timing tier, and slow tests are reported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.tiers import OWN_S, TEXT, TIERS, pytest_ignore_collect

ROOT = Path(__file__).parents[2]

# Time stands still except for the time that tests spend, so that a busy machine makes no test slow.
CONFTEST = """
import types
from _pytest import timing
from tests.support import tiers

pytest_plugins = ["tests.support.tiers"]
now = [0.0]
timing.perf_counter = lambda: now[0]
tiers.time = types.SimpleNamespace(perf_counter=timing.perf_counter)

def spend(seconds):
    now[0] += seconds
"""

TESTS = """
import pytest
from conftest import spend

@pytest.fixture(scope="module")
def wide():
    spend(100.0)

@pytest.fixture
def narrow():
    spend(5.5)

def test_unmarked():
    pass

@pytest.mark.slow
def test_slow():
    spend(5.5)

@pytest.mark.timing
def test_timing():
    pass

@pytest.mark.timing
def test_timing_bar(bar):
    bar.check(2.0, 1.0, "a test of the timing tier")

def test_default_bar(bar):
    bar.check(2.0, 1.0, "a test of the default tier")

@pytest.mark.slow
def test_slow_bar(bar):
    bar.check(2.0, 1.0, "a test of the slow tier")

def test_wide_fixture(wide):
    pass

def test_narrow_fixture(narrow):
    pass

def test_long():
    spend(5.5)
"""

WITH_A_FAILURE = """
from conftest import spend

def test_fails():
    assert 1 == 2, "as it should"

def test_passes():
    spend(0.25)
"""


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a module of tests in a separate pytest."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: x\n    timing: x\n")
    (folder / "test_it.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *options, "test_it.py"],
        cwd=folder,
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # other plugins take time to import, and this test needs none
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def outcomes(output: str) -> dict[str, str]:
    """Test -> its outcome, in lower case."""
    return {name: outcome.lower() for name, outcome in re.findall(r"^test_it\.py::test_(\w+) (\w+)", output, re.M)}


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        (
            "default",
            {
                "unmarked": "passed",
                "default_bar": "passed",
                "wide_fixture": "passed",
                "narrow_fixture": "passed",
                "long": "passed",
            },
        ),
        ("slow", {"slow": "passed", "slow_bar": "passed"}),
        (
            "timing",
            {"timing": "passed", "timing_bar": "failed", "default_bar": "failed", "slow_bar": "failed"},
        ),
    ],
)
def test_a_tier_selects_its_tests_and_only_timing_asserts_on_time(
    tier: str, expected: dict[str, str], tmp_path: Path
) -> None:
    output = run(tmp_path, TESTS, "--tier", tier).stdout
    assert outcomes(output) == expected, output
    assert f"{9 - len(expected)} deselected" in output
    for name in ("default", "slow", "timing"):
        text = f"AssertionError: a test of the {name} tier took 2.00 s instead of less than 1 s"
        assert (text in output) == (tier == "timing"), output
    # Only the summary of the default tier lists tests whose own time is too long.
    _, _, listed = output.partition("over 5 s: for the slow tier")
    names = re.findall(r"^ +5.5 s  test_it\.py::test_(\w+)$", listed, re.M)
    assert sorted(names) == (["long", "narrow_fixture"] if tier == "default" else [])


@pytest.mark.parametrize(
    ("text", "left_out_by"),
    [
        ("def test_a(embargo): pass", {"slow", "timing"}),
        ("@pytest.mark.slow\ndef test_a(): pass", {"timing"}),
        ("pytestmark = [pytest.mark.timing]", {"slow"}),
        ("def test_a(bar: Bar) -> None: pass", {"slow"}),
        ("@pytest.mark.slow\ndef test_a(bar): pass", set()),
    ],
)
def test_modules_without_a_test_of_the_tier_are_left_out(tmp_path: Path, text: str, left_out_by: set[str]) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(text)
    configs: dict[str, Any] = {tier: SimpleNamespace(getoption={"tier": tier}.get) for tier in ("", *TIERS)}
    assert {tier for tier, config in configs.items() if pytest_ignore_collect(path, config)} == left_out_by
    assert not any(pytest_ignore_collect(tmp_path, config) for config in configs.values())  # a folder


def test_without_a_tier_all_tests_run_and_those_marked_timing_assert(tmp_path: Path) -> None:
    output = run(tmp_path, TESTS).stdout
    assert {name for name, outcome in outcomes(output).items() if outcome == "failed"} == {"timing_bar"}, output
    assert len(outcomes(output)) == 9
    assert "for the slow tier" not in output


def test_an_unknown_tier_is_refused(tmp_path: Path) -> None:
    ended = run(tmp_path, TESTS, "--tier", "fast")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--tier: invalid choice: 'fast'" in ended.stderr


def test_reports_have_the_own_time_and_the_failure_of_a_test(tmp_path: Path) -> None:
    pytest.importorskip("pytest_reportlog")
    log = tmp_path / "log.jsonl"
    run(tmp_path, WITH_A_FAILURE, "-p", "pytest_reportlog.plugin", "--report-log", str(log))
    reports: dict[tuple[str, str], dict[str, Any]] = {}
    for line in log.read_text().splitlines():
        report = json.loads(line)
        if report["$report_type"] == "TestReport":
            reports[report["nodeid"].rpartition("::")[2], report["when"]] = dict(report["user_properties"])
    assert {key for key, properties in reports.items() if OWN_S in properties} == {
        ("test_fails", "call"),
        ("test_passes", "call"),
    }
    assert reports["test_passes", "call"][OWN_S] == 0.25
    assert {key for key, properties in reports.items() if TEXT in properties} >= {("test_fails", "call")}
    assert "AssertionError: as it should" in reports["test_fails", "call"][TEXT]
    assert not any(TEXT in properties for (name, _), properties in reports.items() if name == "test_passes")
