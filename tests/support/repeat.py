"""Find flaky tests: run a tier several times, and print each failed test with its count.

``make test-repeat N=10``, beside busy loops ``make test-repeat N=3 LOAD=4``, and with random pauses in all processes
``make test-repeat N=1 PAUSES=7``. The exit status is 0 only if no run had a failure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support import pauses
from tests.support.results import Results, read

__all__ = ["report"]

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "build" / "tests"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.repeat", description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="number of runs of the tier")
    parser.add_argument("--load", type=int, default=0, help="number of busy loops beside it")
    parser.add_argument("--pauses", default="", metavar="SEED", help="make random pauses in all processes; empty: none")
    parser.add_argument("--tier", default="default")
    parser.add_argument("--workers", default="2")
    options, rest = parser.parse_known_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    runs: list[Results] = []
    with busy_loops(options.load):
        for number in range(1, options.times + 1):
            log = LOGS / f"repeat-{number}.jsonl"
            log.unlink(missing_ok=True)
            begin = time.monotonic()
            given = ["-q", "-n", options.workers, f"--tier={options.tier}", f"--report-log={log}", *rest]
            seed = f"{options.pauses}-{number}" if options.pauses else ""
            with (LOGS / f"repeat-{number}.txt").open("w") as output:
                subprocess.run(
                    [sys.executable, "-m", "pytest", *given],
                    cwd=ROOT,
                    env=pauses.environment(seed, os.environ),
                    stdout=output,
                    stderr=output,
                )
            runs.append(read(log))
            counts = f"{len(runs[-1].passed)} passed, {len(runs[-1].failed)} failed"
            print(f"run {number} of {options.times}: {counts} in {time.monotonic() - begin:.0f} s", flush=True)
    text, is_red = report(runs)
    print(text)
    return int(is_red)


def report(runs: Sequence[Results]) -> tuple[str, bool]:
    """Summarize several runs of the same tests, and tell whether any of them had a failure."""
    failures: dict[str, list[str]] = {}
    for run in runs:
        for test, text in run.failed.items():
            failures.setdefault(test, []).append(text)
    cut = sum(not run.is_complete for run in runs)
    lines = [f"{cut} of {len(runs)} runs did not finish"] if cut else []
    for test, texts in sorted(failures.items(), key=lambda pair: -len(pair[1])):
        lines += [f"{len(texts)} of {len(runs)}  {test}", *(f"    {line}" for line in texts[0].splitlines()[-15:])]
    lines.append(f"{len(failures)} tests failed in {len(runs)} runs")
    return "\n".join(lines), bool(failures or cut)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run this many processes that each keep a core busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    sys.exit(main())
