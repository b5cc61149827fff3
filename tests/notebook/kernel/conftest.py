"""A notebook for tests: a real kernel in a separate process, driven as Jupyter drives it."""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from queue import Empty
from typing import Any

import pexpect
import psutil
import pytest
import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

from tests.support.processes import assert_gone, command_of, is_alive, tree
from tests.support.waiting import wait_until

START_S = 60.0
CHECK_EVERY_S = 1.0  # seconds between checks whether the kernel is alive
WIDGET = "application/vnd.jupyter.widget-view+json"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
BRINGS_UP = "%mesh up t -n {n} --device cpu"

# The blocking API of jupyter_client keeps the event loop that it makes at its first use. Made here, the loop belongs to no
# test.
LOOP = ensure_event_loop()


def pytest_unconfigure() -> None:
    LOOP.close()


class Cell:
    """A cell that was sent to a kernel, and what has come back so far.

    Attributes:
        messages: messages from the kernel to all its clients, in order, without its states.
        reply: content of the reply; empty until it arrives.
        has_started: whether the kernel has started to work at it; an interrupt before that has no effect.
        sent_at: time of sending.
        replied_at: time of the reply.
    """

    def __init__(self, notebook: Notebook, id: str) -> None:
        self.id = id
        self.messages: list[dict[str, Any]] = []
        self.reply: dict[str, Any] = {}
        self.idle = self.has_started = False
        self.sent_at = self.replied_at = time.monotonic()
        self._notebook = notebook

    def wait(self, timeout_s: float = START_S) -> Cell:
        """Wait until the cell has ended and all its output has arrived."""
        self.wait_for(lambda cell: cell.idle and bool(cell.reply), timeout_s)
        return self

    def wait_for(self, condition: Callable[[Cell], object], timeout_s: float = START_S) -> Cell:
        """Wait until a condition holds for the cell."""
        deadline, check_at = time.monotonic() + timeout_s, time.monotonic() + CHECK_EVERY_S
        while not condition(self):
            if time.monotonic() > deadline:
                self._notebook.is_stuck = True
                self._notebook.print_stacks()
                pytest.fail(f"the condition did not hold within {timeout_s:g} s; {self.so_far}")
            if time.monotonic() > check_at:
                check_at = time.monotonic() + CHECK_EVERY_S
                if not self._notebook.manager.is_alive():
                    self._notebook.is_stuck = True
                    pytest.fail(f"the kernel has died; {self.so_far}")
            self._notebook.pump(0.02)
        return self

    def has_ended(self, timeout_s: float) -> bool:
        """Wait until the cell ends, and tell whether it did in time."""
        deadline = time.monotonic() + timeout_s
        while not (self.idle and self.reply) and time.monotonic() < deadline:
            self._notebook.pump(0.02)
        return self.idle and bool(self.reply)

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
        """Time from sending to the reply, for checks by ``bar``."""
        return self.replied_at - self.sent_at

    def take_reply(self, content: dict[str, Any]) -> None:
        self.reply, self.replied_at = content, time.monotonic()

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
        """The lines of each rank; whether equal lines of several ranks are merged here depends on the machine's load."""
        found: dict[int, list[str]] = {}
        for line in self.stream(stream).splitlines():
            label, _, text = line.partition(" ")
            for rank in ranks_of(label):
                found.setdefault(rank, []).append(text)
        return found

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The displayed data except widgets, each as MIME type -> data."""
        return [data for data in self._displayed if WIDGET not in data]

    @property
    def widgets(self) -> list[str]:
        """The models of the displayed widgets."""
        return [data[WIDGET]["model_id"] for data in self._displayed if WIDGET in data]

    @property
    def _displayed(self) -> list[dict[str, Any]]:
        return [m["content"]["data"] for m in self.of_type("display_data", "execute_result")]

    @property
    def plain(self) -> str:
        """The plain text of the displayed data."""
        return "\n".join(data.get("text/plain", "") for data in self.shown)

    @property
    def error(self) -> str:
        """The error message as the notebook shows it, without colours."""
        return "\n".join(ANSI.sub("", "\n".join(m["content"]["traceback"])) for m in self.of_type("error"))

    @property
    def so_far(self) -> str:
        return f"so far: {self.reply} {self.text[-3000:]}"

    @property
    def text(self) -> str:
        return "\n".join([self.stdout, self.stderr, self.plain, self.error])


PRINTS_STACKS = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR2, file=2)
del faulthandler, signal
"""


