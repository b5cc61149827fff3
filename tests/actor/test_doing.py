"""Reports of ranks about the work of their actors, whichever process called these."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from monarch_kernel.actor import Actor, ProcMesh, concurrent_endpoint, endpoint
from monarch_kernel.notebook.view.stacks import stacks_text
from tests.support.actors import Worker
from tests.support.waiting import LONG_S, wait_until

PROCS = {"gpus": 2}


class Client(Actor):
    @endpoint
    def ask(self, other: Any, path: str) -> None:
        other.wait_for.call(path).get()


class Gate(Actor):
    def __init__(self) -> None:
        self.opened = asyncio.Event()

    @concurrent_endpoint
    async def enter(self) -> None:
        await self.opened.wait()

    @concurrent_endpoint
    async def stay(self) -> None:
        await self.opened.wait()

    @concurrent_endpoint
    async def open(self) -> None:
        self.opened.set()


def shown(procs: ProcMesh, *texts: str) -> str:
    """Return the report of the ranks as soon as it contains all these texts."""

    def now() -> str | None:
        found = stacks_text(procs.view(), procs.doing().get(LONG_S))
        return found if all(text in found for text in texts) else None

    return wait_until(now, f"{texts} to be shown") or ""


def test_a_broadcast_is_work(procs: ProcMesh, tmp_path: Path) -> None:
    workers: Any = procs.spawn("workers", Worker)
    workers.wait_for.broadcast(str(tmp_path / "go"))
    text = shown(procs, "[0-1] actor workers", "wait_until(Path(path).exists, path)")
    assert "2 ranks, 2 busy" in text
    (tmp_path / "go").touch()
    workers.initialized.get(LONG_S)
    assert shown(procs, "nothing runs") == "t: nothing runs on [0-1]"


def test_a_call_from_another_rank_is_work(procs: ProcMesh, tmp_path: Path) -> None:
    workers: Any = procs.slice(gpus=1).spawn("workers", Worker)
    client: Any = procs.slice(gpus=0).spawn("client", Client)
    client.ask.broadcast(workers, str(tmp_path / "go"))
    shown(
        procs,
        "2 busy",
        "[0] actor client",
        "other.wait_for.call(path).get()",
        "[1] actor workers",
        "wait_until(Path(path).exists, path)",
    )
    (tmp_path / "go").touch()
    client.initialized.get(LONG_S)


def test_an_idle_async_actor_does_nothing(procs: ProcMesh) -> None:
    gates: Any = procs.spawn("gates", Gate)
    gates.initialized.get(LONG_S)
    shown(procs, "nothing runs")


def test_overlapping_calls_are_listed_one_by_one(procs: ProcMesh) -> None:
    gate: Any = procs.slice(gpus=0).spawn("gate", Gate)
    stays, enters = gate.stay.call_one(), gate.enter.call_one()
    text = shown(procs, "in stay", "in enter")
    assert text.count("actor gate") == 2
    gate.open.call_one().get(LONG_S)
    stays.get(LONG_S)
    enters.get(LONG_S)
