"""``python -m monarch_kernel doctor`` from end to end, on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def doctor(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "monarch_kernel", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=cwd)


@pytest.mark.slow
def test_all_checks_run_and_a_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch.py of the working directory was imported')")
    run = doctor("--json", cwd=tmp_path)
    assert not run.stderr
    report = json.loads(run.stdout)
    assert run.returncode == (report["problems"] > 0)
    signs = {each["item"]: each["sign"] for each in report["findings"]}
    assert (signs["torch"], signs["test rank"]) == ("ok", "ok"), report
    assert {"Python", "required packages", "open files", "session sockets", "engines"} <= set(signs)


def test_the_text_has_a_line_for_each_item_and_ends_with_a_summary(tmp_path: Path) -> None:
    run = doctor("--quick", cwd=tmp_path)
    assert not run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("✓ ok       Python               CPython")
    assert not [line for line in lines if "test rank" in line[:30]]
    assert "items" in lines[-1]
    assert run.returncode == ("problem" in lines[-1])


def without_packages(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command where nothing but the package and the standard library can be imported."""
    command = [sys.executable, "-S", "-m", "monarch_kernel", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=cwd, env=env)


def test_the_doctor_runs_where_required_packages_are_missing(tmp_path: Path) -> None:
    run = without_packages("doctor", "--quick", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (1, "")
    assert "✗ problem  torch                not installed" in run.stdout
    assert "✗ problem  required packages" in run.stdout
    assert run.stdout.splitlines()[-1].endswith("each arrow (→) says what to do.")


@pytest.mark.parametrize(
    ("arguments", "package"), [(["mesh", "list"], "msgspec"), (["install", "--prefix", "p"], "jupyter_client")]
)
def test_other_commands_name_the_package_that_is_missing(arguments: list[str], package: str, tmp_path: Path) -> None:
    run = without_packages(*arguments, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        f"monarch_kernel: error: No module named '{package}': python -m monarch_kernel doctor says what to install\n"
    )
    assert not list(tmp_path.iterdir())


def test_an_interrupt_ends_the_doctor_and_its_children(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "monarch_kernel", "doctor"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path, start_new_session=True) as run:
        assert run.stdout is not None
        while "leftovers" not in (line := run.stdout.readline()):  # the test rank follows
            assert line
        os.killpg(run.pid, signal.SIGINT)
        _, error = run.communicate(timeout=60)
    assert (run.returncode, error) == (130, "monarch_kernel: error: interrupted\n")


def test_a_closed_pipe_ends_the_doctor_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "monarch_kernel", "doctor", "--quick"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.readline()
        run.stdout.close()
        error = run.stderr.read()
    assert (run.returncode, error) == (1, "")
