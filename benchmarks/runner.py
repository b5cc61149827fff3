"""Runs the peers in turns, each in a separate process with a deadline, and ends the processes that a peer leaves behind.

Theory of operation: the runner is a "subreaper", so every process that a peer starts stays below the runner in the process
tree, even a daemon that changed its session and lost its parent. One peer runs at a time. When its process has ended, or its
deadline has passed, the runner kills all processes below itself that are new since the start of the peer. Output goes to files,
since a daemon that holds a pipe open would keep the runner waiting.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.machine import PEERS, PeerPackage, is_installed
from benchmarks.measures import Measure, row_key, rows_by_ranks
from benchmarks.peer import STARTED_VARIABLE
from benchmarks.report import Sample

__all__ = ["Run", "Settings", "parse_figures", "run_all", "run_once"]

CHECKOUT = Path(__file__).resolve().parent.parent
PR_SET_CHILD_SUBREAPER = 36
END_DEADLINE_S = 20.0


@dataclass(frozen=True)
class Settings:
    """Numbers of repetitions, and the deadline."""

    repeat: int = 3
    calls: int = 300
    outstanding: int = 20_000
    deadline_s: float = 300.0
    module: str = "benchmarks.peer_{peer}"
    """The script of a peer."""


@dataclass(frozen=True)
class Run:
    """The result of one process of a peer."""

    samples: list[Sample]
    trouble: str
    """The reason why the process failed; empty if it did not."""
    left_behind: int
    """The number of processes that still existed after its end."""


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that no daemon of a peer escapes."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants(besides: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """List the living processes below this one; its own zombies are reaped on the way."""
    living = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process in besides:
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
            elif process.ppid() == os.getpid():
                process.wait()
    return living


def end_all(besides: Collection[psutil.Process]) -> int:
    """Kill all processes below this one, except some, wait until they are gone, and return their number."""
    killed: set[psutil.Process] = set()
    deadline = time.monotonic() + END_DEADLINE_S
    # A process may fork between the listing and the kill, so repeat this until none is left.
    while left := descendants(besides):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[process.pid for process in left]} of a peer can't be ended")
        killed.update(left)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)
    return len(killed)


def parse_figures(text: str) -> dict[str, dict[str, object]]:
    """Read the figures from a peer's output, which may contain output of ranks, too."""
    figures = {}
    for line in text.splitlines():
        if line.startswith('{"measure"'):
            with contextlib.suppress(json.JSONDecodeError):
                figure = json.loads(line)
                figures[str(figure["measure"])] = figure
    return figures


def last_error(text: str) -> str:
    """Return the last line of a peer's error output, where Python names the exception; empty without output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def run_once(peer: str, ranks: int, names: list[str], settings: Settings) -> Run:
    """Run one peer once on a number of ranks; gives a sample for each requested row, with a figure or a reason."""
    command = [sys.executable, "-m", settings.module.format(peer=peer), *names, "--ranks", str(ranks)]
    command += ["--calls", str(settings.calls), "--outstanding", str(settings.outstanding)]
    environment = os.environ | {
        STARTED_VARIABLE: repr(time.monotonic()),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Also processes that a peer starts elsewhere must find this package.
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    become_subreaper()
    others = descendants()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env=environment, cwd=CHECKOUT, start_new_session=True
        )
        trouble = ""
        try:
            if process.wait(settings.deadline_s):
                trouble = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            trouble = f"not done after {settings.deadline_s:g} s"
        finally:
            left_behind = end_all(others)
            process.wait()
        output.seek(0)
        errors.seek(0)
        figures = parse_figures(output.read().decode(errors="replace"))
        complaint = last_error(errors.read().decode(errors="replace"))
    if trouble and complaint:
        trouble += f"; its last error output: {complaint}"
    samples = []
    for name in names:
        row = row_key(name, ranks)
        figure = figures.get(row, {})
        if "value" in figure:
            samples.append(Sample(peer, row, float(str(figure["value"]))))
        else:
            samples.append(
                Sample(
                    peer,
                    row,
                    None,
                    str(figure.get("error", trouble or "the process ended well, but printed no figure")),
                )
            )
    return Run(samples, trouble, left_behind)


def run_all(
    peers: list[str],
    measures: tuple[Measure, ...],
    settings: Settings,
    progress: Callable[[str], None],
    packages: Mapping[str, PeerPackage] = PEERS,
) -> list[Sample]:
    """Run all peers in turns within each repetition, in another order each time."""
    groups = rows_by_ranks(measures)
    samples = []
    present = []
    for peer in peers:
        if is_installed(packages[peer]):
            present.append(peer)
            continue
        reason = f"not installed (no module {packages[peer].module.partition('.')[0]})"
        samples += [Sample(peer, row_key(name, ranks), None, reason) for ranks in groups for name in groups[ranks]]
    for repetition in range(settings.repeat):
        for ranks, names in groups.items():
            for turn in range(len(present)):
                peer = present[(turn + repetition) % len(present)]
                begin = time.monotonic()
                run = run_once(peer, ranks, names, settings)
                samples += run.samples
                line = f"repetition {repetition + 1} of {settings.repeat}: {peer} on {ranks} ranks, "
                line += f"{time.monotonic() - begin:.1f} s"
                if run.left_behind:
                    line += f"; left {run.left_behind} processes behind"
                if run.trouble:
                    line += f"; {run.trouble}"
                progress(line)
    return samples
