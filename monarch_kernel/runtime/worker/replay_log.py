"""Records of a rank for the next controller: the requests that it received, and its answers to cells.

A message to a controller that has just ended is lost. So a rank of a mesh that may outlive its controller keeps the answer
to a cell until a message says that the answers of all ranks have arrived (`Forget`). Answers to other requests (calls, pulls,
code that a program runs) are useless to another controller, because its program did not make them.

The rank also writes what it runs to a file. A kernel that lists the meshes can read it without being their controller.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from typing import NamedTuple

from monarch_kernel.net.wire.codec import Packed
from monarch_kernel.net.wire.config import DETACHED
from monarch_kernel.net.wire.messages import (
    Apply,
    Call,
    FormGroup,
    HostStore,
    Message,
    OpenRequest,
    Pull,
    Push,
    Run,
    Spawn,
    StopActor,
)
from monarch_kernel.runtime.host.processes import start_ticks

__all__ = ["RICH_NBYTES", "ReplayLog"]

RICH_NBYTES = 4 << 20
"""How many bytes of displays (figures) are kept while there is no controller; the latest."""


class _Noted(NamedTuple):
    """A request: when it arrived, its number if it is a cell, and whether it is code, which the file describes."""

    description: str
    at: float
    cell: int | None
    is_code: bool


class ReplayLog:
    """The log of one rank; for the I/O thread, and for threads that answer.

    Args:
        path: The file that says what the rank runs.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._started = start_ticks(os.getpid())  # distinguishes this process from a later one with the same pid
        self._detached = os.path.join(os.path.dirname(path), DETACHED)
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._open_requests: dict[int, _Noted] = {}
        self._cells: dict[int, _Noted] = {}  # cells without a Forget so far
        self._answers: dict[int, Packed] = {}
        self._rich: deque[Packed] = deque()
        self._rich_nbytes = 0
        self._actors: dict[int, str] = {}
        self._write()

    def take(self, message: Message) -> None:
        """Record a request that has arrived."""
        id = getattr(message, "id", 0)
        description = self._description(message)
        if not id or not description:
            return
        is_code = isinstance(message, Run)
        open_requests = _Noted(
            description, time.monotonic(), (message.cell or None) if isinstance(message, Run) else None, is_code
        )
        with self._lock:
            self._open_requests[id] = open_requests
            if open_requests.cell is not None:
                self._cells[id] = open_requests
        if is_code:
            self._write()

    def answered(self, id: int, packed: Packed) -> None:
        """Record an answer; that to a cell is kept."""
        with self._lock:
            open_requests = self._open_requests.pop(id, None)
            if id in self._cells:
                self._answers[id] = packed
        if open_requests is not None and open_requests.is_code:
            self._write()

    def forget(self, id: int) -> None:
        """Drop an answer that has arrived."""
        with self._lock:
            self._cells.pop(id, None)
            self._answers.pop(id, None)

    @property
    def is_detached(self) -> bool:
        """Whether there is no controller now, according to the host agent."""
        return os.path.exists(self._detached)

    def displayed(self, packed: Packed) -> bool:
        """Keep a display if there is no controller now; returns whether it was kept."""
        if not self.is_detached:
            return False
        with self._lock:
            self._rich.append(packed)
            self._rich_nbytes += len(packed.header)
            while self._rich_nbytes > RICH_NBYTES and len(self._rich) > 1:
                self._rich_nbytes -= len(self._rich.popleft().header)
        return True

    def attach(self) -> tuple[tuple[OpenRequest, ...], list[Packed]]:
        """Return the open requests for a new controller, and the displays and answers since the last one."""
        with self._lock:
            now = time.monotonic()
            open_requests = [
                OpenRequest(id, self._cells[id].description, now - self._cells[id].at, self._cells[id].cell)
                for id in self._answers
            ]
            for id, one in self._open_requests.items():
                open_requests.append(
                    OpenRequest(id, one.description, now - one.at, one.cell if id in self._cells else None)
                )
            packed = [*self._rich, *self._answers.values()]
            self._rich.clear()
            self._rich_nbytes = 0
        return tuple(open_requests), packed

    def _description(self, message: Message) -> str:
        """The description of a request, in the user's words."""
        if isinstance(message, Run):
            return f"cell [{message.cell}]" if message.cell else "code"
        if isinstance(message, Call):
            return f"{self._actors.get(message.actor, 'actor')}.{message.method}"
        if isinstance(message, Spawn):
            self._actors[message.actor] = message.name
            return f"{message.name}.__init__"
        if isinstance(message, StopActor):
            return f"{self._actors.get(message.actor, 'actor')}.stop"
        if isinstance(message, (Push, Pull)):
            return f"{type(message).__name__.lower()} {message.name!r}"
        if isinstance(message, Apply):
            return "a function"
        return "forming the process group" if isinstance(message, (FormGroup, HostStore)) else ""

    def _write(self) -> None:
        draft = f"{self._path}.new"
        with self._writing, contextlib.suppress(OSError):  # the directory is removed before the ranks end
            runs = next((one.description for one in list(self._open_requests.values()) if one.is_code), "")
            with open(draft, "w", opener=_private) as file:
                json.dump({"pid": os.getpid(), "started": self._started, "runs": runs}, file)
            os.replace(draft, self._path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
