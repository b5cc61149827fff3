"""Concurrent endpoints: calls start in order and overlap; interrupts, failures and the end of the actor reach each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    current_rank,
    endpoint,
    this_host,
)
from tests.support.waiting import LONG_S, wait_until


@pytest.fixture
def gate(procs: ProcMesh) -> Iterator[Gate]:
    mesh = procs.slice(r=1).spawn("gate", Gate)
    yield mesh
    mesh.stop().get(LONG_S)


class Waits(Actor):
    """Has nothing to clean up, but its call has."""

    def __init__(self, path: str) -> None:
        self.path = path

    @concurrent_endpoint(explicit_response_port=True)
    async def wait(self, port: Any) -> None:
        port.send("waits")
        try:
            await asyncio.Event().wait()
        finally:
            Path(self.path).write_text("left")


class Gate(Actor):
    """Makes callers wait until it is opened."""

    def __init__(self, path: str = "") -> None:
        self.seen: list[Any] = []
        self.open = asyncio.Event()
        self.path = path

    @concurrent_endpoint
    async def enter(self, visitor: Any) -> Any:
        self.seen.append(visitor)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.seen.append(f"{visitor} left")
            raise
        return visitor

    @concurrent_endpoint
    async def fail(self, error: BaseException) -> None:
        await asyncio.sleep(0)
        raise error

    @concurrent_endpoint
    async def where(self) -> tuple[int, int]:
        before = current_rank().rank
        await self.open.wait()
        return before, current_rank().rank

    @endpoint
    async def unlock(self) -> list[Any]:
        self.open.set()
        return list(self.seen)

    @endpoint
    async def look(self) -> list[Any]:
        return list(self.seen)

    @endpoint
    async def hold(self) -> None:
        self.seen.append("held")
        await asyncio.sleep(LONG_S)

    async def __cleanup__(self, error: BaseException | None) -> None:
        if self.path:
            Path(self.path).write_text(f"{self.seen} {error!r}")


def test_calls_start_in_order_and_overlap(gate: Gate) -> None:
    inside = [gate.enter.call_one(i) for i in range(50)]
    assert gate.look.call_one().get(LONG_S) == list(range(50))
    assert not any(future.done() for future in inside)
    gate.unlock.call_one().get(LONG_S)
    assert [future.get(LONG_S) for future in inside] == list(range(50))


def test_an_ordinary_endpoint_runs_after_earlier_calls_have_started_and_before_later_ones(gate: Gate) -> None:
    calls = []
    for i in range(20):
        gate.enter.broadcast(i)
        calls.append(gate.look.call_one())
    assert [len(call.get(LONG_S)) for call in calls] == list(range(1, 21))


def test_each_call_keeps_its_own_context(procs: ProcMesh) -> None:
    gate = procs.spawn("gate", Gate)
    whole, part = gate.where.call(), gate.slice(r=1).where.call_one()
    gate.unlock.call().get(LONG_S)
    assert whole.get(LONG_S).values() == ((0, 0), (1, 1))
    assert part.get(LONG_S) == (0, 0)
    gate.stop().get(LONG_S)


def test_an_error_is_the_answer_of_its_call_only(gate: Gate) -> None:
    inside = gate.enter.call_one("a")
    with pytest.raises(ActorError, match="no good"):
        gate.fail.call_one(ValueError("no good")).get(LONG_S)
    assert not inside.done()
    gate.unlock.call_one().get(LONG_S)
    assert inside.get(LONG_S) == "a"


def test_an_interrupt_reaches_only_its_call(gate: Gate) -> None:
    inside = [gate.enter.call_one(i) for i in range(4)]
    gate.look.call_one().get(LONG_S)
    inside[1].interrupt()
    inside[2].interrupt()
    for i in (1, 2):
        error = inside[i].exception(LONG_S)
        assert isinstance(error, ActorError)
        assert error.primary.kind == "interrupted"
    seen = gate.unlock.call_one().get(LONG_S)
    assert sorted(map(str, seen)) == ["0", "1", "1 left", "2", "2 left", "3"]
    assert (inside[0].get(LONG_S), inside[3].get(LONG_S)) == (0, 3)


def test_interrupts_of_many_calls_end_only_these_calls(gate: Gate) -> None:
    inside = [gate.enter.call_one(i) for i in range(40)]
    gate.look.call_one().get(LONG_S)
    for future in inside[::2]:
        future.interrupt()
    for future in inside[::2]:
        error = future.exception(LONG_S)
        assert isinstance(error, ActorError)
        assert error.primary.kind == "interrupted"
    gate.unlock.call_one().get(LONG_S)
    assert [future.get(LONG_S) for future in inside[1::2]] == list(range(1, 40, 2))


def test_interrupts_at_the_same_time_end_only_their_calls(gate: Gate) -> None:
    for i in range(100):
        future = gate.enter.call_one(i)
        future.interrupt()
        assert isinstance(future.exception(LONG_S), ActorError)
    seen = gate.look.call_one().get(LONG_S)
    assert all(f"{i} left" in seen for i in seen if isinstance(i, int))


def test_a_failure_of_a_broadcast_ends_the_actor_and_overlapping_calls(procs: ProcMesh, tmp_path: Path) -> None:
    gate = procs.slice(r=0).spawn("gate", Gate, str(tmp_path / "end"))
    inside = [gate.enter.call_one("a"), gate.enter.call_one("b")]
    gate.fail.broadcast(ValueError("no caller"))
    for future in inside:
        with pytest.raises(SupervisionError, match="no caller.*this ended actor 'gate'"):
            future.get(LONG_S)
    wait_until((tmp_path / "end").exists, "the cleanup")
    wait_until(lambda: bool((tmp_path / "end").read_text()), "what it writes")
    assert (tmp_path / "end").read_text() == "['a', 'b', 'a left', 'b left'] ValueError('no caller')"


def test_a_failure_ends_an_ordinary_endpoint_that_runs_at_the_same_time(procs: ProcMesh) -> None:
    class Fuse(Gate):
        @concurrent_endpoint
        async def burn(self) -> None:
            while "held" not in self.seen:
                await asyncio.sleep(0.001)
            raise ValueError("burnt")

    fuse = procs.slice(r=0).spawn("fuse", Fuse)
    fuse.burn.broadcast()
    with pytest.raises(SupervisionError, match="burnt"):
        fuse.hold.call_one().get(LONG_S)
    with pytest.raises(SupervisionError, match="burnt"):
        fuse.look.call_one().get(LONG_S)


@pytest.mark.parametrize("way", ["raised", "in a task"])
def test_exit_ends_the_actor_and_not_the_process(procs: ProcMesh, way: str) -> None:
    class Leaver(Gate):
        @concurrent_endpoint
        async def leave(self) -> None:
            async def leave() -> None:
                raise SystemExit(3)

            if way == "raised":
                await leave()
            await asyncio.gather(asyncio.create_task(leave()), asyncio.sleep(LONG_S))

    leaver = procs.slice(r=0).spawn("leaver", Leaver)
    inside = leaver.enter.call_one("a")
    with pytest.raises((ActorError, SupervisionError), match="SystemExit"):
        leaver.leave.call_one().get(LONG_S)
    with pytest.raises(SupervisionError, match="SystemExit"):
        inside.get(LONG_S)
    with pytest.raises(SupervisionError, match="SystemExit.*this ended actor 'leaver'"):
        leaver.look.call_one().get(LONG_S)
    assert procs.run("1").get(LONG_S).values() == (1, 1)


def test_a_stop_cancels_running_calls_before_the_cleanup(procs: ProcMesh, tmp_path: Path) -> None:
    gate = procs.slice(r=0).spawn("gate", Gate, str(tmp_path / "end"))
    inside = gate.enter.call_one("a")
    gate.stop("closing time").get(LONG_S)
    with pytest.raises(SupervisionError, match="closing time"):
        inside.get(LONG_S)
    assert (tmp_path / "end").read_text() == "['a', 'a left'] None"


def test_running_calls_are_cancelled_when_the_processes_are_stopped(procs: ProcMesh, tmp_path: Path) -> None:
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    waits: Any = mesh.spawn("waits", Waits, str(tmp_path / "end"))
    assert waits.wait.call_one().get(LONG_S) == "waits"
    mesh.stop(grace_s=LONG_S).get(LONG_S)
    assert (tmp_path / "end").read_text() == "left"


def test_only_async_methods_can_overlap() -> None:
    with pytest.raises(ValueError, match="'now', which is sync, can't overlap"):

        class Bad(Actor):
            @concurrent_endpoint  # type: ignore[arg-type]
            def now(self) -> None: ...


def test_options_go_into_one_decorator() -> None:
    with pytest.raises(TypeError, match="marked twice"):

        class Bad(Actor):
            @concurrent_endpoint  # type: ignore[arg-type]
            @endpoint
            async def now(self) -> None: ...