class Notebook:
    """A kernel and its client.

    Args:
        kernel_name: name of the kernel's specification.
        through: a command that executes the kernel, whose command line follows.
    """

    def __init__(self, kernel_name: str = "monarch", through: Sequence[str] = ()) -> None:
        self.manager = KernelManager(kernel_name=kernel_name)
        if through:
            # Jupyter replaces ``python`` only at the start of the command.
            self.manager.kernel_spec.argv[:1] = [*through, sys.executable]
        self.manager.start_kernel()
        self.client: BlockingKernelClient = self.manager.blocking_client()
        self.client.start_channels(hb=False)  # the heartbeat opens a new socket after each silence
        self.cells: dict[str, Cell] = {}
        self.on_message: Callable[[dict[str, Any]], object] = lambda message: (
            None
        )  # for messages that belong to no cell
        self.on_forget: list[Callable[[], object]] = []  # closes what a test has opened and may have left open
        self.is_stuck = False
        self._is_closed = False
        self._replies: dict[str, dict[str, Any]] = {}
        try:
            self.client.wait_for_ready(timeout=START_S)
            self.aside(PRINTS_STACKS)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Pid of the kernel."""
        return int(self.manager.provisioner.pid)

    def send(self, code: str, **options: Any) -> Cell:
        """Send a cell, without waiting for it."""
        self._check()
        cell = Cell(self, self.client.execute(code, allow_stdin=False, **options))
        self.cells[cell.id] = cell
        return cell

    def run(self, code: str, timeout_s: float = START_S, **options: Any) -> Cell:
        """Run a cell to its end, whether it succeeds or not."""
        return self.send(code, **options).wait(timeout_s)

    def aside(self, code: str) -> None:
        """Run code that must succeed, without an entry in the history."""
        cell = self.run(code, silent=True, store_history=False)
        assert cell.ok, cell.reply

    def print_stacks(self) -> None:
        """Make the kernel print the stacks of its threads to stderr of the tests; it may be unable to answer."""
        os.kill(self.pid, signal.SIGUSR2)
        time.sleep(0.5)  # there is no signal that it has printed

    def forget(self) -> None:
        """Remove all cells, pages, subshells and messages of earlier tests."""
        for close in self.on_forget:
            close()
        self.on_forget.clear()
        self.sync()
        self.cells.clear()
        self._replies.clear()
        for channel in (self.client.stdin_channel, self.client.control_channel):
            with suppress(Empty):
                while True:
                    channel.get_msg(timeout=0)

    def _check(self) -> None:
        if self.is_stuck:  # otherwise each test that shares the kernel would wait until its timeout
            pytest.fail("an earlier test left a cell running in this notebook", pytrace=False)

    def ok(self, code: str, timeout_s: float = START_S) -> Cell:
        """Run a cell that must succeed."""
        cell = self.run(code, timeout_s)
        assert cell.ok, cell.text
        return cell

    def value(self, expression: str) -> Any:
        """Evaluate a local expression whose repr is a literal."""
        cell = self.run("", user_expressions={"value": expression}, silent=True)
        answer = cell.reply["user_expressions"]["value"]
        assert answer["status"] == "ok", answer
        return ast.literal_eval(answer["data"]["text/plain"])

    def pids(self, mesh: str = "t") -> list[int]:
        """Pids of the ranks, as the controller knows them."""
        return list(self.value(f"[rank.pid for rank in {mesh}.view().ranks]"))

    def wait_blocked(self) -> None:
        """Wait until the main thread has been blocked for a while: just before it blocks, Python can miss a signal."""
        stat, asleep, deadline = Path(f"/proc/{self.pid}/task/{self.pid}/stat"), 0, time.monotonic() + START_S
        while asleep < 5:
            assert time.monotonic() < deadline, "the main thread does not block"
            asleep = asleep + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
            time.sleep(0.01)

    def up(self, n: int, name: str = "t") -> Cell:
        """Bring up a mesh of CPU ranks."""
        return self.ok(f"%mesh up {name} -n {n} --device cpu")

    def end_meshes(self) -> None:
        """End all meshes, if the kernel is able to."""
        if not self.is_stuck and self.manager.is_alive():
            self.run("%mesh down --all", store_history=False)

    def interrupt(self) -> None:
        """Send a signal to the kernel's process group, as Kernel > Interrupt does."""
        self.manager.interrupt_kernel()

    def complete(self, code: str) -> list[str]:
        """List the completions at the end of the code, as Tab does."""
        self._check()
        return list(self.ask(self.client.complete(code))["matches"])

    def ask(self, id: str, timeout_s: float = START_S) -> dict[str, Any]:
        """Wait for the reply to a request other than a cell, and give its content."""
        deadline = time.monotonic() + timeout_s
        while id not in self._replies:
            assert time.monotonic() < deadline, "no reply"
            self.pump(0.02)
        return self._replies.pop(id)

    def sync(self) -> None:
        """Receive all that the kernel has published so far; replies on other channels may have been faster."""
        message = self.client.session.msg("kernel_info_request", {})
        last = self.cells[message["header"]["msg_id"]] = Cell(self, message["header"]["msg_id"])
        self.client.control_channel.send(message)
        last.wait_for(lambda cell: cell.idle)
        self.client.control_channel.get_msg(timeout=START_S)
        del self.cells[last.id]

    def pump(self, timeout_s: float) -> None:
        """Receive all pending messages; if there are none, wait for the first one, at most for a moment."""
        channels = self.client.shell_channel, self.client.iopub_channel
        zmq.zmq_poll([(channel.socket, zmq.POLLIN) for channel in channels], round(1000 * timeout_s))
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
                self._take(self.client.iopub_channel.get_msg(timeout=0))

    def _take(self, message: dict[str, Any]) -> None:
        self.on_message(message)
        cell = self.cells.get(message["parent_header"].get("msg_id", ""))
        if cell is None:
            return
        if message["msg_type"] == "status":
            state = message["content"]["execution_state"]
            cell.idle, cell.has_started = state == "idle", cell.has_started or state == "busy"
        elif message["msg_type"] != "execute_input":
            message["sent_s"] = _seconds(message["header"]["date"])
            cell.messages.append(message)

    def wait_for_answers(self) -> None:
        """Make Tab and Shift-Tab wait for ranks; other tests check how long users may have to wait."""
        self.ok("from monarch_kernel.notebook.magics import remote_names as _names; _names.CAP_S = 30.0")

    def processes(self) -> list[psutil.Process]:
        """All processes below the kernel: its agent, the zygote, the ranks."""
        return tree(self.pid)[1:]

    def running(self) -> list[psutil.Process]:
        """Those of them that have not ended: a child is a zombie if an interrupt comes between its fork and the wait for it."""
        return [process for process in self.processes() if is_alive(process)]

    def zygotes(self) -> list[psutil.Process]:
        """The processes that fork ranks: the oldest one below each agent with this name, which its forks have, too."""
        oldest: dict[int, psutil.Process] = {}
        for process in sorted(self.processes(), key=lambda process: process.create_time()):
            with suppress(psutil.NoSuchProcess):  # the process has ended meanwhile
                if "zygote" in process.cmdline() and process.ppid() not in (each.pid for each in oldest.values()):
                    oldest.setdefault(process.ppid(), process)
        return list(oldest.values())

    def close(self, *, leaves: bool = False) -> None:
        """Shut down the kernel, as Jupyter does; all its processes must end, unless it ``leaves`` a mesh behind."""
        if self._is_closed:
            return
        self._is_closed = True
        below = self.processes()
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        if not leaves:
            assert_gone(below)


