"""Folding the answers of many ranks into one value."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import (
    Accumulator,
    Actor,
    ActorError,
    ProcMesh,
    SupervisionError,
    endpoint,
)
from tests.support.actors import Worker
from tests.support.waiting import LONG_S

PROCS = {"r": 3}


class Folder(Actor):
    """Folds the answers of others."""

    @endpoint
    def total(self, workers: Any) -> int:
        return int(Accumulator(workers.rank, 0, lambda a, b: a + b).accumulate().get())


@pytest.fixture(scope="module")
def workers(procs: ProcMesh) -> Worker:
    return procs.spawn("workers", Worker)


def append(seen: list[int], rank: int) -> list[int]:
    return [*seen, rank]


def test_answers_are_folded_in_the_order_of_arrival(workers: Worker, tmp_path: Path) -> None:
    order = Accumulator(workers.wait_by_rank, [], append)
    future = order.accumulate(str(tmp_path))
    for rank in (2, 0, 1):
        assert not future.done()
        (tmp_path / str(rank)).touch()
        workers.slice(r=rank).rank.call_one().get(LONG_S)  # the rank answers this after the folded call
    assert future.get(LONG_S) == [2, 0, 1]
    again = Accumulator(workers.rank, [], append)
    assert [sorted(again.accumulate().get(LONG_S)) for _ in range(2)] == [[0, 1, 2]] * 2


def test_an_error_names_the_failed_ranks_and_keeps_the_other_results(workers: Worker) -> None:
    total = Accumulator(workers.fail, 0, lambda a, b: a + b)
    assert total.accumulate("no good", -1).get(LONG_S) == 3  # no rank fails
    with pytest.raises(ActorError, match=r"workers\.fail\(\) failed on workers") as caught:
        total.accumulate("no good", 0, 2).get(LONG_S)
    assert caught.value.ranks == (0, 2)
    assert {point.rank: value for point, value in caught.value.results.items()} == {1: 1}


def test_an_error_in_combine_is_raised_to_the_caller(workers: Worker) -> None:
    with pytest.raises(ZeroDivisionError):
        Accumulator(workers.rank, 1, lambda a, b: a // 0).accumulate().get(LONG_S)


def test_an_accumulation_can_be_cancelled_awaited_and_started_by_an_actor(procs: ProcMesh, workers: Worker) -> None:
    never = Accumulator(workers.wait_for, 0, lambda a, b: a + b).accumulate("/nowhere")
    with pytest.raises(TimeoutError):
        never.get(0.05)
    never.cancel()
    with pytest.raises(ActorError, match="cancelled by the caller"):
        never.get(LONG_S)

    async def wait() -> int:
        return await Accumulator(workers.rank, 10, lambda a, b: a + b).accumulate()

    assert asyncio.run(wait()) == 13
    asking = procs.slice(r=0).spawn("asking", Folder)
    assert asking.total.call_one(workers).get(LONG_S) == 3


def test_an_accumulation_on_a_stopped_mesh_and_misuse_raise(procs: ProcMesh) -> None:
    mortal = procs.spawn("mortal", Worker)
    mortal.stop("gone home").get(LONG_S)
    with pytest.raises(SupervisionError, match="gone home"):
        Accumulator(mortal.rank, 0, lambda a, b: a + b).accumulate().get(LONG_S)
    with pytest.raises(TypeError, match="takes an endpoint"):
        Accumulator(3, 0, lambda a, b: a)  # type: ignore[arg-type, var-annotated]
    with pytest.raises(TypeError, match="too many positional"):
        Accumulator(mortal.rank, 0, lambda a, b: a + b).accumulate(1, 2, 3)  # type: ignore[call-arg, arg-type]
