"""The rank's part of debugging from an editor, with a debugger that only takes notes."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.features.debugging import dap_worker
from monarch_kernel.features.debugging.dap_messages import DapBytes, StartDap
from monarch_kernel.features.debugging.dap_worker import DapServer
from tests.support.waiting import wait_until


class Notes:
    """A debugger that is slow to leave."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.go_on = threading.Event()

    def attach(self, connection: socket.socket) -> None:
        self.connection = connection
        self.events.append("attached")

    def leave(self) -> None:
        self.events.append("leaves")
        self.go_on.wait()
        self.connection.close()
        self.events.append("left")


class FakeRank:
    """Knows the handlers of messages, and what was answered."""

    def __init__(self) -> None:
        self.handlers: dict[type, Any] = {}
        self.answered: list[int] = []
        self.spec = SimpleNamespace(proc=1)
        self.driver = SimpleNamespace(submit=lambda frames: None)

    def extend(self, handlers: dict[type, Any]) -> None:
        self.handlers = handlers

    def send_answer(self, id: int, frames: object) -> None:
        self.answered.append(id)

    def receive(self, message: StartDap | DapBytes) -> None:
        self.handlers[type(message)](message, ())


def test_a_debugger_is_served_when_the_former_one_has_left_entirely(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, rank = Notes(), FakeRank()
    monkeypatch.setattr(dap_worker, "_load", lambda rank: notes)
    DapServer(rank)  # type: ignore[arg-type]
    rank.receive(StartDap(1, 1))
    wait_until(lambda: rank.answered == [1], "the first session")
    rank.receive(DapBytes(1, 1, b""))
    wait_until(lambda: notes.events == ["attached", "leaves"], "the end of the first session")
    rank.receive(StartDap(2, 2))
    rank.receive(StartDap(3, 0))  # asks only whether debugpy is there, and waits for no session
    wait_until(lambda: 3 in rank.answered, "an answer")
    notes.go_on.set()
    wait_until(lambda: 2 in rank.answered, "the second session")
    wait_until(lambda: len(notes.events) > 3, "the debugger")
    rank.receive(DapBytes(1, 2, b""))
    wait_until(lambda: len(notes.events) == 6, "the end of the second session")
    assert notes.events == ["attached", "leaves", "left", "attached", "leaves", "left"]
