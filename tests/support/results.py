"""The results of a run of pytest, read from its report log (``--report-log``); for the tools that run pytest."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Results", "closing_line", "read"]


@dataclass
class Results:
    """The outcome of each test of a run.

    Attributes:
        passed: tests that passed.
        failed: test -> the text of its first failure, in any of its phases.
        skipped: test that was skipped -> the reason.
        own_s: test -> its own time, without shared fixtures, in seconds.
        seconds: test -> its time including set-up and end of the fixtures that it was the first to need, in seconds.
        is_complete: whether the run finished; if not, it was killed, or could not start.
    """

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    own_s: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    is_complete: bool = False

    def add(self, report: dict[str, object]) -> None:
        """Add one line of the log."""
        kind = report.get("$report_type")
        if kind == "SessionFinish":
            self.is_complete = True
        if kind not in ("TestReport", "CollectReport"):
            return
        test, outcome = str(report["nodeid"]), report["outcome"]
        properties = dict(report.get("user_properties") or ())  # type: ignore[call-overload]
        if outcome == "failed":
            self.failed.setdefault(test, str(properties.get("text") or _text_of(report)))
            self.passed.discard(test)
        if kind == "CollectReport":
            return
        self.seconds[test] += float(report["duration"])  # type: ignore[arg-type]
        if outcome == "skipped":
            self.skipped[test] = _text_of(report)
        elif outcome == "passed" and report["when"] == "call" and test not in self.failed:
            self.passed.add(test)
        if "own_s" in properties:
            self.own_s[test] = float(properties["own_s"])

    def by_module(self) -> dict[str, float]:
        """Module -> time of its tests, in seconds; the longest first."""
        total: dict[str, float] = defaultdict(float)
        for test, took_s in self.seconds.items():
            total[test.partition("::")[0]] += took_s
        return dict(sorted(total.items(), key=lambda pair: -pair[1]))


def read(path: Path) -> Results:
    """Read a log; a missing log means a run that did not start."""
    results = Results()
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                results.add(json.loads(line))
            except ValueError:  # the last line of a run that was killed
                break
    return results


def closing_line(runs: Iterable[Results], failed: int) -> str:
    """The last line of several runs together."""
    runs = list(runs)
    passed, skipped = sum(len(run.passed) for run in runs), sum(len(run.skipped) for run in runs)
    return f"{passed} passed, {failed} failed, {skipped} skipped"


def _text_of(report: dict[str, object]) -> str:
    """The text of a failure that pytest itself reports: a failed collection, or a crashed worker."""
    text = report.get("longrepr")
    if isinstance(text, dict):
        crash = text.get("reprcrash") or {}
        return str(crash.get("message") or text.get("longrepr") or text)
    return str(text)


def main() -> None:
    """Print the times of the modules of several runs: ``python -m tests.support.results build/tests/default.jsonl``."""
    import sys

    for name in sys.argv[1:]:
        results = read(Path(name))
        print(f"{name}: {sum(results.seconds.values()):.0f} s, {len(results.seconds)} tests")
        for module, took_s in results.by_module().items():
            print(f"{took_s:8.1f} s  {module}")


if __name__ == "__main__":
    main()
