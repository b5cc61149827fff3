"""Errors in scripts show the user's line, not the library code that raised them, and what to write instead."""

from __future__ import annotations

import traceback

import pytest

from monarch_kernel.actor import ActorError, ProcMesh, this_host
from tests.support.actors import Worker
from tests.support.waiting import LONG_S

PROCS = {"r": 1}


def test_a_traceback_is_short_and_does_not_grow(procs: ProcMesh) -> None:
    future = procs.spawn("worker", Worker).fail.call()
    for _ in range(3):
        with pytest.raises(ActorError) as raised:
            future.get(LONG_S)
        assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][1:] == ["get"]


def test_sizes_without_names_are_refused_with_the_reason(procs: ProcMesh) -> None:
    with pytest.raises(TypeError, match=r"per_host must map names of axes to sizes, such as \{'gpus': 4\}, not 4"):
        this_host().spawn_procs(4)  # type: ignore[arg-type]
