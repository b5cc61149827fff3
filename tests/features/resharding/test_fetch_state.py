"""The state of a mesh is read into another process, in full, however the ranks shard it."""

from __future__ import annotations

import pytest
import torch

from monarch_kernel.actor import Actor, ProcMesh, endpoint
from monarch_kernel.errors import MoveError, RemoteError
from tests.features.resharding.conftest import run
from tests.support.waiting import LONG_S

FSDP = "for layer in model: fully_shard(layer, mesh=mesh._flatten('all'))"


class Reader(Actor):
    @endpoint
    def read(self, trainer: ProcMesh, names: list[str]) -> dict[str, object]:
        return trainer.fetch_state(names)


@pytest.mark.parametrize("sharding", ["", FSDP], ids=["replicated", "fsdp"])
def test_a_model_and_a_number_come_in_full(meshes: tuple[ProcMesh, ProcMesh], sharding: str) -> None:
    trainer, _ = meshes
    run(trainer, f"model = make(0)\n{sharding}\nstep = 7")
    expected = run(trainer, "full(make(0))")[0]
    found = trainer.fetch_state(["model", "step"])
    assert found.pop("step") == 7
    assert found.keys() == {f"model.{name}" for name in expected}
    assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in expected.items())
    assert run(trainer, "len(PROCESS.client.exports)") == (0, 0, 0, 0)


def test_an_actor_reads_the_state_of_a_mesh_that_it_has_a_handle_on(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, generator = meshes
    run(trainer, f"model = make(3)\n{FSDP}")
    reader = generator.spawn("reader", Reader)
    expected = run(trainer, "full(make(3))")[0]
    for found in reader.read.call(trainer, ["model"]).get(LONG_S).values():
        assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in expected.items())
    reader.stop().get(LONG_S)
    assert run(trainer, "len(PROCESS.client.exports)") == (0, 0, 0, 0)


def test_tied_parameters_are_read_once(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, _ = meshes
    run(
        trainer,
        "model = nn.ModuleDict({'a': nn.Linear(3, 3), 'b': nn.Linear(3, 3)}); model['b'].weight = model['a'].weight",
    )
    found = trainer.fetch_state("model")
    assert found["model.a.weight"] is found["model.b.weight"]
    assert found["model.a.bias"] is not found["model.b.bias"]


def test_a_check_sees_shapes_and_can_refuse_before_the_read(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, _ = meshes
    run(trainer, f"model = make(0)\n{FSDP}\nstep = 1")
    seen = []

    def check(tensors: object) -> None:
        seen.append(tensors)
        raise MoveError("not these")

    with pytest.raises(MoveError, match="not these"):
        trainer.fetch_state(["model", "step"], check=check)
    assert seen[0]["model.0.weight"] == ("float32", (10, 6))
    assert "step" not in seen[0]
    assert run(trainer, "len(PROCESS.client.exports)") == (0, 0, 0, 0)


def test_ranks_that_disagree_and_names_that_do_not_exist_are_reported(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, _ = meshes
    run(trainer, "x = torch.zeros(2 + dist.get_rank() // 2)")
    with pytest.raises(MoveError, match=r"fetching 'x' from trainer failed\n  x is float32\[2\] on trainer\[0-1\]"):
        trainer.fetch_state("x")
    with pytest.raises(RemoteError, match="name 'nowhere' is not defined"):
        trainer.fetch_state("nowhere")
