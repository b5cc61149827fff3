"""A notebook for tests: a real kernel in a process of its own, driven as Jupyter drives it."""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from queue import Empty
from typing import Any

import pexpect
import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

from tests.waiting import undisturbed_s, wait_until

START_S = 60.0
GONE_S = 3.0  # how long ranks may outlive their kernel
WIDGET = "application/vnd.jupyter.widget-view+json"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
BRINGS_UP = "%mesh up t -n {n} --device cpu"

# jupyter_client's synchronous face runs on a loop that it makes when it first needs it, and keeps: made here it belongs
# to no test.
LOOP = ensure_event_loop()


def pytest_unconfigure() -> None:
    LOOP.close()


class Cell:
    """A cell that was sent to a kernel, and what has come back so far.

    Attributes:
        messages: from the kernel to all its clients, in order, without its states.
        reply: content of the reply; empty until it is there.
        sent_at: when it was sent.
        done_at: when the reply was there, as `undisturbed_s` tells time.
    """

    def __init__(self, notebook: Notebook, id: str) -> None:
        self.id = id
        self.messages: list[dict[str, Any]] = []
        self.reply: dict[str, Any] = {}
        self.idle = False
        self.sent_at = self._replied_at = time.monotonic()
        self._undisturbed_at = self.done_at = undisturbed_s()
        self._notebook = notebook

    def wait(self, timeout_s: float = START_S) -> Cell:
        """Wait until it has ended, and all that it shows is here."""
        self.wait_for(lambda cell: cell.idle and bool(cell.reply), timeout_s)
        return self

    def wait_for(self, condition: Callable[[Cell], object], timeout_s: float = START_S) -> Cell:
        """Wait for something that it does."""
        deadline = time.monotonic() + timeout_s
        while not condition(self):
            if time.monotonic() > deadline:
                self._notebook.is_stuck = True
                pytest.fail(f"nothing came of it within {timeout_s:g} s; so far: {self.reply} {self.text[-3000:]}")
            self._notebook.pump(0.02)
        return self

    @property
    def ok(self) -> bool:
        return self.reply.get("status") == "ok"

    @property
    def ename(self) -> str:
        return str(self.reply.get("ename", ""))

    @property
    def evalue(self) -> str:
        return ANSI.sub("", self.reply.get("evalue", ""))

    @property
    def elapsed_s(self) -> float:
        return self._replied_at - self.sent_at

    @property
    def took_s(self) -> float:
        """The same, as `undisturbed_s` tells time."""
        return self.done_at - self._undisturbed_at

    def take_reply(self, content: dict[str, Any]) -> None:
        self.reply, self._replied_at, self.done_at = content, time.monotonic(), undisturbed_s()

    def of_type(self, *types: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["msg_type"] in types]

    def stream(self, name: str) -> str:
        return "".join(m["content"]["text"] for m in self.of_type("stream") if m["content"]["name"] == name)

    @property
    def stdout(self) -> str:
        return self.stream("stdout")

    @property
    def stderr(self) -> str:
        return self.stream("stderr")

    def lines(self, stream: str = "stdout") -> dict[int, list[str]]:
        """What each rank wrote: whether equal lines of several ranks are one or several here depends on the machine's load."""
        found: dict[int, list[str]] = {}
        for line in self.stream(stream).splitlines():
            label, _, text = line.partition(" ")
            for rank in ranks_of(label):
                found.setdefault(rank, []).append(text)
        return found

    @property
    def shown(self) -> list[dict[str, Any]]:
        """What it displayed, but for widgets: MIME type -> data."""
        return [data for data in self._displayed if WIDGET not in data]

    @property
    def widgets(self) -> list[str]:
        """The models of the widgets that it displayed."""
        return [data[WIDGET]["model_id"] for data in self._displayed if WIDGET in data]

    @property
    def _displayed(self) -> list[dict[str, Any]]:
        return [m["content"]["data"] for m in self.of_type("display_data", "execute_result")]

    @property
    def plain(self) -> str:
        """The plain text of what it displayed."""
        return "\n".join(data.get("text/plain", "") for data in self.shown)

    @property
    def error(self) -> str:
        """The error message as the notebook shows it, without colours."""
        return "\n".join(ANSI.sub("", "\n".join(m["content"]["traceback"])) for m in self.of_type("error"))

    @property
    def text(self) -> str:
        return "\n".join([self.stdout, self.stderr, self.plain, self.error])


