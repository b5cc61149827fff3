"""The control channel and subshells of a notebook's kernel, as JupyterLab uses them."""

from __future__ import annotations

import time

from tests.notebook.kernel.conftest import Cell, Notebook

__all__ = ["in_control", "send_to"]


def in_control(notebook: Notebook, kind: str, **content: str) -> dict[str, object]:
    """Make a request on the control channel, and wait for the reply."""
    message = notebook.client.session.msg(kind, content)
    notebook.client.control_channel.send(message)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        reply = notebook.client.control_channel.get_msg(timeout=20)
        if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
            content = reply["content"]
            return dict(content)
    raise AssertionError("no reply")


def send_to(notebook: Notebook, subshell: str, code: str) -> Cell:
    """Send a cell to a subshell, as a console that JupyterLab attaches to a notebook does."""
    content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
    message = notebook.client.session.msg("execute_request", content)
    message["header"]["subshell_id"] = subshell
    notebook.client.shell_channel.send(message)
    cell = notebook.cells[message["header"]["msg_id"]] = Cell(notebook, message["header"]["msg_id"])
    return cell
