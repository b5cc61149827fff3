"""A feature registers itself, with its own messages on both sides; no file of the package mentions it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOLD = """{0: 'yes to lunch', 1: 'yes to lunch'}
[1, 2]
True
"""


def test_a_feature_in_one_file_takes_part_in_a_session() -> None:
    # In a separate process, because a feature stays registered.
    command = [sys.executable, "-c", "from tests.features import toy; toy.main()"]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert run.stdout == TOLD, run.stderr
