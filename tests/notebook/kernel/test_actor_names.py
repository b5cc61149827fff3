"""The actor API in a notebook: classes and functions of cells on ranks, errors that show the cell, interrupts of actors."""

from __future__ import annotations

import pytest

from tests.notebook.kernel.conftest import Notebook

SERVER = """
import asyncio
from monarch_kernel.actor import *

class Server(Actor):
    def __init__(self):
        self.seen, self.waiting = [], []

    @concurrent_endpoint
    async def sleep(self, name):
        self.seen.append(name)
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            self.seen.append(f'{name} left')
            raise

    @concurrent_endpoint(explicit_response_port=True)
    async def ask(self, port):
        self.waiting.append(port)

    @endpoint
    async def answer(self, text):
        for port in self.waiting:
            port.send(text)

    @endpoint
    async def look(self):
        return self.seen

    def peek(self):
        return len(self.seen)

    async def __cleanup__(self, error):
        print('cleaned up after', repr(error))

server = t[0].spawn('server', Server)
server.initialized.get()
"""


@pytest.fixture
def served(notebook: Notebook) -> Notebook:
    """The notebook, with a new actor `server` on rank 0."""
    notebook.ok(SERVER)
    return notebook


def test_an_interrupt_of_one_wait_leaves_other_calls_alone(served: Notebook) -> None:
    served.ok("first = server.sleep.call_one('first')")
    cell = served.send("second = server.sleep.call_one('second')\nsecond.get()")
    served.wait_blocked()
    served.interrupt()
    assert cell.wait().ename == "RemoteInterrupt"
    assert served.value("server.look.call_one().get()") == ["first", "second", "second left"]
    served.ok("first.cancel()")
    assert "cancelled by the caller" in served.run("first.get()").error
    assert served.value("server.look.call_one().get()")[-1] == "first left"


def test_answers_of_ports_plain_methods_and_await(served: Notebook) -> None:
    served.ok("question = server.ask.call_one()\nserver.answer.broadcast('here you are')")
    assert served.run("await question").plain == "'here you are'"
    assert served.run("as_endpoint(server.peek).call_one().get()").plain == "0"
    assert "as_endpoint(server.peek).call(...)" in served.run("server.peek()").evalue


def test_a_cleanup_prints_into_the_notebook(served: Notebook) -> None:
    cell = served.ok("server.sleep.broadcast('on')\nserver.stop('enough').get()")
    cell.wait_for(lambda cell: "cleaned up after None" in cell.stdout)
    assert "enough" in served.run("server.look.call_one().get()").evalue


def test_a_bootstrap_of_a_cell_runs_on_the_ranks_and_its_error_shows_the_cell(served: Notebook) -> None:
    served.ok("import os\ndef prepare():\n    os.environ['PREPARED'] = str(1 // zero)\nzero = 1")
    served.ok("good = this_host().spawn_procs({'r': 2}, prepare, name='good', device='cpu')")
    assert served.run("good.run(\"import os; os.environ['PREPARED']\").get().values()").plain == "('1', '1')"
    served.ok("good.stop()\nzero = 0\nbad = this_host().spawn_procs({'r': 2}, prepare, name='bad', device='cpu')")
    error = served.run("bad.initialized.get()").error
    assert (
        "[0-1] ZeroDivisionError: integer division or modulo by zero (raised by the bootstrap of this process)" in error
    )
    assert "os.environ['PREPARED'] = str(1 // zero)" in error
    assert "ZeroDivisionError" in served.run("bad.spawn('server', Server).initialized.get()").error
    served.ok("bad.stop()")
