"""A failure goes up the tree until an owner handles it; actors that end are cleaned up, children first."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch_kernel.actor as api
from monarch_kernel.actor import (
    Actor,
    ActorError,
    ProcMesh,
    SupervisionError,
    endpoint,
    this_host,
)
from tests.support.waiting import LONG_S, wait_for_files, wait_until


class Child(Actor):
    """Fails in several ways, and writes to a file how it ended."""

    def __init__(self, ends: str = "") -> None:
        self.ends = ends

    @endpoint
    def process(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self, text: str = "no good") -> None:
        raise ValueError(text)

    @endpoint
    def leave(self) -> None:
        sys.exit(3)

    @endpoint
    def die(self) -> None:
        print("the last words", flush=True)
        os._exit(17)

    def __cleanup__(self, error: BaseException | None) -> None:
        if self.ends:
            with open(self.ends, "a") as file:
                file.write(f"child {error!r}\n")


class Unborn(Actor):
    """Fails in the constructor."""

    def __init__(self) -> None:
        raise LookupError("no weights")


class Parent(Actor):
    """Owns children, and gets their failures.

    Args:
        verdict: what ``__supervise__`` returns, or raises.
        ends: the file to write a line to at the end.
    """

    def __init__(self, verdict: object = True, ends: str = "") -> None:
        self.verdict = verdict
        self.ends = ends
        self.received: list[dict[str, Any]] = []
        self.thread = threading.get_ident()
        self.busy = False

    @endpoint
    def spawn(self, procs: Any, name: str = "child", cls: type[Actor] = Child, *args: Any) -> Any:
        return procs.spawn(name, cls, *args)

    @endpoint
    def failures(self) -> list[dict[str, Any]]:
        return self.received

    @endpoint
    def ask(self, child: Any, method: str) -> str:
        """Wait for an endpoint of a child, and return the name of its error."""
        error = getattr(child, method).call().exception(LONG_S)
        return type(error).__name__

    @endpoint
    def fail_and_wait(self, child: Any) -> int:
        """Let a child fail, and wait for other answers until the failure is known."""
        child.fail.broadcast()
        wait_until(lambda: child.process.call().exception(LONG_S) and self.received, "the failure")
        return len(self.received)

    @endpoint
    def work(self, folder: str) -> None:
        self.busy = True
        Path(folder, "works").touch()
        wait_until(Path(folder, "go").exists, "the test")
        self.busy = False

    def __supervise__(self, failure: Any) -> object:
        self.received.append(
            {
                "text": failure.report(),
                "ranks": tuple(getattr(failure, "crashed_ranks", ())),
                "mesh": getattr(getattr(failure, "mesh", None), "name", ""),
                "type": type(failure).__name__,
                "alone": not self.busy and threading.get_ident() == self.thread,
            }
        )
        if isinstance(self.verdict, BaseException):
            raise self.verdict
        return self.verdict

    def __cleanup__(self, error: BaseException | None) -> None:
        if self.ends:
            with open(self.ends, "a") as file:
                file.write("parent\n")


class AsyncParent(Actor):
    """The same, asynchronous."""

    def __init__(self, verdict: bool = True, ends: str = "") -> None:
        self.verdict = verdict
        self.ends = ends
        self.received: list[str] = []

    @endpoint
    async def spawn(self, procs: Any, name: str = "child", cls: type[Actor] = Child, *args: Any) -> Any:
        return procs.spawn(name, cls, *args)

    @endpoint
    async def failures(self) -> list[str]:
        return self.received

    @endpoint
    async def fail_and_wait(self, child: Any) -> int:
        child.fail.broadcast()
        while not self.received:
            await asyncio.sleep(0.001)
        return len(self.received)

    async def __supervise__(self, failure: Any) -> bool:
        await asyncio.sleep(0)
        self.received.append(failure.report())
        return self.verdict

    async def __cleanup__(self, error: BaseException | None) -> None:
        if self.ends:
            with open(self.ends, "a") as file:
                file.write("parent\n")


class CancelledParent(AsyncParent):
    """An owner that awaits something that was cancelled."""

    async def __supervise__(self, failure: Any) -> bool:
        never = asyncio.get_running_loop().create_future()
        never.cancel()
        await never
        return True


@pytest.fixture
def doomed(procs: ProcMesh) -> Iterator[ProcMesh]:
    """Two processes that a test may end."""
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    yield mesh
    mesh.stop(grace_s=0).get(LONG_S)


@pytest.fixture(scope="module")
def one(procs: ProcMesh) -> ProcMesh:
    return procs.slice(r=0)


@pytest.fixture(scope="module")
def other(procs: ProcMesh) -> ProcMesh:
    return procs.slice(r=1)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the failures that reach the root."""
    found: list[Any] = []
    monkeypatch.setattr(api, "unhandled_fault_hook", found.append)
    return found


