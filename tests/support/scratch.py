"""The files of a test session: a separate directory, and a mark in the environment of all processes that it starts.

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
"""Directory for temporary files of this process. Its name is short, since the path of a Unix socket has room for 107 bytes."""

MARK = uuid.uuid4().hex
"""All descendants of this process have this mark in their environment, even after their parents have ended."""

os.environ.update(
    MONARCH_KERNEL_TEST_MARK=MARK,
    TMPDIR=str(SCRATCH),
    IPYTHONDIR=str(SCRATCH / "ipython"),
    JUPYTER_RUNTIME_DIR=str(SCRATCH / "jupyter"),
    OMP_NUM_THREADS="1",
    # NIXL takes these for hardware, so tests of its data path run on machines without any.
    UCX_TLS="tcp,self",
    UCX_NET_DEVICES="lo",
)
tempfile.tempdir = None  # tempfile reads TMPDIR again

# Tests of interrupts need SIGINT, which a shell makes its background jobs ignore.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def remove() -> None:
    """Remove the directory."""
    shutil.rmtree(SCRATCH, ignore_errors=True)
