"""Check that no test of the default tier is too slow for it: ``make test-all``, on an idle machine.

The tests that took more than `LIMIT_S`, shared fixtures excluded, in the last run are run once more, alone. Those that take as
long again are printed and fail the check; they belong to the slow tier.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.results import Results, read
from tests.support.tiers import LIMIT_S, is_too_slow

__all__ = ["too_slow"]

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "build" / "tests"


def main() -> int:
    suspects = too_slow(read(LOGS / "default.jsonl"))
    if not suspects:
        return 0
    log = LOGS / "limit.jsonl"
    log.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "pytest", "-q", f"--report-log={log}", *suspects], cwd=ROOT)
    again = read(log)
    twice = {test: again.own_s[test] for test in too_slow(again)}
    for test, own_s in twice.items():
        print(f"{own_s:.1f} s, twice over {LIMIT_S:g} s: {test} belongs to the slow tier")
    return int(bool(twice) or not again.is_complete)


def too_slow(results: Results) -> list[str]:
    """The tests that took more than the default tier allows."""
    return [test for test, own_s in results.own_s.items() if is_too_slow(test, own_s)]


if __name__ == "__main__":
    sys.exit(main())