def received(parent: Any, count: int = 1) -> list[Any]:
    """Wait until an owner has received this many failures, and return them."""
    wait_until(lambda: len(parent.failures.call_one().get(LONG_S)) >= count, "the owner to receive a failure")
    return parent.failures.call_one().get(LONG_S)  # type: ignore[no-any-return]


# -- to the owner


@pytest.mark.parametrize("kind", [Parent, AsyncParent])
def test_the_owner_learns_that_a_broadcast_ended_its_child(one: Any, other: Any, faults: Any, kind: Any) -> None:
    parent = one.spawn("parent", kind)
    child = parent.spawn.call_one(other).get(LONG_S)
    child.fail.broadcast("no caller")
    assert "no caller" in str(received(parent)[0])
    assert parent.failures.call_one().get(LONG_S)  # the parent lives on
    assert not faults


def test_a_failure_names_the_mesh_and_the_ranks(one: Any, procs: Any, faults: Any) -> None:
    parent = one.spawn("parent", Parent)
    child = parent.spawn.call_one(procs, "kids").get(LONG_S)
    child.slice(r=1).fail.broadcast("no caller")
    failure = received(parent)[0]
    assert (failure["type"], failure["mesh"], failure["ranks"]) == ("MeshFailure", "kids", (1,))
    assert "kids" in failure["text"]
    assert "ValueError: no caller" in failure["text"]


def test_the_owner_learns_that_a_child_cannot_be_made(one: Any, other: Any, faults: Any) -> None:
    parent = one.spawn("parent", Parent)
    parent.spawn.call_one(other, "unborn", Unborn).get(LONG_S)
    assert "no weights" in received(parent)[0]["text"]


def test_the_owner_learns_that_the_process_of_a_child_died(one: Any, doomed: Any, faults: Any) -> None:
    parent = one.spawn("parent", Parent)
    child = parent.spawn.call_one(doomed).get(LONG_S)
    child.slice(r=1).die.call_one().exception(LONG_S)
    failure = received(parent)[0]
    assert failure["ranks"] == (1,)
    assert "exit code 17" in failure["text"]
    assert "the last words" in failure["text"]
    assert os.uname().nodename in failure["text"]
    os.kill(child.slice(r=0).process.call_one().get(LONG_S), signal.SIGKILL)
    assert "SIGKILL" in received(parent, 2)[1]["text"]


def test_an_error_with_a_reply_goes_to_the_caller_and_not_to_the_owner(one: Any, other: Any, faults: Any) -> None:
    parent = one.spawn("parent", Parent)
    child = parent.spawn.call_one(other).get(LONG_S)
    with pytest.raises(ActorError):
        child.fail.call_one().get(LONG_S)
    assert child.process.call_one().get(LONG_S)
    assert parent.failures.call_one().get(LONG_S) == []


def test_an_actor_that_only_has_a_handle_gets_no_failure(one: Any, other: Any, faults: Any) -> None:
    parent, holder = one.spawn("parent", Parent), one.spawn("holder", Parent)
    child = parent.spawn.call_one(other).get(LONG_S)
    assert holder.ask.call_one(child, "leave").get(LONG_S) in ("ActorError", "SupervisionError")
    assert received(parent)
    assert holder.failures.call_one().get(LONG_S) == []