class Notebook:
    """A kernel and a client of it."""

    def __init__(self, kernel_name: str = "monarch") -> None:
        self.manager = KernelManager(kernel_name=kernel_name)
        self.manager.start_kernel()
        self.client: BlockingKernelClient = self.manager.blocking_client()
        self.client.start_channels(hb=False)  # its heart beats on a new socket after each moment of silence
        self.cells: dict[str, Cell] = {}
        self.on_message: Callable[[dict[str, Any]], object] = lambda message: None  # for what no cell is told
        self.is_stuck = False
        self._is_closed = False
        self._replies: dict[str, dict[str, Any]] = {}
        try:
            self.client.wait_for_ready(timeout=START_S)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the kernel."""
        return int(self.manager.provisioner.pid)

    def send(self, code: str, **options: Any) -> Cell:
        """Send a cell, and do not wait."""
        self._check()
        cell = Cell(self, self.client.execute(code, allow_stdin=False, **options))
        self.cells[cell.id] = cell
        return cell

    def run(self, code: str, timeout_s: float = START_S, **options: Any) -> Cell:
        """Run a cell to its end, whatever that is."""
        return self.send(code, **options).wait(timeout_s)

    def _check(self) -> None:
        if self.is_stuck:  # else each test that shares it would wait in vain
            pytest.fail("an earlier test left a cell running in this notebook", pytrace=False)

    def ok(self, code: str, timeout_s: float = START_S) -> Cell:
        """Run a cell that succeeds."""
        cell = self.run(code, timeout_s)
        assert cell.ok, cell.text
        return cell

    def value(self, expression: str) -> Any:
        """The value of a local expression, of which the repr is a literal."""
        cell = self.run("", user_expressions={"value": expression}, silent=True)
        answer = cell.reply["user_expressions"]["value"]
        assert answer["status"] == "ok", answer
        return ast.literal_eval(answer["data"]["text/plain"])

    def pids(self, mesh: str = "t") -> list[int]:
        """Of the ranks, as the controller knows them."""
        return list(self.value(f"[rank.pid for rank in {mesh}.view().ranks]"))

    def wait_blocked(self) -> None:
        """Wait until the main thread has been blocked for a while: just before it blocks, Python can miss a signal."""
        stat, asleep, deadline = Path(f"/proc/{self.pid}/task/{self.pid}/stat"), 0, time.monotonic() + 10
        while asleep < 5:
            assert time.monotonic() < deadline, "the main thread does not block"
            asleep = asleep + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
            time.sleep(0.01)

    def interrupt(self) -> None:
        """As Kernel > Interrupt does: a signal to the kernel's process group."""
        self.manager.interrupt_kernel()

    def complete(self, code: str) -> list[str]:
        """What Tab offers at the end of the code."""
        self._check()
        return list(self.ask(self.client.complete(code))["matches"])

    def ask(self, id: str, timeout_s: float = START_S) -> dict[str, Any]:
        """The content of the reply to a request other than a cell."""
        deadline = time.monotonic() + timeout_s
        while id not in self._replies:
            assert time.monotonic() < deadline, "no reply"
            self.pump(0.02)
        return self._replies.pop(id)

    def sync(self) -> None:
        """Take all that the kernel has published so far: other channels may have been quicker."""
        message = self.client.session.msg("kernel_info_request", {})
        last = self.cells[message["header"]["msg_id"]] = Cell(self, message["header"]["msg_id"])
        self.client.control_channel.send(message)
        last.wait_for(lambda cell: cell.idle)
        self.client.control_channel.get_msg(timeout=START_S)
        del self.cells[last.id]

    def pump(self, timeout_s: float) -> None:
        """Take what has come, and wait a moment if nothing has."""
        with suppress(Empty):
            while True:
                reply = self.client.shell_channel.get_msg(timeout=0)
                id = reply["parent_header"]["msg_id"]
                cell = self.cells.get(id)
                if cell is None:
                    self._replies[id] = reply["content"]
                else:
                    cell.take_reply(reply["content"])
        with suppress(Empty):
            while True:
                self._take(self.client.iopub_channel.get_msg(timeout=timeout_s))
                timeout_s = 0

    def _take(self, message: dict[str, Any]) -> None:
        self.on_message(message)
        cell = self.cells.get(message["parent_header"].get("msg_id", ""))
        if cell is None:
            return
        if message["msg_type"] == "status":
            cell.idle = message["content"]["execution_state"] == "idle"
        elif message["msg_type"] != "execute_input":
            message["sent_s"] = _seconds(message["header"]["date"])
            cell.messages.append(message)

    def wait_for_answers(self) -> None:
        """Have Tab and Shift-Tab wait for ranks: how long they may make the user wait is tested by itself."""
        self.ok("from monarch_kernel.notebook import names as _names; _names.CAP_S = 30.0")

    def processes(self) -> list[psutil.Process]:
        """All processes below the kernel: its agent, the zygote, the ranks."""
        return psutil.Process(self.pid).children(recursive=True)

    def zygotes(self) -> list[psutil.Process]:
        """Those of which ranks are forked, without their forks, which have the same name: the oldest below each agent."""
        oldest: dict[int, psutil.Process] = {}
        for process in sorted(self.processes(), key=lambda process: process.create_time()):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if "zygote" in process.cmdline() and process.ppid() not in (each.pid for each in oldest.values()):
                    oldest.setdefault(process.ppid(), process)
        return list(oldest.values())

    def close(self, *, leaves: bool = False) -> None:
        """Shut the kernel down, as Jupyter does; all that it started ends with it, unless it ``leaves`` a mesh behind."""
        if self._is_closed:
            return
        self._is_closed = True
        below: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # a test may have killed it
            below = self.processes()
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        if not leaves:
            assert_gone(below)


