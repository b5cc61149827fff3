"""The test run of continuous integration: ``make test``, then the slow tier; ``.ci/run`` calls this with any Python.

A failure of ``make test`` makes the run red at once. A failed test of the slow tier runs once more, alone: if it passes then,
it is printed as flaky, and a run with more than three flaky tests is red, too. A red run ends with the name of each failed test
and the end of its text, followed by the line with the counts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.results import Results, closing_line, read

__all__ = ["LIMIT_S", "MAX_FLAKY", "TAIL", "report"]

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "build" / "tests"

MAX_FLAKY = 3
"""A run with more than this many flaky tests, which pass only at their second try, is red."""

LIMIT_S = 85 * 60
"""Seconds that both tiers may take together, including their set-up; a tier that takes longer is ended with a message."""

TAIL = 40
"""Printed lines of the text of each failure."""


def main(arguments: Sequence[str]) -> int:
    """Run both tiers; the exit status is 0 only if everything is green. Arguments go to the pytest of ``make test``."""
    for name in ("default", "slow", "again"):
        (LOGS / f"{name}.jsonl").unlink(missing_ok=True)
    end = time.monotonic() + LIMIT_S
    is_green = _make("test", end, ARGS=" ".join(arguments))
    default, slow, again = read(LOGS / "default.jsonl"), Results(), Results()
    if is_green and not arguments:
        is_green = _make("test-slow", end)
        slow = read(LOGS / "slow.jsonl")
        if (
            not is_green and slow.is_complete and 0 < len(slow.failed) <= 2 * MAX_FLAKY
        ):  # else it is red whatever they say
            again = _run_again(list(slow.failed))
            is_green = again.is_complete
    text, is_red = report(default, slow, again)
    print(text, flush=True)
    return 0 if is_green and not is_red else 1


def report(default: Results, slow: Results, again: Results) -> tuple[str, bool]:
    """Give the end of a run's output, and whether the results are red.

    Args:
        default: the default tier.
        slow: the slow tier.
        again: the tests of the slow tier that failed, each run alone.
    """
    flaky = {test: text for test, text in slow.failed.items() if test in again.passed and test not in again.failed}
    broken = {**default.failed, **{test: text for test, text in slow.failed.items() if test not in flaky}}
    is_red = bool(broken) or len(flaky) > MAX_FLAKY
    lines: list[str] = []
    if flaky:
        lines += ["", f"FLAKY: {len(flaky)} of the slow tier (more than {MAX_FLAKY} fail the run)"]
        lines += [f"  {test}: failed beside others, passed alone" for test in flaky]
    for test, text in {**broken, **(flaky if is_red else {})}.items():
        lines += ["", f"FAILED {test}", *_tail(text)]
    # A flaky test counts as failed if it makes the run red, and as passed otherwise.
    failed = len(broken) + (len(flaky) if is_red else 0)
    passed = Results(passed=set() if is_red else set(flaky))
    return "\n".join([*lines, closing_line([default, slow, passed], failed)]), is_red


def _tail(text: str) -> list[str]:
    lines = text.splitlines()
    return ["  ...", *lines[-TAIL:]] if len(lines) > TAIL else lines


def _run_again(tests: Sequence[str]) -> Results:
    """Run each of these tests alone, one after the other."""
    log = LOGS / "again.jsonl"
    results = Results(is_complete=True)
    for test in tests:
        log.unlink(missing_ok=True)
        # A test during which a worker crashed is reported under its own name, too.
        subprocess.run([str(ROOT / ".venv/bin/python"), "-m", "pytest", "-q", f"--report-log={log}", test], cwd=ROOT)
        one = read(log)
        results.passed |= one.passed
        results.failed.update(one.failed)
        results.is_complete &= one.is_complete
    return results


def _make(target: str, end: float, **variables: str) -> bool:
    """Run a target of make; if it does not end before a time of the monotonic clock, kill its process group: that is red."""
    given = [f"{name}={value}" for name, value in variables.items() if value]
    make = subprocess.Popen(["make", "--no-print-directory", target, *given], cwd=ROOT, start_new_session=True)
    try:
        return make.wait(end - time.monotonic()) == 0
    except subprocess.TimeoutExpired:
        print(f"make {target} did not end within the {LIMIT_S // 60} minutes of both tiers", flush=True)
        return False
    finally:
        if make.poll() is None:
            os.killpg(make.pid, signal.SIGKILL)
            make.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
