"""``%mesh debug t[1] --dap``: an editor debugs a rank by the Debug Adapter Protocol, as VS Code does."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.kernel.conftest import Notebook
from tests.support.waiting import LONG_S, wait_until

MODULE = """import os, time

def step(number):
    doubled = number * 2
    return doubled + 1

def work(folder):
    number = 0
    while not os.path.exists(os.path.join(folder, "stop")):
        number = step(number) % 1000
        time.sleep(0.01)
    return "done"
"""
LINE = MODULE.splitlines().index("    return doubled + 1") + 1


class Editor:
    """What an editor sends and receives."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), LONG_S)
        self._file = self._socket.makefile("rb")
        self._count = 0
        self.events: list[dict[str, Any]] = []

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request, and wait for its response."""
        number = self.send(command, **arguments)
        while True:
            message = self.read()
            if message["type"] == "response" and message["request_seq"] == number:
                assert message["success"], message
                return dict(message.get("body") or {})

    def send(self, command: str, **arguments: Any) -> int:
        """Send a request."""
        self._count += 1
        body = json.dumps({"seq": self._count, "type": "request", "command": command, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        return self._count

    def event(self, name: str) -> dict[str, Any]:
        """Wait for an event."""
        while True:
            for event in self.events:
                if event["event"] == name:
                    self.events.remove(event)
                    return dict(event.get("body") or {})
            self.read()

    def read(self) -> dict[str, Any]:
        """Receive a message."""
        size = 0
        while line := self._file.readline().strip():
            size = int(line.removeprefix(b"Content-Length: "))
        if not size:
            raise EOFError("the rank has closed the connection")
        message: dict[str, Any] = json.loads(self._file.read(size))
        if message["type"] == "event":
            self.events.append(message)
        return message

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@contextmanager
def attached(port: int, path: Path, line: int) -> Iterator[Editor]:
    """An editor that has attached and set a breakpoint."""
    editor = Editor(port)
    try:
        editor.request("initialize", clientID="test", adapterID="debugpy", linesStartAt1=True, pathFormat="path")
        attach = editor.send("attach", justMyCode=False)
        editor.event("initialized")
        (found,) = editor.request("setBreakpoints", source={"path": str(path)}, breakpoints=[{"line": line}])[
            "breakpoints"
        ]
        assert found["verified"], found
        editor.request("configurationDone")
        assert attach
        yield editor
    finally:
        editor.close()


def port_of(notebook: Notebook, selector: str) -> int:
    text = notebook.ok(f"%mesh debug {selector} --dap").stdout
    found = re.search(r"t\[\d\] can be debugged at 127\.0\.0\.1:(\d+), by one program", text)
    assert found, text
    settings = json.loads(text.partition("launch.json: ")[2])
    assert settings["connect"] == {"host": "127.0.0.1", "port": int(found[1])}
    return int(found[1])


@pytest.mark.slow  # debugpy is imported, and traces the rank
def test_an_editor_stops_a_rank_at_a_breakpoint_and_reads_its_variables(bare: Notebook, tmp_path: Path) -> None:
    bare.up(2)
    module = tmp_path / "stepper.py"
    module.write_text(MODULE)
    bare.ok(f"%%remote t\nimport sys; sys.path.insert(0, {str(tmp_path)!r}); import stepper")
    bare.ok(f"%%remote t --background --out ends\nstepper.work({str(tmp_path)!r})")
    port = port_of(bare, "t[1]")
    assert port_of(bare, "t[1]") == port
    for _ in range(2):  # a second editor comes when the first has left, even without a word
        with attached(port, module, LINE) as editor:
            thread = editor.event("stopped")["threadId"]
            frames = editor.request("stackTrace", threadId=thread)["stackFrames"]
            assert (frames[0]["name"], frames[0]["line"]) == ("step", LINE)
            value = editor.request(
                "evaluate", expression="doubled - 2 * number", frameId=frames[0]["id"], context="watch"
            )
            assert value["result"] == "0"
            second = Editor(port)
            with pytest.raises((OSError, EOFError)):  # one program at a time
                second.request("initialize", adapterID="debugpy")
            second.close()
            assert bare.ok("%mesh stacks t[1]").stdout  # the rank answers while it stands
            editor.request("continue", threadId=thread)
            assert editor.event("stopped")["threadId"] == thread
    (tmp_path / "stop").touch()
    wait_until(
        lambda: bare.value("'ends' in globals() and getattr(ends, 'state', 'done')") in ("done", "finished"), "the end"
    )
    assert bare.ok("%%remote t\n1 + 1").ok
    bare.ok("%mesh down t")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 5)


@pytest.mark.slow  # ranks start
def test_a_rank_without_debugpy_says_what_to_install(bare: Notebook, tmp_path: Path) -> None:
    bare.up(2)
    bare.ok("%%remote t\nimport sys; sys.modules['debugpy'] = sys.modules['debugpy.server'] = None")
    refused = bare.run("%mesh debug t[0] --dap")
    assert "%mesh debug --dap: t[0]: this needs debugpy on the rank: pip install debugpy" in refused.text
    assert bare.ok("%%remote t\n1 + 1").ok
    bare.ok("%mesh down t")


@pytest.mark.slow  # ranks start
def test_a_dead_rank_cannot_be_debugged(bare: Notebook) -> None:
    bare.up(2)
    os.kill(bare.pids()[1], signal.SIGKILL)
    wait_until(lambda: bare.value("list(t.deaths())") == [1], "the end of the rank")
    assert "t[1] is dead; %mesh heal t puts a new process in its place" in bare.run("%mesh debug t[1] --dap").text
    bare.ok("%mesh down t")
