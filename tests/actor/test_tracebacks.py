"""What Python shows of an error that a future raises: the user's line, not how the error was made."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

import cloudpickle
import pytest

from monarch_kernel.actor import Actor, ActorError, ProcMesh, endpoint, shutdown_context, this_host

LONG_S = 30.0


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
    shutdown_context().get()
    cloudpickle.unregister_pickle_by_value(module)


def test_it_is_short_and_does_not_grow(procs: ProcMesh) -> None:
    future = procs.spawn("faulty", Faulty).fail.call()
    for _ in range(3):
        with pytest.raises(ActorError) as raised:
            future.get(LONG_S)
        assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][1:] == ["get"]
