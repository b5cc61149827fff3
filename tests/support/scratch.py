"""Where a test session writes: a directory of its own, and a mark in the environment of all that it starts.

Several pytest processes, and other programs of the machine, share ``/tmp`` and the user's home.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import uuid
from pathlib import Path

__all__ = ["MARK", "SCRATCH", "remove"]

SYSTEM_TMP = os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())

SCRATCH = Path(tempfile.mkdtemp(prefix="mk-", dir=SYSTEM_TMP))
"""Temporary files of this process. The name is short, since the path of a Unix socket has room for 107 bytes."""

MARK = uuid.uuid4().hex
"""Each process that this one starts has it in its environment, however its parents end."""

os.environ.update(
    MONARCH_KERNEL_TEST_MARK=MARK,
    TMPDIR=str(SCRATCH),
    IPYTHONDIR=str(SCRATCH / "ipython"),
    JUPYTER_RUNTIME_DIR=str(SCRATCH / "jupyter"),
    OMP_NUM_THREADS="1",
    # NIXL takes these for hardware, so that its path can be tried on a machine that has none.
    UCX_TLS="tcp,self",
    UCX_NET_DEVICES="lo",
)
tempfile.tempdir = None  # tempfile reads TMPDIR again

# Tests of interrupts expect SIGINT to arrive: a shell has its background jobs ignore it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def remove() -> None:
    """Remove the directory."""
    shutil.rmtree(SCRATCH, ignore_errors=True)
