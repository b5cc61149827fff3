"""The benchmark of the watch, in short: faults are reported in the cell and in the view, and a healthy run has no message."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.watch import FAULTS

pytestmark = pytest.mark.slow  # the rules need seconds of steps


def test_each_fault_is_reported_and_a_healthy_run_has_no_message() -> None:
    command = [sys.executable, "-m", "benchmarks.watch", "--runs", "1", "--minutes", "0.2"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 of 1 profiles of 10 steps name it and its function" in run.stdout
    assert f"{len(FAULTS)} of {len(FAULTS)} faults are reported" in run.stdout
    assert "a healthy loop for 0.2 min: 0 messages" in run.stdout