def ranks_of(label: str) -> list[int]:
    """Parse ``[0-3,6]``."""
    assert re.fullmatch(r"\[[\d,-]+\]", label), label
    spans = [span.partition("-") for span in label[1:-1].split(",")]
    return [rank for first, _, last in spans for rank in range(int(first), int(last or first) + 1)]


def _seconds(date: datetime) -> float:
    return date.timestamp()


def sessions_left() -> set[Path]:
    """Directories of sessions in the directory for temporary files."""
    return set(Path(tempfile.gettempdir()).glob("monarch-*"))


class Terminal:
    """IPython in a terminal.

    Attributes:
        process: the process, controlled by pexpect.
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
        """Enter a line; gives the output until the next prompt."""
        self.process.sendline(line)
        self.process.expect(self.PROMPT)
        return str(self.process.before)

    def interrupt_prompt(self) -> None:
        """Press Ctrl-C once the prompt waits for input: CPython ignores a Ctrl-C between the prompt and the wait."""
        wait_until(self._waits, "the terminal to wait for input")
        self.process.sendintr()

    def _waits(self) -> bool:
        """Whether the main thread sleeps without a timeout; a wait for the interpreter's lock has one."""
        process = psutil.Process(self.process.pid)
        before = process.num_ctx_switches()
        time.sleep(0.1)
        return process.status() == psutil.STATUS_SLEEPING and process.num_ctx_switches() == before

    def leave(self) -> None:
        """Leave IPython; all its processes must end."""
        below = tree(self.process.pid)[1:]
        assert len(below) >= 4  # agent, zygote, two ranks
        self.process.sendline("exit")
        self.process.expect(pexpect.EOF)
        assert_gone(below)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """IPython in a terminal, with the extension and a mesh ``t`` of two ranks."""
    terminal = Terminal()
    try:
        terminal.enter("%load_ext monarch_kernel")
        assert "2 ranks (2 idle)" in terminal.enter("%mesh up t -n 2 --device cpu")
        yield terminal
    finally:
        terminal.process.close(force=True)