def test_a_stop_of_a_child_is_not_a_failure(one: Any, other: Any, faults: Any) -> None:
    parent = one.spawn("parent", Parent)
    child = parent.spawn.call_one(other).get(LONG_S)
    child.stop().get(LONG_S)
    with pytest.raises(SupervisionError):
        child.process.call_one().get(LONG_S)
    assert parent.failures.call_one().get(LONG_S) == []
    assert not faults


# -- when the owner learns it


@pytest.mark.parametrize("kind", [Parent, AsyncParent])
def test_supervise_runs_while_an_endpoint_of_the_owner_waits(one: Any, other: Any, faults: Any, kind: Any) -> None:
    parent = one.spawn("parent", kind)
    child = parent.spawn.call_one(other).get(LONG_S)
    assert parent.fail_and_wait.call_one(child).get(LONG_S) == 1


def test_supervise_runs_on_the_thread_of_the_owner_between_messages(
    one: Any, other: Any, faults: Any, tmp_path: Path
) -> None:
    parent = one.spawn("parent", Parent)
    child = parent.spawn.call_one(other).get(LONG_S)
    works = parent.work.call_one(str(tmp_path))
    wait_for_files(tmp_path, "works")
    child.fail.broadcast()
    beside = one.spawn("beside", Parent)
    wait_until(lambda: beside.ask.call_one(child, "process").get(LONG_S) != "NoneType", "the failure to be known there")
    (tmp_path / "go").touch()
    works.get(LONG_S)
    assert received(parent)[0]["alone"]


# -- up the tree


@pytest.mark.parametrize("verdict", [False, None])
def test_a_failure_that_the_owner_does_not_handle_goes_to_its_owner(
    one: Any, other: Any, faults: Any, tmp_path: Path, verdict: object
) -> None:
    ends = str(tmp_path / "ends")
    top = one.spawn("top", Parent)
    middle = top.spawn.call_one(other, "middle", Parent, verdict, ends).get(LONG_S)
    child = middle.spawn.call_one(one).get(LONG_S)
    sibling = middle.spawn.call_one(other, "sibling", Child, ends).get(LONG_S)
    child.fail.broadcast("no caller")
    assert "no caller" in received(top)[0]["text"]
    with pytest.raises(SupervisionError):  # the parent failed, too
        middle.failures.call_one().get(LONG_S)
    # The parent stops all actors that it has spawned, a moment later.
    wait_until(lambda: sibling.process.call_one().exception(LONG_S) is not None, "the sibling to be stopped")
    assert isinstance(sibling.process.call_one().exception(LONG_S), SupervisionError)
    wait_until(lambda: Path(ends).exists() and len(Path(ends).read_text().splitlines()) == 2, "all to be cleaned up")
    assert Path(ends).read_text().splitlines()[1] == "parent"
    assert not faults


def test_an_owner_without_supervise_passes_the_failure_up(one: Any, other: Any, faults: Any) -> None:
    class Plain(Actor):
        @endpoint
        def spawn(self, procs: Any) -> Any:
            return procs.spawn("child", Child)

    top = one.spawn("top", Parent)
    middle = top.spawn.call_one(other, "middle", Plain).get(LONG_S)
    middle.spawn.call_one(one).get(LONG_S).fail.broadcast("no caller")
    assert "no caller" in received(top)[0]["text"]


def test_an_owner_that_raises_fails_with_both(one: Any, other: Any, faults: Any) -> None:
    top = one.spawn("top", Parent)
    middle = top.spawn.call_one(other, "middle", Parent, RuntimeError("not my problem")).get(LONG_S)
    middle.spawn.call_one(one).get(LONG_S).fail.broadcast("no caller")
    text = received(top)[0]["text"]
    assert "not my problem" in text
    assert "no caller" in text


# -- at the root


