"""A timer on which one thread sleeps and which others set by one system call each, without a switch between threads."""

from __future__ import annotations

import ctypes
import os
import struct

__all__ = ["Alarm"]

_CLOCK_MONOTONIC = 1
_FLAGS = os.O_CLOEXEC
_NEVER = bytes(32)

# The standard library has it since Python 3.13. PyDLL keeps the GIL, as the calls do not block.
_libc = ctypes.PyDLL(None, use_errno=True)
_settime = _libc.timerfd_settime
_settime.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p]


class Alarm:
    """A timer of the Linux kernel (timerfd) on which one thread sleeps; if it expires earlier, the next sleep ends at once."""

    __slots__ = ("_fd",)

    def __init__(self) -> None:
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def set(self, delay_s: float) -> None:
        """Expire once after this time, instead of when it was set to before."""
        seconds, nanoseconds = divmod(max(1, int(delay_s * 1e9)), 10**9)  # all zero would stop it
        _settime(self._fd, 0, struct.pack("qqqq", 0, 0, seconds, nanoseconds), None)

    def stop(self) -> None:
        """Cancel the timer, even if it has expired unnoticed."""
        _settime(self._fd, 0, _NEVER, None)

    def sleep(self) -> None:
        """Return when the timer expires."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """Close the timer; no thread may be sleeping on it, or about to set it."""
        os.close(self._fd)
        self._fd = -1
