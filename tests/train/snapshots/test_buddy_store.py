"""Snapshots belong to the right loop, and a rank drops old ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monarch_kernel.net.wire.messages import Payload, Rewind
from monarch_kernel.runtime.worker.executor import working
from monarch_kernel.train.snapshots import capture
from monarch_kernel.train.snapshots.buddy_store import Series, Snapshots, _Kept


@pytest.fixture
def rank() -> Any:
    spec = SimpleNamespace(proc=0, rank=0, world_size=2, local_world_size=2)
    return SimpleNamespace(spec=spec, extend=lambda handlers, **options: None, rewind=None)


@pytest.fixture
def snapshots(rank: Any) -> Iterator[Snapshots]:
    return Snapshots(rank)


def test_two_actors_of_a_process_start_loops_at_once(snapshots: Snapshots) -> None:
    meet, found = threading.Barrier(2), {}

    def act(request: int) -> None:
        working.set(SimpleNamespace(current=request))  # type: ignore[arg-type]
        for _ in range(2):
            snapshots.begin({"losses": []}, 10, 2)
            meet.wait()
            found[request] = snapshots.take_series()
            meet.wait()

    threads = [threading.Thread(target=act, args=(request,)) for request in (7, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for request in (7, 9):
        series: Series = found[request]
        assert (series.request, series._number) == (request, 2)


def test_a_snapshot_for_a_later_loop_is_kept_during_earlier_loops(snapshots: Snapshots, rank: Any) -> None:
    kept = _Kept(Payload(), ())
    for step in (5, 10):
        snapshots._file(0, (1, 2, step), kept, 2)
    rank.rewind = Rewind(0, (1, 2, 10), (0, 1), True)
    for step in (0, 5, 10):
        snapshots._file(0, (3, 1, step), kept, 2)
    assert sorted(snapshots._kept[0]) == [(1, 2, 10), (3, 1, 5), (3, 1, 10)]
    for step in (10, 15):
        snapshots._file(0, (3, 2, step), kept, 2)
    assert sorted(snapshots._kept[0]) == [(3, 2, 10), (3, 2, 15)]


def test_a_rollback_restores_no_model_that_was_replaced(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[Any] = []
    monkeypatch.setattr(capture, "put_back", lambda things, captured: restored.append(things))
    monkeypatch.setattr(snapshots, "_fetch", lambda rewind: None)
    model = torch.nn.Linear(2, 2)
    snapshots.begin({"model": model}, 10, 2)
    snapshots.take_series()
    snapshots._rewind = Rewind(0, (1, 2, 10), (0, 1), False)
    snapshots.put_back_now()
    assert restored.pop()["model"] is model
    model.itself = [model]  # a cycle, as modules of FSDP have
    del model
    snapshots.put_back_now()
    assert not restored