class Pool:
    """One kernel that the modules of this package use one after the other.

    The start of a kernel with its agent and zygote takes some seconds of processor time; a mesh in a running kernel, a fraction
    of one. Each module finds the kernel as if it had just started (`fresh.py`). The pool replaces a kernel that a test has left
    dead, stuck, or with processes that do not end.

    Attributes:
        started: number of kernels that it has started.
    """

    def __init__(self) -> None:
        self.started = 0
        self._notebook: Notebook | None = None
        self._user = ""
        self._n: int | None = None
        self._before: set[Path] = set()

    def take(self, user: str, n: int) -> Notebook:
        """Give the kernel to a module, with only a mesh ``t`` of ``n`` ranks, or without a mesh if ``n`` is 0."""
        if user != self._user and self._notebook is not None and not self._is_reset(self._notebook):
            self.end(after_failure=True)
        if self._notebook is None:
            self._notebook = self._start()
        if user != self._user:
            self._user, self._n = user, 0
        elif n == self._n != 0:
            return self._notebook
        else:
            self._notebook.end_meshes()
        self._n = n
        if n:
            self._notebook.ok(BRINGS_UP.format(n=n))
        return self._notebook

    def end(self, *, after_failure: bool = False) -> None:
        """End the kernel, if there is one, and check that it leaves nothing, unless a test has broken it."""
        notebook, self._notebook, self._user = self._notebook, None, ""
        if notebook is not None:
            notebook.close()
            assert after_failure or sessions_left() <= self._before

    def _start(self) -> Notebook:
        self._before = sessions_left()  # another notebook may be open
        self.started += 1
        notebook = Notebook()
        notebook.aside(REMEMBERS)
        # A zygote that starts later would count as left behind by the first test.
        wait_until(lambda: notebook.zygotes(), "the zygote that ranks are forked from")
        return notebook

    def _is_reset(self, notebook: Notebook) -> bool:
        """Put the kernel into the state that it had at its start; tell whether that was possible."""
        if notebook.is_stuck or not notebook.manager.is_alive():
            return False
        for cell in [cell for cell in notebook.cells.values() if not cell.reply]:  # cells of a test that has failed
            for _ in range(round(WAITS_S)):
                notebook.interrupt()  # an interrupt before the cell starts has no effect
                if cell.has_ended(1.0):
                    break
            else:
                return False
        try:
            notebook.sync()
            notebook.aside("get_ipython().run_line_magic('mesh', 'down --all')")
            notebook.aside(PUTS_BACK)
            wait_until(lambda: len(notebook.running()) <= 2, "all but the agent and its zygote to end", WAITS_S)
            notebook.forget()
        except (AssertionError, pytest.fail.Exception, Empty, RuntimeError) as error:
            left = [f"{process.pid} {' '.join(command_of(process))}" for process in notebook.running()]
            print("\n".join([f"the shared kernel can't be reset: {error}", *left]))
            return False
        return True


