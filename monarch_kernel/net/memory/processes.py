"""Other processes of this machine: opens a descriptor of one that may have ended, and tells whether one is ending."""

from __future__ import annotations

import errno
import os

__all__ = ["is_ending", "open_pidfd"]


def open_pidfd(pid: int) -> int:
    """Return a descriptor of a process, for `os.waitid`, `select.poll` and `signal.pidfd_send_signal`.

    Raises:
        ProcessLookupError: no process has this pid.
        OSError: the Linux kernel gives no descriptor for another reason, such as a limit or a seccomp profile.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        # For a pid that a thread has now, Linux reports ENOENT, and before 6.16 EINVAL. Older versions also report EINVAL
        # while another process reaps the one that has ended.
        if error.errno in (errno.EINVAL, errno.ENOENT):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
        raise


def is_ending(pid: int) -> bool:
    """Whether a process has ended or is ending, which means that it has freed its memory.

    From then on Linux lets only root open the files of the process, as if it belonged to another user.
    """
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return file.read().split()[:1] == [b"0"]
    except OSError:
        return True
