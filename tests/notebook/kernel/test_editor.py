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

def count(n):
    number = 0
    for _ in range(n):
        number = step(number)
    return number
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


def imported(notebook: Notebook, folder: Path) -> Path:
    """A module that ranks have imported."""
    module = folder / "stepper.py"
    module.write_text(MODULE)
    load = "import sys; sys.modules.pop('stepper', None); sys.path.insert(0, {!r}); import stepper"
    notebook.ok(f"%%remote t\n{load.format(str(folder))}")
    return module


def stops_once(notebook: Notebook, editor: Editor, code: str) -> None:
    """Check that code stops at its breakpoint, and goes on when the editor says so."""
    cell = notebook.send(code)
    editor.request("continue", threadId=editor.event("stopped")["threadId"])
    assert cell.wait().ok, cell.text


@pytest.mark.slow  # debugpy is imported, and traces the rank
def test_an_interrupt_ends_a_cell_at_a_breakpoint_and_the_next_cell_stops_there_again(
    bare: Notebook, tmp_path: Path
) -> None:
    bare.up(2)
    module = imported(bare, tmp_path)
    with attached(port_of(bare, "t[1]"), module, LINE) as editor:
        stops_once(
            bare, editor, "%%remote t[1]\nstepper.count(1)"
        )  # the first cell, directly after the editor has come
        for code in ("stepper.count(1)", "stepper.count(10**9)"):
            cell = bare.send(f"%%remote t[1]\ntry:\n    {code}\nfinally:\n    left = True\nreached = True")
            thread = editor.event("stopped")["threadId"]
            bare.interrupt()
            assert "interrupted on [1]; its state is kept" in cell.wait().error
            editor.event("continued")
            editor.request("continue", threadId=thread)  # it comes late
            editor.request("next", threadId=thread)
            assert "breakpoints hold again" in editor.event("output")["output"]
            assert bare.ok("%%remote t[1]\nleft, 'reached' in globals()").text.count("(True, False)") == 1
            stops_once(bare, editor, "%%remote t[1]\nstepper.count(1)")
    bare.ok("%mesh down t")


@pytest.mark.slow  # debugpy is imported, and traces the rank
def test_an_interrupt_ends_a_cell_that_an_editor_has_stopped_at_an_exception(bare: Notebook, tmp_path: Path) -> None:
    bare.up(2)
    module = imported(bare, tmp_path)
    with attached(port_of(bare, "t[1]"), module, LINE) as editor:
        editor.request("setExceptionBreakpoints", filters=["raised", "uncaught", "userUnhandled"])
        cell = bare.send("%%remote t[1]\nimport os\nos.listdir('/none')")
        assert editor.event("stopped")["reason"] == "exception"
        bare.interrupt()
        assert "RemoteInterrupt: interrupted" in cell.wait().error
        assert not cell.stderr
        assert "2" in bare.ok("%%remote t[1]\n1 + 1").text
    bare.ok("%mesh down t")


@pytest.mark.slow  # debugpy is imported, and traces the rank
def test_an_interrupt_of_a_call_at_a_breakpoint_leaves_the_actor_usable(bare: Notebook, tmp_path: Path) -> None:
    bare.up(2)
    module = imported(bare, tmp_path)
    bare.ok(
        "from monarch_kernel.actor import Actor, endpoint\n"
        "class Stepper(Actor):\n"
        "    @endpoint\n"
        "    def count(self, n):\n"
        "        import stepper\n"
        "        return stepper.count(n)\n"
        "actors = t.spawn('stepper', Stepper)"
    )
    with attached(port_of(bare, "t[1]"), module, LINE) as editor:  # the actor is older than the session
        cell = bare.send("actors.count.call(1000).get()")
        editor.event("stopped")
        bare.interrupt()
        assert "RemoteInterrupt" in cell.wait().error
        editor.event("continued")
        stops_once(bare, editor, "actors.count.call(1).get()")
    bare.ok("%mesh down t")


@pytest.mark.slow  # debugpy is imported, and traces the rank
def test_an_editor_still_stops_a_rank_after_pdb(bare: Notebook, tmp_path: Path) -> None:
    bare.up(2)
    module = imported(bare, tmp_path)
    with attached(port_of(bare, "t[1]"), module, LINE) as editor:
        cell = bare.ok("%%remote t[1]\nbreakpoint()\n1")
        assert "PYDEV DEBUGGER WARNING" not in cell.stderr
        stops_once(bare, editor, "%%remote t[1]\nstepper.count(1)")
    bare.ok("%mesh down t")


@pytest.mark.slow  # debugpy is imported, and traces the rank
def test_a_rank_that_dies_at_a_breakpoint_ends_the_session_and_its_successor_can_be_debugged(
    bare: Notebook, tmp_path: Path
) -> None:
    bare.up(2)
    module = imported(bare, tmp_path)
    port = port_of(bare, "t[1]")
    with attached(port, module, LINE) as editor:
        pid = bare.pids()[1]
        cell = bare.send("%%remote t[1]\nstepper.count(1)")
        editor.event("stopped")
        os.kill(pid, signal.SIGKILL)
        assert "SIGKILL" in cell.wait().error
        with pytest.raises((OSError, EOFError)):
            editor.event("terminated")
    refused = bare.run("%mesh debug t[1] --dap")
    assert "%mesh debug --dap: t[1] is dead; %mesh heal t puts a new process in its place" in refused.text
    bare.ok("%mesh heal t")
    imported(bare, tmp_path)
    assert port_of(bare, "t[1]") == port
    with attached(port, module, LINE) as editor:
        stops_once(bare, editor, "%%remote t[1]\nstepper.count(1)")
    bare.ok("%mesh down t")


@pytest.mark.slow  # debugpy is imported, and traces the rank
def test_a_rank_goes_on_when_the_editor_vanishes_and_ends_while_one_is_there(bare: Notebook, tmp_path: Path) -> None:
    bare.up(2)
    module = imported(bare, tmp_path)
    port = port_of(bare, "t[1]")
    with attached(port, module, LINE) as editor:
        cell = bare.send("%%remote t[1]\nstepper.count(10)")
        editor.event("stopped")
    assert cell.wait().ok
    with attached(port, module, LINE) as editor:
        stops_once(bare, editor, "%%remote t[1]\nstepper.count(1)")
        cell = bare.send("%%remote t[1] --background\nstepper.count(1)")
        editor.event("stopped")
        assert bare.ok("%mesh restart t[1]").ok
        with pytest.raises((OSError, EOFError)):
            editor.event("terminated")
    imported(bare, tmp_path)
    with attached(port, module, LINE) as editor:
        cell = bare.send("%%remote t[1] --background\nstepper.count(1)")
        editor.event("stopped")
        bare.ok("%mesh down t")
        assert "was ended by %mesh down" in cell.wait_for(lambda cell: cell.error).error
