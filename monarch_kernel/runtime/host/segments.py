"""Shared memory that torch and the CUDA driver leave in ``/dev/shm`` when a process that shares memory of a GPU is killed.

torch counts references to memory that it shares by CUDA IPC in a file ``torch_PID_RANDOM_NUMBER``, and the driver makes
``cuda.shm.UID.PID.NUMBER``, with numbers in hexadecimal. Both are removed only when the process ends by itself.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["remove_segments"]

SHARED_MEMORY = "/dev/shm"


def remove_segments(pid: int, since: float, directory: str = SHARED_MEMORY) -> None:
    """Remove what a process that has ended has left.

    Args:
        pid: of the process.
        since: when it started, in seconds since 1970: older files are of a process of another container that had this number.
        directory: where the files are.
    """
    prefixes = f"torch_{pid}_", f"cuda.shm.{os.getuid():x}.{pid:x}."
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            if entry.name.startswith(prefixes):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime >= since:
                        os.unlink(entry.path)
