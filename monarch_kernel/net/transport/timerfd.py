"""An alarm clock: one thread sleeps until the time that others have set, and these pay a system call each, no hand-over."""

from __future__ import annotations

import ctypes
import os
import struct

__all__ = ["Alarm"]

_CLOCK_MONOTONIC = 1
_FLAGS = os.O_CLOEXEC
_NEVER = bytes(32)

# The standard library has it from Python 3.13 on. A call that does not block needs not let go of the interpreter.
_libc = ctypes.PyDLL(None, use_errno=True)
_settime = _libc.timerfd_settime
_settime.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p]


class Alarm:
    """A timer of the Linux kernel that one thread sleeps on; what goes off when nobody sleeps ends the next sleep."""

    __slots__ = ("_fd",)

    def __init__(self) -> None:
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def set(self, delay_s: float) -> None:
        """Go off after this long, once, and not when it was set to before."""
        seconds, nanoseconds = divmod(max(1, int(delay_s * 1e9)), 10**9)  # all zero would stop it
        _settime(self._fd, 0, struct.pack("qqqq", 0, 0, seconds, nanoseconds), None)

    def stop(self) -> None:
        """Do not go off, also if that was not noticed yet."""
        _settime(self._fd, 0, _NEVER, None)

    def sleep(self) -> None:
        """Return when it goes off."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """Go off no more; nobody may be sleeping, or about to set it."""
        os.close(self._fd)
        self._fd = -1
