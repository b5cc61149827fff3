"""The view benchmark has a crowd of ranks that change state at each turn."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.view import CROWD, CROWDS
from tests.lab.conftest import ROOT

LOOKS = """
seen = []
for steps in range(3):
    runtime.run_on_io_thread(lambda: turn(time.monotonic()))
    seen.append([rank.state for rank in mesh.view().ranks])
print(len(seen[0]), *sorted(set(seen[0])), sum(map(str.__eq__, *seen[:2])), sum(map(str.__eq__, *seen[1:])))
"""


def test_all_ranks_change_with_each_turn() -> None:
    crowd = CROWDS.partition("threading.Thread")[0]
    run = subprocess.run([sys.executable, "-c", crowd + LOOKS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.split() == [str(CROWD), "failed", "idle", "running", "0", "0"], run.stderr
