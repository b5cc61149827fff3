"""Another user of the machine: runs programs as nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["NOBODY", "run_as_nobody", "started_as_nobody"]

NOBODY = 65534
"""The uid and gid of nobody."""

# The interpreter and the imports may be in a directory that nobody can't read.
_BECOME_NOBODY = f"""
import encodings.idna, os, select, socket, struct, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""


@contextmanager
def started_as_nobody(code: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Context in which a program of nobody runs; it is killed at the end."""
    if os.getuid() != 0:
        pytest.skip("only root can run a program as another user")
    with subprocess.Popen(
        [sys.executable, "-I", "-c", _BECOME_NOBODY + code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    ) as program:
        try:
            yield program
        finally:
            program.kill()


def run_as_nobody(code: str, *args: object) -> str:
    """Run a program as nobody, and return what it prints."""
    with started_as_nobody(code, *args) as program:
        output, _ = program.communicate(timeout=60)
    assert program.returncode == 0, output
    return output
