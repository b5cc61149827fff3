"""What ranks say that their actors do, whoever has asked for it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from monarch_kernel.actor import Actor, ProcMesh, concurrent_endpoint, endpoint, this_host
from monarch_kernel.ui.stacks import stacks_text

LONG_S = 60.0


class Napper(Actor):
    @endpoint
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


class Asker(Actor):
    @endpoint
    def ask(self, napper: Any, seconds: float) -> None:
        napper.nap.call(seconds).get()


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


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    mesh = this_host().spawn_procs({"gpus": 2}, device="cpu")
    mesh.initialized.get(LONG_S)
    yield mesh
    mesh.stop().get()  # the session is the folder's
    cloudpickle.unregister_pickle_by_value(module)


def told(procs: ProcMesh, *texts: str) -> str:
    """What the ranks do, as soon as that has all these texts in it."""
    deadline = time.monotonic() + LONG_S
    while True:
        found = stacks_text(procs.view(), procs.doing().get(LONG_S))
        if all(text in found for text in texts):
            return found
        assert time.monotonic() < deadline, found


def test_a_broadcast_is_work(procs: ProcMesh) -> None:
    nappers: Any = procs.spawn("nappers", Napper)
    nappers.nap.broadcast(0.5)
    text = told(procs, "[0-1] actor nappers", "time.sleep(seconds)")
    assert "2 ranks, 2 busy" in text
    nappers.initialized.get(LONG_S)
    assert told(procs, "nothing runs") == f"{procs.name}: nothing runs on [0-1]"


def test_so_is_what_another_rank_has_asked_for(procs: ProcMesh) -> None:
    nappers: Any = procs.slice(gpus=1).spawn("nappers", Napper)
    asker: Any = procs.slice(gpus=0).spawn("asker", Asker)
    asker.ask.broadcast(nappers, 0.5)
    told(
        procs, "2 busy", "[0] actor asker", "napper.nap.call(seconds).get()", "[1] actor nappers", "time.sleep(seconds)"
    )
    asker.initialized.get(LONG_S)


def test_an_async_actor_that_was_made_and_not_called_does_nothing(procs: ProcMesh) -> None:
    gates: Any = procs.spawn("gates", Gate)
    gates.initialized.get(LONG_S)
    told(procs, "nothing runs")


def test_calls_that_overlap_are_told_one_by_one(procs: ProcMesh) -> None:
    gate: Any = procs.slice(gpus=0).spawn("gate", Gate)
    stays, enters = gate.stay.call_one(), gate.enter.call_one()
    text = told(procs, "in stay", "in enter")
    assert text.count("actor gate") == 2
    gate.open.call_one().get(LONG_S)
    stays.get(LONG_S)
    enters.get(LONG_S)
