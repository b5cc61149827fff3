"""Handles, such as meshes and ports, and the `Client` that an unpickled handle sends its requests through.

Handles travel as numbers. A handle that is unpickled gets the `Client` of the answer that it came in (a controller may have
several), or else that of the process (a rank has one), or of the session of the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = ["PROCESS", "Handle", "client_for_unpickling", "opened_by", "opened_for"]


HandleT = TypeVar("HandleT", bound="Handle")


class Handle:
    """An object that means the same in every process, and that is its own copy."""

    def __copy__(self: HandleT) -> HandleT:
        return self

    def __deepcopy__(self: HandleT, memo: object) -> HandleT:
        return self


class ProcessContext:
    """The session of this process. Handles have no argument for it, so it is kept here, and only here.

    Attributes:
        client: Sends the requests of this process.
        proc: This process, as a mesh of one process.
        python: The interpreter that was chosen for this process; empty for that of its host.
        loops: The live loops that its code runs.
        checks: Compares replicas with other ranks in these loops.
        trajectories: Sends the samples that its code shows.
        program: Returns the client of the current session of a program; None without a session.
        host_mesh: Returns the machine as a mesh.
        program_mesh: Returns the process of a program as a mesh; starts its session if there is none.
    """

    def __init__(self) -> None:
        self.client: Any = None
        self.proc: Any = None
        self.python = ""
        self.loops: Any = None
        self.checks: Any = None
        self.trajectories: Any = None
        self.program: Callable[[], Any] = lambda: None
        self.host_mesh: Callable[[], Any] = lambda: None
        self.program_mesh: Callable[[], Any] = lambda: None


PROCESS = ProcessContext()
"""A rank sets it once, when it starts."""

_opening: ContextVar[Any] = ContextVar("monarch_kernel_opening", default=None)


@contextlib.contextmanager
def opened_for(client: Any) -> Iterator[None]:
    """Handles that are unpickled within belong to this `Client`; None is that of the process."""
    token = _opening.set(client)
    try:
        yield
    finally:
        _opening.reset(token)


def opened_by() -> Any:
    """The `Client` that `opened_for` names, or None."""
    return _opening.get()


def client_for_unpickling() -> Any:
    """The `Client` for a handle that is being unpickled.

    Raises:
        RuntimeError: This process belongs to no session.
    """
    client = _opening.get() or PROCESS.client or PROCESS.program()
    if client is None:
        raise RuntimeError(
            "a mesh, actor or port can be opened only in a process of its session: pass it as an argument, or return it"
        )
    return client
