"""A page that shows meshes, reduced to the messages that it exchanges with the kernel."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from monarch_kernel.notebook.magics.viewers import TARGET
from tests.notebook.kernel.conftest import Notebook

__all__ = ["Page"]

DEADLINE_S = 60.0


class Page:
    """A page that shows meshes: a panel, or with a ``widget`` the view in a cell.

    Attributes:
        frames: received frames, in order.
        history: throughput history, by mesh.
        curves: curves of loops, by mesh.
        replies: replies to commands, by number.
    """

    def __init__(self, notebook: Notebook, channel: str = "control", widget: str = "") -> None:
        self.notebook = notebook
        self.comm = widget or uuid.uuid4().hex
        self.is_widget = bool(widget)
        self.channel = channel
        self.frames: list[dict[str, Any]] = []
        self.history: dict[str, Any] = {}
        self.curves: dict[str, Any] = {}
        self.replies: dict[int, dict[str, Any]] = {}
        notebook.on_message = self._handle
        if not self.is_widget:
            notebook.on_forget.append(self.close)
        if self.is_widget:
            self.say(kind="hello")
        else:
            self._send("comm_open", comm_id=self.comm, target_name=TARGET, data={})

    def _send(self, kind: str, **content: Any) -> None:
        client = self.notebook.client
        channel = client.control_channel if self.channel == "control" else client.shell_channel
        channel.send(client.session.msg(kind, content))

    def say(self, **message: Any) -> None:
        data = {"method": "custom", "content": message} if self.is_widget else message
        self._send("comm_msg", comm_id=self.comm, data=data)

    def ask(self, command: str, mesh: str = "t", **more: Any) -> dict[str, Any]:
        """Send a command, and wait for the reply."""
        id = len(self.replies) + 1
        self.say(kind="command", id=id, command=command, mesh=mesh, **more)
        self.wait(lambda: id in self.replies)
        return self.replies[id]

    def close(self) -> None:
        self._send("comm_close", comm_id=self.comm, data={})

    def _handle(self, message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] != "comm_msg" or content["comm_id"] != self.comm:
            return
        data = content["data"].get("content") if self.is_widget else content["data"]
        if data is None:  # a change of a trait of the widget
            return
        if data["kind"] == "frame":
            self.frames.append(data)
        elif data["kind"] == "history":
            self.history = data["meshes"]
        elif data["kind"] == "curves":
            self.curves[data["mesh"]] = data["loops"]
        elif data["kind"] == "reply":
            self.replies[data["id"]] = data

    def wait(self, condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (self.frames[-1:], self.replies)
            self.notebook.pump(0.02)

    def mesh(self, name: str = "t") -> dict[str, Any]:
        """The mesh in the last frame."""
        found = [mesh for frame in self.frames[-1:] for mesh in frame.get("meshes", ()) if mesh["name"] == name]
        return found[0] if found else {}

    def states(self, name: str = "t") -> list[str]:
        return [rank["state"] for rank in self.mesh(name).get("ranks", ())]

    def wait_states(self, *states: str, timeout_s: float = DEADLINE_S) -> None:
        self.wait(lambda: self.states() == list(states), timeout_s)
