"""Folding the answers of many ranks into one value."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from monarch_kernel.actor import (
    Accumulator,
    Actor,
    ActorError,
    ProcMesh,
    SupervisionError,
    context,
    endpoint,
    this_host,
)

LONG_S = 60.0


class Worker(Actor):
    """Knows its rank."""

    @endpoint
    def rank(self, wait_for: str = "", then: str = "") -> int:
        rank = context().actor_instance.rank.rank
        deadline = time.monotonic() + LONG_S
        while wait_for and not Path(wait_for.format(rank)).exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if then:
            Path(then.format(rank)).touch()
        return rank

    @endpoint
    def fail(self, *ranks: int) -> int:
        rank = context().actor_instance.rank.rank
        if rank in ranks:
            raise ValueError(f"not {rank}")
        return rank

    @endpoint
    def total(self, workers: Any) -> int:
        return int(Accumulator(workers.rank, 0, lambda a, b: a + b).accumulate().get())


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    mesh = this_host().spawn_procs({"r": 3}, device="cpu")
    mesh.initialized.get(LONG_S)
    yield mesh
    mesh.stop().get()  # the session is the folder's
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def workers(procs: ProcMesh) -> Worker:
    return procs.spawn("workers", Worker)


def append(seen: list[int], rank: int) -> list[int]:
    return [*seen, rank]


def test_answers_are_folded_in_the_order_in_which_they_come(workers: Worker, tmp_path: Path) -> None:
    (tmp_path / "2").touch()
    order = Accumulator(workers.rank, [], append)
    waits, then = str(tmp_path / "{}"), str(tmp_path / "{}-done")
    future = order.accumulate(waits, then)
    for done, following in ((2, 0), (0, 1)):
        deadline = time.monotonic() + LONG_S
        while not (tmp_path / f"{done}-done").exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        workers.slice(r=done).rank.call_one().get(LONG_S)  # so its answer has come
        assert not future.done()
        (tmp_path / str(following)).touch()
    assert future.get(LONG_S) == [2, 0, 1]
    assert order.accumulate().get(LONG_S) in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0])


def test_ranks_that_fail_are_named_and_the_others_results_kept(workers: Worker) -> None:
    total = Accumulator(workers.fail, 0, lambda a, b: a + b)
    assert total.accumulate().get(LONG_S) == 3
    with pytest.raises(ActorError, match=r"workers\.fail\(\) failed on workers") as caught:
        total.accumulate(0, 2).get(LONG_S)
    assert caught.value.ranks == (0, 2)
    assert {point.rank: value for point, value in caught.value.results.items()} == {1: 1}


def test_a_combination_that_fails_is_the_callers_error(workers: Worker) -> None:
    with pytest.raises(ZeroDivisionError):
        Accumulator(workers.rank, 1, lambda a, b: a // 0).accumulate().get(LONG_S)


def test_an_accumulation_can_be_cancelled_awaited_and_made_by_an_actor(procs: ProcMesh, workers: Worker) -> None:
    import asyncio

    never = Accumulator(workers.rank, 0, lambda a, b: a + b).accumulate("/nowhere")
    with pytest.raises(TimeoutError):
        never.get(0.05)
    never.cancel()
    with pytest.raises(ActorError, match="cancelled by the caller"):
        never.get(LONG_S)

    async def wait() -> int:
        return await Accumulator(workers.rank, 10, lambda a, b: a + b).accumulate()

    assert asyncio.run(wait()) == 13
    asking = procs.slice(r=0).spawn("asking", Worker)
    assert asking.total.call_one(workers).get(LONG_S) == 3


def test_what_is_dead_is_told(procs: ProcMesh) -> None:
    mortal = procs.spawn("mortal", Worker)
    mortal.stop("gone home").get(LONG_S)
    with pytest.raises(SupervisionError, match="gone home"):
        Accumulator(mortal.rank, 0, lambda a, b: a + b).accumulate().get(LONG_S)
    with pytest.raises(TypeError, match="takes an endpoint"):
        Accumulator(3, 0, lambda a, b: a)  # type: ignore[arg-type, var-annotated]
    with pytest.raises(TypeError, match="too many positional"):
        Accumulator(mortal.rank, 0, lambda a, b: a + b).accumulate(1, 2, 3)  # type: ignore[call-arg, arg-type]
