"""Short random pauses in every Python process of a test run, to find races: ``make test-repeat PAUSES=SEED``.

This folder is put at the front of ``PYTHONPATH``, so the interpreter imports `sitecustomize.py` from it in each process that
tests start: kernels, agents, zygotes, ranks and their children. It needs the standard library alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.support.pauses.random_pauses import VARIABLE

__all__ = ["environment"]


def environment(seed: str, of: Mapping[str, str]) -> dict[str, str]:
    """Give the environment of a process that makes random pauses, as do all that it starts; without a seed, the given one."""
    if not seed:
        return dict(of)
    folders = [str(Path(__file__).parent), *filter(None, [of.get("PYTHONPATH")])]
    return {**of, VARIABLE: seed, "PYTHONPATH": os.pathsep.join(folders)}