WAITS_S = 20.0  # after this time, starting another kernel is faster
FRESH = "__import__('sys').modules['tests_kernel_fresh']"
REMEMBERS = f"""
import importlib.util as _util, sys as _sys
_spec = _util.spec_from_file_location("tests_kernel_fresh", {str(Path(__file__).with_name("fresh.py"))!r})
_sys.modules["tests_kernel_fresh"] = _util.module_from_spec(_spec)
_spec.loader.exec_module({FRESH})
del _util, _sys, _spec
{FRESH}.remember(get_ipython())
"""
PUTS_BACK = f"{FRESH}.put_back(get_ipython())"
POOL = Pool()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the shared kernel before tests of another package run in this process."""
    here = Path(__file__).parent
    if nextitem is None or not nextitem.path.is_relative_to(here):
        POOL.end()


@pytest.fixture(scope="session")
def pool(nothing_left_by_the_session: None) -> Iterator[Pool]:
    """The kernel that modules share."""
    yield POOL
    POOL.end()


@pytest.fixture(scope="module")
def bare(pool: Pool, request: pytest.FixtureRequest) -> Notebook:
    """The shared kernel, without a mesh when the test starts."""
    return pool.take(request.module.__name__, 0)


@pytest.fixture(scope="module")
def notebook(pool: Pool, request: pytest.FixtureRequest) -> Notebook:
    """The shared kernel, with a mesh ``t`` of two ranks."""
    return pool.take(request.module.__name__, 2)


@pytest.fixture(scope="module")
def four(pool: Pool, request: pytest.FixtureRequest) -> Notebook:
    """The shared kernel, with a mesh ``t`` of four ranks."""
    return pool.take(request.module.__name__, 4)


@pytest.fixture(scope="module")
def stock() -> Iterator[Notebook]:
    """The stock kernel with the extension, and with a mesh ``t`` of two ranks."""
    notebook = Notebook("python3")
    try:
        notebook.ok("%load_ext monarch_kernel")
        notebook.up(2)
        yield notebook
    finally:
        notebook.close()


@pytest.fixture
def mesh_of_the_test(request: pytest.FixtureRequest) -> Notebook | None:
    """Switch to the mesh of the test, in modules where tests use different ones of ``notebook``, ``four`` and ``bare``."""
    for name, n in (("bare", 0), ("notebook", 2), ("four", 4)):
        if name in request.fixturenames:
            notebook: Notebook = request.getfixturevalue(name)
            notebook.on_message = lambda message: None
            if not notebook.is_stuck:
                POOL.take(request.module.__name__, n)
            return notebook
    return None


@pytest.fixture(autouse=True)
def nothing_left(
    mesh_of_the_test: Notebook | None, nothing_left: None, request: pytest.FixtureRequest
) -> Iterator[None]:
    """The check of `tests/support/leftovers.py`, made after the shared mesh is up, so that the mesh does not count."""
    yield
    if mesh_of_the_test is not None and "bare" in request.fixturenames:
        mesh_of_the_test.end_meshes()


@pytest.fixture
def new_notebook() -> Iterator[Callable[..., Notebook]]:
    """Start kernels for this test only, and end them."""
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
