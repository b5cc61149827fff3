"""What is shown of errors in scripts: the user's line, not how the error was made, and what to write instead."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

import cloudpickle
import pytest

from monarch_kernel.actor import Actor, ActorError, ProcMesh, endpoint, this_host

LONG_S = 60.0


class Faulty(Actor):
    @endpoint
    def fail(self) -> None:
        raise ValueError("no")


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    mesh.initialized.get(LONG_S)
    yield mesh
    mesh.stop().get()  # the session is the folder's
    cloudpickle.unregister_pickle_by_value(module)


def test_it_is_short_and_does_not_grow(procs: ProcMesh) -> None:
    future = procs.spawn("faulty", Faulty).fail.call()
    for _ in range(3):
        with pytest.raises(ActorError) as raised:
            future.get(LONG_S)
        assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][1:] == ["get"]


def test_sizes_without_names_are_refused_in_words(procs: ProcMesh) -> None:
    with pytest.raises(TypeError, match=r"sizes of axes by their names, such as \{'gpus': 4\}, not 4"):
        this_host().spawn_procs(4)  # type: ignore[arg-type]
