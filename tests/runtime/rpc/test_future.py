"""A resolved future keeps only its result alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from monarch_kernel.errors import MeshDownError
from monarch_kernel.runtime.rpc.future import Future


class Held:
    """A large object in the frame of a caller that waits."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def failed(error: Exception) -> Future[None]:
    future: Future[None] = Future.resolved(None)
    future._error = error
    return future


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", [ValueError, MeshDownError])
def test_an_error_does_not_keep_objects_of_its_catcher_alive(kind: type[Exception]) -> None:
    def catch() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(kind, match="no"):
            failed(kind("no")).get()
        return weakref.ref(held)

    assert catch()() is None
