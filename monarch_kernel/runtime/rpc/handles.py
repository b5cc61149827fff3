"""Which asker a handle belongs to that is opened here: a mesh or port that came as an argument or as a result.

Handles travel as numbers. Where one is opened it is given the asker through which its requests go: that of the answer it came
in (a controller may have several), or else the one of the process (a rank has one).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = ["HOME", "Handle", "opened_by", "opened_for", "opener"]


HandleT = TypeVar("HandleT", bound="Handle")


class Handle:
    """What means the same wherever it is: a copy of it is itself."""

    def __copy__(self: HandleT) -> HandleT:
        return self

    def __deepcopy__(self: HandleT, memo: object) -> HandleT:
        return self


class _Home:
    """What this process is to a session: what a handle means needs no argument, so it is kept here, and only here.

    Attributes:
        asker: carries its requests.
        place: itself, as a mesh of one process.
        loops: that its code is in, where they can be steered from elsewhere.
    """

    def __init__(self) -> None:
        self.asker: Any = None
        self.place: Any = None
        self.loops: Any = None


HOME = _Home()
"""Set once, by a rank when it starts."""

_opening: ContextVar[Any] = ContextVar("monarch_kernel_opening", default=None)


@contextlib.contextmanager
def opened_for(asker: Any) -> Iterator[None]:
    """Handles that are unpickled within belong to this `Asker`; None stands for that of the process."""
    token = _opening.set(asker)
    try:
        yield
    finally:
        _opening.reset(token)


def opened_by() -> Any:
    """The `Asker` that `opened_for` names, or None."""
    return _opening.get()


def opener() -> Any:
    """The `Asker` for a handle that is being unpickled.

    Raises:
        RuntimeError: this process belongs to no session.
    """
    asker = _opening.get() or HOME.asker
    if asker is None:
        raise RuntimeError(
            "a mesh, actor or port can be opened only in a process of its session: pass it as an argument, or return it"
        )
    return asker