def ranks_of(label: str) -> list[int]:
    """Read ``[0-3,6]``."""
    assert re.fullmatch(r"\[[\d,-]+\]", label), label
    spans = [span.partition("-") for span in label[1:-1].split(",")]
    return [rank for first, _, last in spans for rank in range(int(first), int(last or first) + 1)]


def _seconds(date: datetime) -> float:
    return date.timestamp()


def assert_gone(processes: list[psutil.Process], timeout_s: float = GONE_S) -> None:
    """These processes end in time."""
    wait_until(lambda: not any(map(is_alive, processes)), "these processes to end", timeout_s)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def sessions_left() -> set[Path]:
    """What sessions have in the directory for temporary files."""
    return set(Path(tempfile.gettempdir()).glob("monarch-*"))


class Terminal:
    """IPython in a terminal.

    Attributes:
        process: of pexpect.
    """

    PROMPT = re.compile(r"In \[\d+\]: ")

    def __init__(self) -> None:
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit", "--colors=NoColor"],
            env={**os.environ, "TERM": "dumb"},
            encoding="utf-8",
            timeout=40,
            echo=False,
        )
        self.process.expect(self.PROMPT)

    def enter(self, line: str) -> str:
        """Enter a line; gives what is shown until the next prompt."""
        self.process.sendline(line)
        self.process.expect(self.PROMPT)
        return str(self.process.before)

    def interrupt_prompt(self) -> None:
        """Press Ctrl-C at a prompt: of one that comes between the prompt and the wait for input CPython takes no notice."""
        wait_until(self._waits, "the terminal to wait for input")
        self.process.sendintr()

    def _waits(self) -> bool:
        """The main thread sleeps, and for no bounded time, as one does that waits for the interpreter's lock."""
        process = psutil.Process(self.process.pid)
        before = process.num_ctx_switches()
        time.sleep(0.1)
        return process.status() == psutil.STATUS_SLEEPING and process.num_ctx_switches() == before

    def leave(self) -> None:
        """Leave IPython; all that it started ends with it."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        assert len(below) >= 4  # agent, zygote, two ranks
        self.process.sendline("exit")
        self.process.expect(pexpect.EOF)
        assert_gone(below)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """IPython in a terminal, with our extension and a mesh ``t`` of two ranks."""
    terminal = Terminal()
    try:
        terminal.enter("%load_ext monarch_kernel")
        assert "2 ranks (2 idle)" in terminal.enter("%mesh up t -n 2 --device cpu")
        yield terminal
    finally:
        terminal.process.close(force=True)


def _with_mesh(n: int) -> Iterator[Notebook]:
    before = sessions_left()  # another notebook may be open
    notebook = Notebook()
    try:
        notebook.ok(BRINGS_UP.format(n=n), START_S)
        yield notebook
    finally:
        notebook.close()
    assert sessions_left() <= before


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    """A kernel with a mesh ``t`` of two ranks, shared by the tests of a module."""
    yield from _with_mesh(2)


@pytest.fixture(scope="module")
def four() -> Iterator[Notebook]:
    """A kernel with a mesh ``t`` of four ranks, shared by the tests of a module."""
    yield from _with_mesh(4)


@pytest.fixture
def new_notebook() -> Iterator[Callable[..., Notebook]]:
    """Starts kernels that are the test's own, and ends them."""
    started: list[Notebook] = []

    def start(kernel_name: str = "monarch", n: int = 0) -> Notebook:
        notebook = Notebook(kernel_name)
        started.append(notebook)
        if n:
            notebook.ok(BRINGS_UP.format(n=n), START_S)
        return notebook

    yield start
    for notebook in started:
        notebook.close()
