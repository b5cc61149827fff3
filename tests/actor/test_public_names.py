"""The public names of the actor API, and the behavior that needs no processes."""

from __future__ import annotations

import pickle

import pytest

import monarch_kernel.actor as api
from monarch_kernel.actor import Extent, Point, ValueMesh, endpoint

NAMES = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMesh",
    "Channel",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "Point",
    "Port",
    "PortReceiver",
    "ProcMesh",
    "SupervisionError",
    "ValueMesh",
    "as_endpoint",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "endpoint",
    "get_or_spawn_controller",
    "send",
    "shutdown_context",
    "this_host",
    "this_proc",
    "unhandled_fault_hook",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_exists_and_is_public(name: str) -> None:
    assert hasattr(api, name)
    assert name in api.__all__


def test_a_point_is_a_mapping_with_a_rank_and_an_extent() -> None:
    point = Extent({"gpus": 4}).point(1)
    assert isinstance(point, Point)
    assert (dict(point), point["gpus"], point.rank, dict(point.extent)) == ({"gpus": 1}, 1, 1, {"gpus": 4})
    assert str(point) == "{'gpus': 1/4}"


def test_the_decorator_takes_options() -> None:
    assert callable(endpoint())
    endpoint(propagate=None, explicit_response_port=False)(lambda self: None)
    endpoint(explicit_response_port=True)(lambda self, port: None)


def test_decorators_are_for_methods() -> None:
    with pytest.raises(TypeError, match="marks methods"):
        endpoint(3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="must take self"):

        @endpoint  # type: ignore[arg-type]
        def bare() -> None: ...


def test_equal_values_are_pickled_once() -> None:
    values = ValueMesh(Extent({"r": 64}), ["x" * 1000 for _ in range(64)])
    assert len(pickle.dumps(values)) < 4000
