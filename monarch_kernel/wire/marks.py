"""Numbers of the marks that a rank sets in its streams, which only grow."""

from __future__ import annotations

__all__ = ["FIRST_MARK", "is_display_mark", "switch_mark", "switched"]

FIRST_MARK = 1 << 40
"""More than any stream that was never marked has bytes."""


def is_display_mark(end: int) -> bool:
    """Whether a mark stands where something was displayed, which comes by another way: such marks are odd."""
    return FIRST_MARK <= end < _FIRST_SWITCH and bool(end & 1)


_FIRST_SWITCH = 1 << 52
_MAX_FD = 100_000


def switch_mark(request: int, fd: int) -> int:
    """The mark after which a pipe belongs to what ``request`` has left running; ``fd`` of the rank reads what comes next."""
    return _FIRST_SWITCH + request * _MAX_FD + fd


def switched(mark: int) -> tuple[int, int] | None:
    """The request and the file descriptor of a `switch_mark`; None of any other."""
    return divmod(mark - _FIRST_SWITCH, _MAX_FD) if mark >= _FIRST_SWITCH else None
