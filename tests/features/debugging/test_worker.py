"""pdb on ranks, without a notebook: breakpoints, prompts, and code that can't stop."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from monarch_kernel.actor import Actor, ActorError, ProcMesh, endpoint, this_host
from monarch_kernel.base.events import KeptError, StopEvent
from monarch_kernel.errors import RemoteError
from monarch_kernel.features.debugging.controller import DebugPrompts
from monarch_kernel.net.wire.messages import ListErrors
from monarch_kernel.runtime.controller.session import current_session
from monarch_kernel.runtime.rpc.future import Future
from tests.support.processes import wait_gone
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until


class Body(Actor):
    """Runs code in an endpoint."""

    @endpoint
    def run(self, code: str) -> Any:
        names: dict[str, Any] = {}
        exec(code, names)
        return names.get("value")


class AsyncBody(Actor):
    """The same on an event loop."""

    @endpoint
    async def run(self, code: str) -> Any:
        names: dict[str, Any] = {}
        exec(code, names)
        return names.get("value")


def errors(mesh: ProcMesh) -> list[KeptError]:
    """The errors that rank 1 keeps."""
    kept: list[KeptError] = mesh.look(1, ListErrors).get(LONG_S)
    return kept


class Person:
    """Answers the prompts of all ranks, on the thread of the test."""

    def __init__(self, mesh: ProcMesh) -> None:
        self.mesh = mesh
        self.stops: queue.Queue[StopEvent] = queue.Queue()
        self.runtime = current_session().runtime

    def hear(self, event: object) -> None:
        if isinstance(event, StopEvent):
            self.stops.put(event)

    def stop(self) -> StopEvent:
        """Wait for the next prompt."""
        return self.stops.get(timeout=LONG_S)

    def say(self, stop: StopEvent, line: str) -> StopEvent:
        """Answer a prompt; returns the next one."""
        DebugPrompts(self.runtime).answer(stop, line + "\n")
        return self.stop()

    def leave(self, stop: StopEvent, line: str, future: Future[Any]) -> Any:
        """Answer a prompt with a line that makes the code go on; returns its value or error."""
        DebugPrompts(self.runtime).answer(stop, line + "\n")
        return future.exception(LONG_S) or future.get()


@pytest.fixture
def person(procs: ProcMesh) -> Iterator[Person]:
    person = Person(procs.slice(r=1))
    runtime = person.runtime
    DebugPrompts(runtime).attend(lambda future: None)
    forget = runtime.watch(person.hear)
    yield person
    forget()
    DebugPrompts(runtime).attend(None)
    assert DebugPrompts(runtime).stops() == []


def test_a_breakpoint_stops_the_code_with_its_source(person: Person) -> None:
    future = person.mesh.run("def f(a):\n    breakpoint()\n    b = a + 1\n    return b\nf(3)")
    stop = person.stop()
    assert (stop.rank, stop.where, stop.prompt, stop.begins) == (1, "code, line 3, in f", "(Pdb) ", True)
    assert stop.text.endswith("f()\n-> b = a + 1\n")
    assert person.mesh.view().ranks[1].activity == "debugger at code, line 3, in f"
    stop = person.say(stop, "ll")
    assert "  3  ->\t    b = a + 1\n" in stop.text
    assert not stop.begins
    stop = person.say(stop, "w")
    assert stop.text.count("->") == 2  # the cell and the function, without the code that runs them
    stop = person.say(stop, "!a = 41")
    assert person.leave(stop, "c", future).values() == (42,)


def test_stepping_ends_where_the_cell_does(person: Person) -> None:
    future = person.mesh.run("breakpoint()\nx = 1\ny = 2")
    stop = person.say(person.stop(), "n")
    stop = person.say(stop, "n")
    assert stop.text.startswith("--Return--")
    assert person.leave(stop, "n", future).values() == (None,)
    assert person.mesh.run("import sys\nsys.gettrace(), '__return__' in globals()").get(LONG_S).values() == (
        (None, False),
    )


def test_all_ways_to_start_pdb_open_a_prompt(person: Person) -> None:
    ways = {
        "import pdb\npdb.set_trace()\nx = 1": "code, line 3",
        "import pdb\npdb.Pdb().set_trace()\nx = 1": "code, line 3",
        "import pdb\ntry: 1 / 0\nexcept Exception: pdb.post_mortem()": "code, line 2",
        "import pdb\nclass Mine(pdb.Pdb): pass\nMine(stdin=None).set_trace()\nx = 1": "code, line 4",
    }
    for code, where in ways.items():
        future = person.mesh.run(code)
        stop = person.stop()
        assert stop.where == where
        assert person.leave(stop, "c", future).values() == (None,)


def test_breakpoint_of_torch_distributed(person: Person) -> None:
    code = (
        "import torch.distributed as dist\ndist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "def f(a):\n    dist.breakpoint()\n    return a\nf(5)"
    )
    future = person.mesh.run(code)
    stop = person.stop()
    assert "ATTENTION" in stop.text
    assert "code, line 4, in f" in stop.where
    stop = person.say(stop, "up")
    assert "-> dist.breakpoint()" in stop.text
    assert person.leave(person.say(stop, "p a"), "c", future).values() == (5,)
    person.mesh.run("dist.destroy_process_group()").get(LONG_S)


def test_quit_and_end_of_input_fail_the_request(person: Person) -> None:
    for line in ("q", "exit", "EOF"):
        future = person.mesh.run("before = 1\nbreakpoint()\nbefore = 2")
        error = person.leave(person.stop(), line, future)
        assert isinstance(error, RemoteError)
        assert error.primary.headline() == "BdbQuit: debugger quit"
        assert person.mesh["before"].values() == (1,)


@pytest.mark.parametrize("command", ["interact", "run", "restart"])
def test_unsupported_commands_are_refused(person: Person, command: str) -> None:
    future = person.mesh.run("breakpoint()\nx = 1")
    stop = person.say(person.stop(), command)
    assert stop.text.startswith(f"*** {command} is not available on a rank: ")
    assert person.leave(stop, "c", future).values() == (None,)


def test_an_interrupt_ends_stopped_code(person: Person) -> None:
    body: Any = person.mesh.spawn("body", Body)
    async_body: Any = person.mesh.spawn("async_body", AsyncBody)
    code = "breakpoint()\nvalue = 1"
    for start in (person.mesh.run, body.run.call, async_body.run.call):
        for lines in ([], ["p 1"]):
            future = start(code)
            stop = person.stop()
            for line in lines:
                stop = person.say(stop, line)
            future.interrupt()
            error = future.exception(LONG_S)
            assert isinstance(error, RemoteError | ActorError)
            assert error.primary.kind == "interrupted"
        future = start("value = 7\nvalue")
        assert future.get(LONG_S).values() == (7,)


def test_a_late_or_repeated_line_is_dropped(person: Person) -> None:
    future = person.mesh.run("breakpoint()\nx = 1")
    first = person.stop()
    second = person.say(first, "p 1")
    DebugPrompts(person.runtime).answer(first, "c\n")
    third = person.say(second, "p 2")
    assert third.text == "2\n"
    assert person.leave(third, "c", future).values() == (None,)


@pytest.mark.parametrize("where", ["cell", "endpoint"])
def test_a_mesh_with_a_rank_that_has_stopped_ends_at_once(person: Person, where: str, bar: Bar) -> None:
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    body: Any = mesh.spawn("body", Body)
    pid = mesh.run("import os\nos.getpid()").get(LONG_S).item(r=0)
    future = (mesh.run if where == "cell" else body.run.call)("breakpoint()\nx = 1")
    person.stop()
    with bar.below(5, "the end of the rank"):
        mesh.stop(grace_s=30).get(LONG_S)
        assert future.exception(LONG_S) is not None
        wait_gone(pid)


def test_a_breakpoint_in_an_endpoint_stops(person: Person) -> None:
    for cls in (Body, AsyncBody):
        body: Any = person.mesh.spawn("body", cls)
        future = body.run.call("breakpoint()\nvalue = 3")
        stop = person.stop()
        assert stop.description == "body.run"
        assert person.leave(stop, "c", future).values() == (3,)
        error = body.run.call("value = 1 / 0").exception(LONG_S)
        assert error is not None
        (kept,) = errors(person.mesh)
        assert kept.headline == "ZeroDivisionError: division by zero"
        look = person.mesh.post_mortem(kept.request)
        stop = person.say(person.stop(), "up")
        stop = person.say(stop, "p code")
        assert stop.text == "'value = 1 / 0'\n"
        assert person.leave(stop, "q", look).values() == (None,)
        assert body.run.call("value = 4").get(LONG_S).values() == (4,)
        assert errors(person.mesh) == []  # kept until the next call


def test_a_breakpoint_in_a_mapped_function_stops(person: Person) -> None:
    def divide(k: int) -> float:
        breakpoint()
        return 1 / k

    future = person.mesh.map(divide, [0])
    stop = person.stop()
    assert stop.where.endswith(", in divide")
    assert isinstance(person.leave(stop, "c", future), RemoteError)
    (kept,) = errors(person.mesh)
    look = person.mesh.post_mortem(kept.request)
    stop = person.say(person.stop(), "p k")
    assert stop.text == "0\n"
    assert person.leave(stop, "q", look).values() == (None,)


def test_a_failure_is_kept_until_the_next_cell(person: Person) -> None:
    mesh = person.mesh
    assert mesh.run(
        "import weakref\nclass Big: pass\ndef f():\n    big = Big()\n    globals()['ref'] = weakref.ref(big)\n    1 / 0"
    ).get(LONG_S)
    assert mesh.run("f()").exception(LONG_S) is not None
    (kept,) = errors(mesh)
    assert (kept.kind, kept.where) == ("exception", "code, line 6, in f")
    mesh["pushed"] = 1  # neither pushes nor pulls drop it
    for _ in range(2):
        look = mesh.post_mortem(kept.request)
        stop = person.say(person.stop(), "p big")
        assert "Big object" in stop.text
        person.leave(stop, "c", look)
    assert mesh.view().ranks[1].state == "failed"
    assert mesh.run("import gc\ngc.collect()\nref()").get(LONG_S).values() == (None,)
    error = mesh.post_mortem(kept.request).exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert "no longer kept" in str(error)


def test_code_that_can_not_stop_goes_on_with_a_message(procs: ProcMesh, capfd: pytest.CaptureFixture[str]) -> None:
    """There is no prompt in a script, in threads, in forked children and for broadcasts."""
    one = procs.slice(r=0)
    codes = {
        "breakpoint()\nx = 1": "code can stop only in a notebook",
        "import threading\nt = threading.Thread(target=lambda: breakpoint())\nt.start()\nt.join()": "not a thread",
        "import os, pdb\nif (pid := os.fork()) == 0:\n    breakpoint()\n    os._exit(0)\nos.waitpid(pid, 0)\nx = 1": "a child",
    }
    seen: list[str] = []

    def has_said(text: str) -> bool:
        one.run("1").get(LONG_S)  # the end of a request shows the output before it
        seen.extend(capfd.readouterr())
        return text in "".join(seen)

    for code, why in codes.items():
        one.run(code).get(LONG_S)
        text = f"was skipped: {why}" if "only in" in why else why
        wait_until(partial(has_said, text), f"{text!r} in the output")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("input('?')", "StdinNotImplementedError"),
        ("import getpass\ngetpass.getpass()", "StdinNotImplementedError"),
        ("import sys\nassert sys.stdin.read() == ''", ""),
        ("import sys\nassert sys.stdin.readline() == ''", ""),
        ("import code\ncode.interact()", "StdinNotImplementedError"),
        ("try: 1 / 0\nexcept Exception: pass\nget_ipython().run_line_magic('debug', '')", ""),
        ("import subprocess\nsubprocess.run(['cat'], check=True).returncode", ""),
    ],
)
def test_nothing_waits_for_standard_input(procs: ProcMesh, code: str, error: str) -> None:
    failed = procs.run(code).exception(LONG_S)
    assert (failed.primary.etype if isinstance(failed, RemoteError) else "") == error


@pytest.mark.parametrize("what", ["input('?')", "__import__('getpass').getpass()"])
def test_input_in_an_endpoint_is_refused_before_any_cell(procs: ProcMesh, what: str) -> None:
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    for _ in range(2):
        body: Any = mesh.spawn("body", Body)
        error = body.run.call(f"value = {what}").exception(LONG_S)
        assert isinstance(error, ActorError)
        assert error.primary.etype == "StdinNotImplementedError"
        assert "Ask in a local cell" in error.primary.message
        mesh.run("1").get(LONG_S)
    mesh.stop(grace_s=0).get()


def test_the_debugger_sends_nothing_for_requests_that_are_over(procs: ProcMesh, person: Person) -> None:
    future = person.mesh.run("breakpoint()\nx = 1")
    stop = person.stop()
    future.cancel()
    assert future.exception(LONG_S) is not None
    DebugPrompts(person.runtime).answer(stop, "c\n")
    assert person.mesh.run("1 + 1").get(LONG_S).values() == (2,)
