"""What tools read from the report logs of pytest, and the reports that they make."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ci, limit, repeat, results
from tests.support.results import Results, closing_line, read
from tests.support.tiers import SMOKE

ROOT = Path(__file__).parents[2]

OUTCOMES = """
import pytest

def test_passes(): pass

def test_fails():
    assert 1 == 2, "the reason"

@pytest.mark.skip
def test_is_skipped(): pass

@pytest.fixture
def broken():
    raise LookupError("in the fixture")

def test_has_a_broken_fixture(broken): pass

@pytest.fixture
def late():
    yield
    raise LookupError("at the end")

def test_fails_at_its_end(late): pass
"""
PLUGIN = 'pytest_plugins = ["tests.support.tiers"]'


def run(folder: Path, **files: str) -> tuple[Results, Path]:
    """Run files as tests, and read the log."""
    (folder / "conftest.py").write_text(PLUGIN)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    log = folder / "log.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", f"--report-log={log}"]
    done = subprocess.run(
        [*command, *(f"{name}.py" for name in files)],
        cwd=folder,
        env={"PATH": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert log.exists(), done.stdout + done.stderr
    return read(log), log


def test_a_log_has_the_outcome_of_each_test(tmp_path: Path) -> None:
    found, log = run(tmp_path, test_some=OUTCOMES, test_broken="import nothing_of_this_name")
    assert found.passed == set()  # a file that cannot be imported stops the whole run
    assert set(found.failed) == {"test_broken.py"}
    assert "nothing_of_this_name" in found.failed["test_broken.py"]

    found, log = run(tmp_path, test_some=OUTCOMES)
    names = {f"test_some.py::test_{name}" for name in ("fails", "has_a_broken_fixture", "fails_at_its_end")}
    assert found.passed == {"test_some.py::test_passes"}
    assert set(found.failed) == names
    assert set(found.skipped) == {"test_some.py::test_is_skipped"}
    assert "the reason" in found.failed["test_some.py::test_fails"]
    assert "in the fixture" in found.failed["test_some.py::test_has_a_broken_fixture"]
    assert "at the end" in found.failed["test_some.py::test_fails_at_its_end"]
    assert found.own_s.keys() >= {"test_some.py::test_passes", "test_some.py::test_fails"}
    assert list(found.by_module()) == ["test_some.py"]
    assert found.is_complete

    log.write_text(log.read_text()[:-30])
    assert not read(log).is_complete


def test_a_run_that_did_not_start_has_no_results(tmp_path: Path) -> None:
    found = read(tmp_path / "none.jsonl")
    assert (found.passed, found.failed, found.is_complete) == (set(), {}, False)


def test_a_crash_of_a_worker_is_a_failure_with_its_text() -> None:
    found = Results()
    found.add(
        {
            "$report_type": "TestReport",
            "nodeid": "a.py::b",
            "outcome": "failed",
            "when": "???",
            "duration": 0,
            "longrepr": "worker 'gw0' crashed while running 'a.py::b'",
        }
    )
    assert found.failed == {"a.py::b": "worker 'gw0' crashed while running 'a.py::b'"}


# -- continuous integration


def slow(*failed: str, passed: int = 2) -> Results:
    return Results(passed={f"s{i}" for i in range(passed)}, failed=dict.fromkeys(failed, "text"), is_complete=True)


DEFAULT = Results(passed={"d1", "d2"}, skipped={"d3"}, is_complete=True)


def test_a_green_run_ends_with_its_counts() -> None:
    assert ci.report(DEFAULT, slow(), Results()) == ("4 passed, 0 failed, 1 skipped", False)


def test_a_test_that_passes_alone_is_flaky_and_the_run_is_green() -> None:
    text, is_red = ci.report(DEFAULT, slow("f"), Results(passed={"f"}))
    assert not is_red
    assert "FLAKY: 1 of the slow tier" in text
    assert "f: failed beside others, passed alone" in text
    assert text.splitlines()[-1] == "5 passed, 0 failed, 1 skipped"


@pytest.mark.parametrize(
    "again", [Results(), Results(failed={"f": "x"}), Results(passed={"f"}, failed={"f": "its end"})]
)
def test_a_test_that_does_not_pass_alone_is_red(again: Results) -> None:
    text, is_red = ci.report(DEFAULT, slow("f"), again)
    assert is_red
    assert "FLAKY" not in text
    assert text.splitlines()[-3:] == ["FAILED f", "text", "4 passed, 1 failed, 1 skipped"]


def test_more_flaky_tests_than_allowed_are_red() -> None:
    names = [f"f{i}" for i in range(ci.MAX_FLAKY + 1)]
    text, is_red = ci.report(DEFAULT, slow(*names), Results(passed=set(names)))
    assert is_red
    assert all(f"FAILED {name}" in text for name in names)
    assert text.splitlines()[-1] == f"4 passed, {len(names)} failed, 1 skipped"
    assert not ci.report(DEFAULT, slow(*names[1:]), Results(passed=set(names)))[1]


def test_a_failure_of_the_default_tier_is_red_and_its_text_comes_last() -> None:
    long = "\n".join(f"line {i}" for i in range(100))
    text, is_red = ci.report(Results(failed={"a": long}), Results(), Results(passed={"a"}))
    assert is_red
    lines = text.splitlines()
    assert lines[-1] == "0 passed, 1 failed, 0 skipped"
    assert lines[-1 - ci.TAIL : -1] == [f"line {i}" for i in range(100 - ci.TAIL, 100)]
    assert lines[-3 - ci.TAIL] == "FAILED a"


# -- repeated runs, and the limit of the default tier


def test_a_test_that_fails_in_several_runs_is_printed_once_with_its_count() -> None:
    runs = [slow(), slow("f", "g"), slow("f")]
    text, is_red = repeat.report(runs)
    assert is_red
    assert "2 of 3  f" in text
    assert "1 of 3  g" in text
    assert text.count("of 3  f") == 1
    assert text.splitlines()[-1] == "2 tests failed in 3 runs"


def test_several_runs_are_green_if_all_are_and_none_was_cut_off() -> None:
    assert repeat.report([slow(), slow()]) == ("0 tests failed in 2 runs", False)
    text, is_red = repeat.report([slow(), Results(passed={"a"})])
    assert is_red
    assert "1 of 2 runs did not finish" in text


def test_tests_over_the_limit_of_the_default_tier_are_found() -> None:
    assert limit.too_slow(Results(own_s={"a": 0.1, "b": 5.1, "c": 5.0, next(iter(SMOKE)): 9.0})) == ["b"]


def test_counts_of_several_runs_are_added() -> None:
    assert closing_line([DEFAULT, slow()], 3) == "4 passed, 3 failed, 1 skipped"


def test_times_of_modules_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    log = tmp_path / "log.jsonl"
    report = {"$report_type": "TestReport", "outcome": "passed", "when": "call", "duration": 1.5}
    log.write_text("".join(json.dumps({**report, "nodeid": f"{name}.py::t"}) + "\n" for name in ("a", "b", "b")))
    monkeypatch.setattr(sys, "argv", ["results", str(log)])
    results.main()
    assert capsys.readouterr().out.split("\n")[1:3] == ["     3.0 s  b.py", "     1.5 s  a.py"]
