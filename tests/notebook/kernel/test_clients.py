"""Another process looks at the meshes of a kernel and changes them, also while a cell runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.notebook.clients import connection
from monarch_kernel.notebook.clients.actions import control_loop, ranks_of, show_mesh
from monarch_kernel.notebook.clients.connection import Connection, connect
from monarch_kernel.notebook.clients.kernels import ClientError, read_file
from tests.notebook.kernel.conftest import Notebook
from tests.notebook.kernel.test_loops import TRAINS
from tests.support.waiting import wait_until

WAITS = """
import os, time
print("hello from", rank, flush=True)
while not os.path.exists({path!r}): time.sleep(0.01)
"""


@pytest.fixture
def client(notebook: Notebook) -> Iterator[Connection]:
    with Connection(read_file(Path(notebook.manager.connection_file)), answer_s=60.0) as client:
        yield client


def mesh_command(notebook: Notebook, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = notebook.manager.connection_file
    command = [sys.executable, "-m", "monarch_kernel", "mesh", *arguments, "--kernel", file]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_a_client_sees_and_changes_a_loop_while_a_cell_runs_in_the_kernel(
    notebook: Notebook, client: Connection
) -> None:
    notebook.ok(f"%%remote t --background --out done\n{TRAINS}")
    busy = notebook.send("import time\nfor _ in range(60_000): time.sleep(0.01)")
    wait_until(lambda: client_sees_steps(notebook), "the loop to start")
    mesh = client.mesh("t")
    (loop,) = [each for each in mesh["loops"] if each["state"] == "running"]
    assert {knob["name"]: knob["value"] for knob in loop["knobs"]} == {"lr": 0.1, "mode": "a"}
    assert "loss" in mesh["curves"]["loops"][-1]["curves"]
    changed = control_loop(client, "t", ["lr=0.25"])
    step = re.fullmatch("lr is 0.25 from step ([0-9,]+) on", changed)
    assert step is not None, changed
    wait_until(lambda: client_sees_steps(notebook, int(step[1].replace(",", ""))), "the loop to get the knob")
    with pytest.raises(ClientError, match="knob 'lr' is at least 0 and at most 1, not 7"):
        control_loop(client, "t", ["lr=7"])
    with pytest.raises(ClientError, match="mesh loop: 'faster' is neither one of"):
        control_loop(client, "t", ["faster"])
    assert client.ask("profile", "t", count=2, seconds=20.0).startswith("t: 2 steps of live.loop on 2 ranks")
    assert "live.loop" in client.ask("stacks", "t") or "time.sleep" in client.ask("stacks", "t")
    assert control_loop(client, "t", ["stop"]).startswith("the loop ends before step ")
    assert not busy.reply
    notebook.interrupt()
    busy.wait()
    wait_until(lambda: notebook.value("'done' in globals()"), "the cell to be over")
    assert [last for _, last in notebook.value("list(getattr(done, 'result', lambda: done)().values())")] == [
        (0.25, "a")
    ] * 2
    notebook.ok("del done")
    with pytest.raises(ClientError, match="t runs no live loop"):
        control_loop(client, "t", ["pause"])


def client_sees_steps(notebook: Notebook, after: int = 3) -> bool:
    with Connection(read_file(Path(notebook.manager.connection_file)), answer_s=60.0) as client:
        return any(
            loop.get("step", 0) > after for loop in client.mesh("t").get("loops", ()) if loop["state"] == "running"
        )


def test_the_command_line_prints_meshes_logs_and_reasons_as_json(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok("%%remote t\nprint('hello from', rank)")
    listed = json.loads(mesh_command(notebook, "list", "--json").stdout)
    (kernel,) = listed["kernels"]
    assert kernel["kernel"] == os.path.abspath(notebook.manager.connection_file)
    (mesh,) = [each for each in kernel["meshes"] if each["name"] == "t"]
    assert (mesh["axes"], mesh["counts"], listed["problems"]) == ([["gpus", 2]], {"idle": 2}, [])
    logs = json.loads(mesh_command(notebook, "logs", "t[1]", "--json").stdout)
    assert (logs["mesh"], logs["ranks"], logs["command"]) == ("t", [1], "logs")
    assert "hello from 1" in logs["text"]
    assert "hello from 0" not in logs["text"]
    shown = mesh_command(notebook, "show", "t[1]").stdout
    assert shown.startswith("t[1]: gpus=2, 1 idle, ")
    refused = mesh_command(notebook, "show", "u", "--json")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("monarch_kernel: error: there is no mesh 'u' in ")
    assert refused.stderr.endswith("; meshes: t\n")


def test_a_client_interrupts_a_cell_and_says_what_it_has_no_answer_for(
    notebook: Notebook, client: Connection, tmp_path: Path
) -> None:
    cell = notebook.send(f"%%remote t\n{WAITS.format(path=str(tmp_path / 'never'))}")
    wait_until(lambda: all(rank["state"] == "running" for rank in ranks(client)), "both ranks to run")
    client.ask("interrupt", "t", ranks=[0, 1], abort=False)
    cell.wait()
    assert cell.ename == "RemoteInterrupt"
    assert ranks_of(client, "t[0:2]") == [0, 1]
    shown = show_mesh(client, "t[1]")
    assert [rank["rank"] for rank in shown["ranks"]] == shown["selected"] == [1]
    assert sum(shown["counts"].values()) == 1
    with pytest.raises(ClientError, match=r"t\[9\]: write ranks of t as 0,2 or 1-3 or 0:4, from 0 to 1"):
        show_mesh(client, "t[9]")
    with pytest.raises(
        ClientError, match=r"t\[0\]: a loop is controlled on all of its ranks together; write t, without"
    ):
        control_loop(client, "t[0]", ["pause"])
    with pytest.raises(ClientError, match=r"t\[5\]: write ranks of t as 0,2 or 1-3 or 0:4, from 0 to 1"):
        ranks_of(client, "t[5]")
    with pytest.raises(ClientError, match="t has no ranks"):
        client.ask("stacks", "t", ranks=[7])
    with pytest.raises(ClientError, match="t runs nothing: start a cell"):
        client.ask("profile", "t")
    with pytest.raises(ClientError, match="must be a number of seconds"):
        client.ask("profile", "t", seconds="soon")
    with pytest.raises(ClientError, match="profile t: seconds must be a finite number, not nan"):
        client.ask("profile", "t", seconds=float("nan"))
    for command in ("logs", "profile"):
        with pytest.raises(ClientError, match="the number of steps or lines must be 1 or more, not 0"):
            client.ask(command, "t", count=0)
    with pytest.raises(ClientError, match="seconds must be above 0"):
        client.ask("profile", "t", seconds=-1.0)
    assert client.ask("record").startswith("no record runs")


def ranks(client: Connection) -> list[dict[str, Any]]:
    with Connection(client.file, answer_s=60.0) as other:
        return list(other.mesh("t")["ranks"])


def test_without_the_key_a_client_gets_nothing(notebook: Notebook, tmp_path: Path) -> None:
    about = json.loads(Path(notebook.manager.connection_file).read_text())
    copy = tmp_path / "kernel-copy.json"
    copy.write_text(json.dumps({**about, "key": "wrong"}))
    copy.chmod(0o600)
    with pytest.raises(ClientError, match="does not answer"):
        Connection(read_file(copy), answer_s=1.5)
    assert notebook.ok("1").ok


def test_a_kernel_that_is_stopped_is_reported(notebook: Notebook) -> None:
    os.kill(notebook.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ClientError, match="does not answer: it has hung in native code, or it is stopped"):
            Connection(read_file(Path(notebook.manager.connection_file)), answer_s=1.0)
    finally:
        os.kill(notebook.pid, signal.SIGCONT)
    assert notebook.ok("1").ok


class Ending(Connection):
    """A connection to a kernel that has ended since it answered."""

    def meshes(self) -> list[dict[str, Any]]:
        raise ClientError(f"the kernel {self.file.path} has ended")


def test_a_kernel_that_ends_meanwhile_prevents_no_command_to_another(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = read_file(Path(notebook.manager.connection_file))

    def found(*arguments: object) -> tuple[list[Connection], list[str]]:
        return [Ending(file, answer_s=60.0), Connection(file, answer_s=60.0)], []

    monkeypatch.setattr(connection, "connect_all", found)
    with connect("", "t") as kernel:
        assert kernel.ask("record").startswith("no record runs")
    with pytest.raises(ClientError, match=r"there is no mesh 'u' in .*; meshes: t; the kernel .* has ended"):
        connect("", "u")


@pytest.mark.slow  # waits until it is clear that a kernel does not answer, which takes 10 s
def test_a_kernel_that_does_not_answer_prevents_no_command_to_another(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    about = json.loads(Path(notebook.manager.connection_file).read_text())
    for id, key in (("good", about["key"]), ("silent", "wrong")):
        path = tmp_path / f"kernel-{id}.json"
        path.write_text(json.dumps({**about, "key": key, "jupyter_session": ""}))
        path.chmod(0o600)
    with connect("", "t") as kernel:
        assert kernel.file.id == "good"
        assert kernel.ask("record").startswith("no record runs")
    with pytest.raises(ClientError) as refused:
        connect("", "u")
    text = str(refused.value)
    assert text.startswith(f"there is no mesh 'u' in {tmp_path}/kernel-good.json; meshes: t; ")
    assert f"the kernel {tmp_path}/kernel-silent.json does not answer: it has hung in native code" in text