def test_an_owner_that_awaits_a_cancelled_future_fails(one: Any, other: Any, faults: list[Any]) -> None:
    parent = one.spawn("parent", CancelledParent)
    child = parent.spawn.call_one(other).get(LONG_S)
    child.fail.broadcast("no caller")
    wait_until(lambda: faults, "the hook")
    assert "CancelledError" in faults[0].report()
    assert "no caller" in faults[0].report()
    with pytest.raises(api.SupervisionError, match="CancelledError"):
        parent.failures.call_one().get(LONG_S)


def test_an_unhandled_failure_reaches_the_hook_once(one: Any, faults: list[Any]) -> None:
    child = one.spawn("orphan", Child)
    child.fail.broadcast("no caller")
    wait_until(lambda: faults, "the hook to be called")
    assert isinstance(faults[0], api.MeshFailure)  # type: ignore[attr-defined,unused-ignore]
    assert "no caller" in faults[0].report()
    assert faults[0].mesh.name == "orphan"
    with pytest.raises(SupervisionError, match="no caller"):
        child.process.call_one().get(LONG_S)
    assert len(faults) == 1


def test_the_hook_gets_a_failure_that_no_owner_handles(one: Any, other: Any, faults: list[Any]) -> None:
    top = one.spawn("top", Parent, False)
    child = top.spawn.call_one(other).get(LONG_S)
    child.fail.broadcast("no caller")
    wait_until(lambda: faults, "the hook to be called")
    assert "no caller" in faults[0].report()
    with pytest.raises(SupervisionError):
        top.failures.call_one().get(LONG_S)
    assert len(faults) == 1


def test_the_hook_is_read_when_the_fault_happens(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[Any] = []
    second: list[Any] = []
    monkeypatch.setattr(api, "unhandled_fault_hook", first.append)
    child = one.spawn("orphan", Child)
    child.process.call_one().get(LONG_S)
    monkeypatch.setattr(api, "unhandled_fault_hook", second.append)
    child.fail.broadcast()
    wait_until(lambda: second, "the hook to be called")
    assert not first


def test_the_hook_gets_the_death_of_a_process(doomed: Any, faults: list[Any]) -> None:
    child = doomed.spawn("orphans", Child)
    child.slice(r=1).die.call_one().exception(LONG_S)
    wait_until(lambda: faults, "the hook to be called")
    assert faults[0].crashed_ranks == (1,)
    assert "exit code 17" in faults[0].report()
    assert "the last words" in faults[0].report()


def test_a_hook_that_raises_has_no_other_effect(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    def bad(failure: Any) -> None:
        called.append(failure)
        raise RuntimeError("a bad hook")

    monkeypatch.setattr(api, "unhandled_fault_hook", bad)
    for count in (1, 2):
        one.spawn("orphan", Child).fail.broadcast()
        wait_until(lambda count=count: len(called) == count, "the hook to be called")  # type: ignore[misc]
    assert one.run("1").get(LONG_S).item() == 1


# -- the end


def test_spawned_actors_are_stopped_before_their_owner_is_cleaned_up(one: Any, other: Any, tmp_path: Path) -> None:
    ends = tmp_path / "ends"
    parent = one.spawn("parent", Parent, True, str(ends))
    child = parent.spawn.call_one(other, "child", Child, str(ends)).get(LONG_S)
    child.process.call_one().get(LONG_S)
    parent.stop().get(LONG_S)
    assert ends.read_text().splitlines() == ["child None", "parent"]


@pytest.mark.parametrize("kind", [Parent, AsyncParent])
def test_actors_of_processes_that_are_stopped_together_clean_up(doomed: Any, tmp_path: Path, kind: Any) -> None:
    """An owner does not wait for a child whose process ends at the same moment, because no message would come from it."""
    ends = tmp_path / "ends"
    parent = doomed.slice(r=0).spawn("parent", kind, True, str(ends))
    child = parent.spawn.call_one(doomed.slice(r=1), "child", Child, str(ends)).get(LONG_S)
    child.process.call_one().get(LONG_S)
    doomed.stop(grace_s=LONG_S).get(LONG_S)
    wait_until(lambda: ends.exists() and sorted(ends.read_text().splitlines()) == ["child None", "parent"], "cleanup")
