"""Progress bars in a notebook, and the messages that a Jupyter server lets through during floods of output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pexpect
import pytest
import websocket

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Cell, Notebook

pytestmark = pytest.mark.timeout(120)

# Like tqdm: to stderr, a carriage return first, padded, and a newline at the end.
BAR = """
import sys, time
def bar(n, delay, desc="", end="\\n"):
    for i in range(n + 1):
        percent = 100 * i // n
        rate = 10 + i % 7 + rank / 10
        sys.stderr.write(f"\\r{desc}{percent:3}%|{'#' * (percent // 10):10}| {i}/{n} [{rate:.2f}it/s]"); sys.stderr.flush()
        time.sleep(delay)
    sys.stderr.write(end); sys.stderr.flush()
"""


def blocks(cell: Cell) -> list[str]:
    """The last states of a cell's displays, as in a saved notebook."""
    texts: dict[str, str] = {}
    for message in cell.of_type("display_data", "update_display_data"):
        content = message["content"]
        id = content["transient"].get("display_id", "")
        if message["msg_type"] == "display_data" or id in texts:
            texts[id] = content["data"]["text/plain"]
    return list(texts.values())


def test_a_bar_is_live_in_one_line_and_ends_in_one(four: Notebook) -> None:
    four.ok(f"%%remote\n{BAR}")
    cell = four.send("%%remote\nbar(50, 0.03 + 0.01 * rank)\nprint('done')")
    cell.wait()
    assert cell.ok
    states = [m["content"]["data"].get("text/plain", "") for m in cell.of_type("display_data", "update_display_data")]
    assert any(re.match(r"\[0-3\]  [2-8]\d%", state) for state in states), states
    (block,) = blocks(cell)
    assert re.fullmatch(r"\[0-3\] 100%\|##########\| 50/50 \[\d+\.\d\dit/s\]", block)
    assert cell.stderr == ""
    assert cell.lines() == {rank: ["done"] for rank in range(4)}
    updates = cell.of_type("update_display_data")
    assert 3 < len(updates) < 20 * cell.elapsed_s, "5 a second, and as many of the mesh's table"


def test_an_interrupted_bar_stays_in_its_last_state(four: Notebook) -> None:
    four.ok(f"%%remote\n{BAR}")
    cell = four.send("%%remote\nbar(1000, 0.02)")
    cell.wait_for(lambda cell: any(block.startswith("[0-3]") for block in blocks(cell)))
    four.interrupt()
    cell.wait()
    assert cell.ename == "RemoteInterrupt"
    (block,) = blocks(cell)
    assert re.match(r"\[0-3\]  +\d+%\|", block)


UNEVEN = """
import time
import torch.distributed as dist
from {module} import tqdm
dist.barrier()
for _ in tqdm(iter(range(10 + 5 * rank)), desc="rows", unit=" examples"): time.sleep(0.03)
bar = tqdm(range(10))
for i in bar:
    bar.set_description(f"loss {{1 / (1 + i + rank):.4f}}", refresh=False)
    time.sleep(0.03 * (1 + rank))
"""


@pytest.mark.parametrize("module", ["tqdm", "tqdm.notebook"])
def test_bars_of_ranks_that_are_not_equally_far_are_one_line_each(four: Notebook, module: str) -> None:
    cell = four.run(f"%%remote\n{UNEVEN.format(module=module)}")
    assert cell.ok
    rows, loss = blocks(cell)[-1].splitlines()
    assert re.match(r"\[0-3\] rows: 10 examples \[", rows)
    assert rows.endswith("(fewest: [0], most: [3] 25 examples)")
    assert re.match(r"\[0-3\] loss \d\.\d{4}: 100%\|", loss)
    assert cell.stderr == cell.stdout == ""


