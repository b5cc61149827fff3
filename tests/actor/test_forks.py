"""A child that user code forks and does not end exits at the end of that code: it must not answer as a second rank."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from monarch_kernel.actor import Actor, ProcMesh, concurrent_endpoint, endpoint, this_host, this_proc
from monarch_kernel.errors import ForkedError
from tests.support.waiting import LONG_S

PROCS = {"forks": 1}


def code_of(pid: int) -> int:
    """Return the exit code of a child."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def end(how: str) -> str:
    if how == "raise":
        raise ValueError("in the child")
    if how == "exit":
        raise SystemExit(7)
    return how


CODES = {"return": 0, "raise": 1, "exit": 7}


class Forks(Actor):
    def __init__(self, how: str = "") -> None:
        self.codes: list[int] = []
        if how:
            pid = os.fork()
            if pid == 0:
                end(how)
                return
            self.codes.append(code_of(pid))

    @endpoint
    def fork(self, how: str) -> Any:
        pid = os.fork()
        return end(how) if pid == 0 else code_of(pid)

    @endpoint
    def ask(self, other: Any) -> tuple[int, str]:
        """Return the exit code of a child that makes requests, and the errors that it gets."""
        reads, writes = os.pipe()
        pending = other.pid.call_one()
        pid = os.fork()
        if pid == 0:
            said = []
            for ask in (other.pid.call_one, other.pid.broadcast, pending.get):
                try:
                    ask()
                except ForkedError as error:
                    said.append(str(error))
            os.write(writes, "\n".join(said).encode())
            return 0, ""
        os.close(writes)
        with os.fdopen(reads) as file:
            return code_of(pid), file.read()

    @endpoint
    def hit(self, number: int, where: str) -> int:
        """Return the exit code of a child that gets a signal, while Python calls its fork hooks or in user code."""
        interrupters = [where]

        def interrupt() -> None:
            if interrupters == ["hooks"]:
                os.kill(os.getpid(), number)

        os.register_at_fork(after_in_child=interrupt)
        pid = os.fork()
        if pid == 0:
            if where == "code":
                os.kill(os.getpid(), number)
            return 0
        interrupters.clear()  # fork hooks can't be unregistered
        return code_of(pid)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def environ(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def made(self) -> list[int]:
        return self.codes


class Later(Actor):
    """The same, on a loop."""

    @endpoint
    async def fork(self, how: str) -> Any:
        pid = os.fork()
        return end(how) if pid == 0 else code_of(pid)

    @concurrent_endpoint
    async def overlap(self, how: str) -> Any:
        await asyncio.sleep(0)
        pid = os.fork()
        return end(how) if pid == 0 else code_of(pid)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture(params=["rank", "program"])
def place(request: pytest.FixtureRequest, procs: ProcMesh) -> ProcMesh:
    return procs if request.param == "rank" else this_proc()


@pytest.mark.parametrize("how", CODES)
@pytest.mark.parametrize(("kind", "name"), [(Forks, "fork"), (Later, "fork"), (Later, "overlap")])
def test_a_child_exits_at_the_end_of_its_endpoint(place: ProcMesh, kind: Any, name: str, how: str) -> None:
    mesh: Any = place.spawn("forks", kind)
    pid = mesh.pid.call_one().get(LONG_S)
    assert getattr(mesh, name).call_one(how).get(LONG_S) == CODES[how]
    assert mesh.pid.call_one().get(LONG_S) == pid
    mesh.stop().get(LONG_S)


@pytest.mark.parametrize("how", CODES)
def test_a_child_exits_at_the_end_of_init(procs: ProcMesh, how: str) -> None:
    mesh: Any = procs.spawn("forks", Forks, how)
    assert mesh.made.call_one().get(LONG_S) == [CODES[how]]
    mesh.stop().get(LONG_S)


def test_a_child_exits_at_the_end_of_a_function(procs: ProcMesh) -> None:
    def fork(how: str) -> Any:
        pid = os.fork()
        return end(how) if pid == 0 else code_of(pid)

    assert [procs.map(fork, [how]).get(LONG_S).values()[0] for how in CODES] == list(CODES.values())


def test_a_child_exits_at_the_end_of_the_bootstrap(procs: ProcMesh) -> None:
    def bootstrap() -> None:
        pid = os.fork()
        if pid:
            os.environ["CODE"] = str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    mesh = this_host().spawn_procs({"forks": 1}, device="cpu", bootstrap=bootstrap)
    actor: Any = mesh.spawn("forks", Forks)
    assert actor.environ.call_one("CODE").get(LONG_S) == "0"
    mesh.stop().get(LONG_S)


def test_a_child_that_makes_requests_gets_an_error(procs: ProcMesh) -> None:
    mesh: Any = procs.spawn("forks", Forks)
    other: Any = this_proc().spawn("other", Forks)
    pid = mesh.pid.call_one().get(LONG_S)
    code, said = mesh.ask.call_one(other).get(LONG_S)
    assert code == 0
    assert said.count(f"this process was forked from process {pid} of the mesh, and can't talk to the mesh itself") == 3
    mesh.stop().get(LONG_S)
    other.stop().get(LONG_S)


@pytest.mark.parametrize("where", ["hooks", "code"])
def test_sigterm_ends_a_child(procs: ProcMesh, where: str) -> None:
    mesh: Any = procs.spawn("forks", Forks)
    pid = mesh.pid.call_one().get(LONG_S)
    assert mesh.hit.call_one(signal.SIGTERM, where).get(LONG_S) == -signal.SIGTERM
    assert mesh.pid.call_one().get(LONG_S) == pid
    mesh.stop().get(LONG_S)


def test_sigint_raises_keyboard_interrupt_in_a_child(procs: ProcMesh) -> None:
    mesh: Any = procs.spawn("forks", Forks)
    assert mesh.hit.call_one(signal.SIGINT, "code").get(LONG_S) == 1
    mesh.stop().get(LONG_S)