@pytest.mark.slow
def test_a_terminal_rewrites_its_last_line(tmp_path: Path) -> None:
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path), "TERM": "xterm", "COLUMNS": "120"}
    command = ["-m", "IPython", "--simple-prompt", "--colors=nocolor"]
    shell = pexpect.spawn(sys.executable, command, env=environment, encoding="utf-8", timeout=60, dimensions=(40, 120))
    try:
        shell.expect("In .1.: ")
        shell.sendline("%load_ext monarch_kernel")
        shell.expect("In .2.: ")
        shell.sendline("%mesh up t -n 2 --device cpu")
        shell.expect("In .3.: ")
        code = f"{BAR}\nbar(30, 0.03)\nprint('done')"
        shell.sendline(f"get_ipython().run_cell_magic('remote', '', {code!r})")
        shell.expect(r"\[0-1\]  +\d+%\|")
        shell.expect("\x1b\\[1A\r\x1b\\[J")
        shell.expect(r"\[0-1\] done")
        shell.expect("In .4.: ")
        assert shell.before.count("100%") == 1, "the last state stays"
        shell.sendline("exit")
        shell.expect(pexpect.EOF)
    finally:
        shell.close(force=True)


def _url_in(directory: Path) -> str:
    """The URL of the server that writes to this directory; empty until the server has written it completely."""
    for file in directory.glob("jpserver-*.json"):
        with suppress(ValueError):
            return str(json.loads(file.read_text())["url"]).rstrip("/")
    return ""


class Server:
    """A Jupyter server with one kernel, as a browser sees it."""

    def __init__(self, directory: Path) -> None:
        self._token = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jupyter_server",
                f"--ServerApp.root_dir={directory}",
                f"--IdentityProvider.token={self._token}",
                "--ServerApp.open_browser=False",
                "--ServerApp.port=0",
                "--ServerApp.allow_root=True",
            ],
            env={**os.environ, "JUPYTER_CONFIG_DIR": str(directory), "JUPYTER_RUNTIME_DIR": str(directory)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while not (url := _url_in(directory)):
            assert time.monotonic() < deadline
            assert self._process.poll() is None
            time.sleep(0.05)
        self._url = url
        while True:
            try:
                self._kernel = self._ask("POST", "/api/kernels", {"name": "monarch"})["id"]
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        address = self._url.replace("http", "ws", 1)
        self._socket = websocket.create_connection(
            f"{address}/api/kernels/{self._kernel}/channels?token={self._token}", timeout=100
        )

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, method=method)
        request.add_header("Authorization", f"token {self._token}")
        with urllib.request.urlopen(request, timeout=60) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def run(self, code: str) -> list[dict[str, Any]]:
        """Run a cell; gives all the messages that it shows."""
        id = uuid.uuid4().hex
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        header = {"msg_id": id, "msg_type": "execute_request", "session": id, "username": "", "version": "5.3"}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        self._socket.send(json.dumps(message))
        shown: list[dict[str, Any]] = []
        while True:
            message = json.loads(self._socket.recv())
            if message["parent_header"].get("msg_id") != id or message["channel"] != "iopub":
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return shown
            shown.append(message)

    def close(self) -> None:
        self._socket.close()
        self._ask("DELETE", f"/api/kernels/{self._kernel}")
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


FLOODS = {
    "lines": "for i in range(60_000): print('some text', rank, i)",
    "long lines": "for i in range(1_000): print(str(i) * 10_000)",
    "displays": "for i in range(2_000): display(HTML(f'{rank} {i}' * 1_000))",
    "updates": "h = display('x', display_id=True)\nfor i in range(4_000): h.update(f'{rank} {i}')",
    "bars": "for i in range(60_000): print(f'\\r{i / 600:.0f}% ' + 'y' * (i % 60), end='')",
    "all": (
        "for i in range(10_000):\n"
        "    print('some text', rank, i, 'x' * 50)\n"
        "    print(f'\\r{i / 100:.0f}%', end='', file=sys.stderr)\n"
        "    if not i % 50: display(HTML(f'{rank} {i}' * 100))"
    ),
}


@pytest.mark.slow
def test_a_jupyter_server_drops_nothing(server: Server) -> None:
    server.run("%mesh up t -n 4 --device cpu")
    server.run("%%remote\nimport sys\nfrom IPython.display import HTML, display")
    for name, code in FLOODS.items():
        shown = server.run(f"%%remote\n{code}\nprint('the end')")
        text = "".join(message["content"].get("text", "") for message in shown)
        assert "rate exceeded" not in text, (name, text[-500:])
        errors = [message["content"] for message in shown if message["msg_type"] == "error"]
        assert not errors, name
        # The last line of a bar that is live stays in its block.
        blocks = "".join(message["content"].get("data", {}).get("text/plain", "") for message in shown)
        assert "the end" in text + blocks, name
