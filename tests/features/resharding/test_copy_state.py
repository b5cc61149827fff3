"""The state of one mesh is copied into another, however both shard its tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from monarch_kernel.actor import ProcMesh, SupervisionError, this_host
from monarch_kernel.errors import MoveError, RemoteError
from tests.features.resharding.conftest import run
from tests.support.waiting import LONG_S


def is_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


FSDP = "for layer in model: fully_shard(layer, mesh=mesh._flatten('all'))"
TP = 'parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})\n'
SOURCES = {
    "replicated": "",
    "fsdp": FSDP,
    "fsdp and tp": TP + "for layer in model: fully_shard(layer, mesh=mesh['dp'])",
}
BY_HAND = """
for layer, dim in ((model[0], 0), (model[2], 1)):
    layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(dim)]))
"""
WRAPPED = """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
model = nn.parallel.DistributedDataParallel(checkpoint_wrapper(model))
"""
TARGETS = {"replicated": "", "tp": BY_HAND, "wrapped": WRAPPED}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
def test_a_model_is_copied_to_ranks_that_shard_it_differently(
    meshes: tuple[ProcMesh, ProcMesh], source: str, target: str
) -> None:
    trainer, generator = meshes
    run(trainer, "model = make(0)\n" + SOURCES[source])
    run(generator, "model = make(1)\n" + TARGETS[target] + "\nids = [id(p) for p in model.parameters()]")
    moved = generator.copy_state(trainer, "model")
    assert moved.data_paths.keys() == {"memory"}
    assert (moved.missing, moved.unexpected) == ((), ())
    if target != "tp":
        assert moved.nbytes == 2 * sum(each.nbytes for each in run(trainer, "full(model)")[0].values())
    expected = run(trainer, "full(make(0))")[0]
    for got in run(generator, "full(model.module if hasattr(model, 'module') else model)"):
        assert is_equal(got, expected)
    assert run(generator, "ids == [id(p) for p in model.parameters()]") == (True, True)
    assert run(trainer, "len(PROCESS.client.exports)") == (0, 0, 0, 0)


def test_a_sharded_model_is_filled_and_continues_to_train(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, generator = meshes
    make = "\nopt = torch.optim.SGD(model.parameters(), lr=0.1)"
    step = "\nopt.zero_grad(); torch.manual_seed(5); model(torch.randn(4, 6)).sum().backward(); opt.step()"
    run(generator, "model = make(0)" + make + step)
    run(trainer, "model = make(1)\n" + FSDP + make + "\nmodel(torch.randn(4, 6))")  # gathered now
    trainer.copy_state(generator, "model")
    assert is_equal(run(trainer, "full(model)")[3], run(generator, "full(model)")[0])
    run(generator, step)
    ours, theirs = run(trainer, step + "\nfull(model)")[0], run(generator, "full(model)")[0]
    assert all(torch.allclose(ours[key], theirs[key]) for key in theirs)


def test_autograd_notices_the_write(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, generator = meshes
    run(trainer, "x = torch.ones(3)")
    run(generator, "x = torch.zeros(3, requires_grad=True); y = (x * x).sum()")
    generator.copy_state(trainer, "x")
    with pytest.raises(RemoteError, match="modified by an inplace operation"):
        run(generator, "y.backward()")


PLACEMENTS = [
    ("[Shard(0), Shard(1)]", "[Shard(1)]"),
    ("[Shard(0), Shard(0)]", "[Shard(0)]"),
    ("[Replicate(), Shard(2)]", "[Replicate()]"),
    ("[Shard(1), Replicate()]", "[Shard(2)]"),
]


@pytest.mark.parametrize(("source", "target"), PLACEMENTS)
def test_dtensors_of_uneven_shards(meshes: tuple[ProcMesh, ProcMesh], source: str, target: str) -> None:
    trainer, generator = meshes
    tensor = "distribute_tensor(torch.arange(5 * 3 * 7).reshape(5, 3, 7) * SIGN, mesh, HOW)"
    run(trainer, "x = " + tensor.replace("SIGN", "1").replace("HOW", source))
    run(generator, "x = " + tensor.replace("SIGN", "-1").replace("HOW", target))
    generator.copy_state(trainer, "x")
    assert run(generator, "torch.equal(x.full_tensor(), torch.arange(105).reshape(5, 3, 7))") == (True, True)


def test_partial_dtensors_are_refused(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, generator = meshes
    run(trainer, "x = DTensor.from_local(torch.ones(3), mesh, [Partial(), Replicate()])")
    run(generator, "x = torch.zeros(3)")
    with pytest.raises(RemoteError, match=r"x is a DTensor of .*redistribute"):
        generator.copy_state(trainer, "x")
    assert run(generator, "x.tolist()") == ([0.0] * 3,) * 2


def test_dicts_numbers_and_other_names(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, generator = meshes
    run(trainer, "state = {'model': {'w': torch.arange(4.)}, 'steps': [7, 'warm'], 'betas': (0.9, 0.99), 'none': None}")
    run(
        generator,
        "mine = {'model': {'w': torch.zeros(4)}, 'steps': [0, ''], 'betas': (0., 0.), 'none': 1}; w = mine['model']['w']",
    )
    moved = generator.copy_state(trainer, {"state": "mine"})
    assert moved.tensors == 2
    assert repr(moved).startswith("<Moved 32 B of 2 tensors in 0.")
    assert (
        run(generator, "w.tolist(), mine['steps'], mine['betas'], mine['none']")
        == (([0, 1, 2, 3], [7, "warm"], (0.9, 0.99), None),) * 2
    )
    run(trainer, "import numpy as np; a = np.arange(6, dtype='i4').reshape(2, 3); n = rank")
    run(generator, "import numpy as np; a = np.zeros((2, 3), 'i8'); n = -1")
    generator.copy_state(trainer, ["a"], cast=True)
    assert run(generator, "a.tolist()") == ([[0, 1, 2], [3, 4, 5]],) * 2
    with pytest.raises(MoveError, match=r"n is 0 on trainer\[0\] and 1 on trainer\[1\].*do not agree"):
        generator.copy_state(trainer, "n")
    generator.copy_state(trainer.slice(dp=1, tp=0), "n")
    assert run(generator, "n") == (2, 2)
    with pytest.raises(ValueError, match="into one"):
        generator.copy_state(trainer, {"a": "x", "n": "x"})


def test_dtypes_are_converted_only_on_request(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, generator = meshes
    run(trainer, "model = make(0)\n" + FSDP)
    run(generator, "model = make(1).to(torch.bfloat16)\n" + BY_HAND + "\nbefore = full(model)")
    with pytest.raises(MoveError, match=r"model.0.weight is float32\[10, 6\] on trainer, and bfloat16.*cast=True"):
        generator.copy_state(trainer, "model")
    assert run(generator, "all(torch.equal(v, before[k]) for k, v in full(model).items())") == (True, True)
    generator.copy_state(trainer, "model", cast=True)
    assert is_equal(run(generator, "full(model)")[1], run(trainer, "full(make(0).to(torch.bfloat16))")[1])


def test_a_mismatch_is_named_and_changes_nothing(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, generator = meshes
    run(trainer, "model = make(0); model.only_here = nn.Linear(2, 2, bias=False)")
    run(
        generator,
        "model = make(1); model.lacks = nn.Linear(1, 1, bias=False); before = copy.deepcopy(model.state_dict())",
    )
    run(generator.slice(gpus=1), "model[0] = nn.Linear(6, 11); before = copy.deepcopy(model.state_dict())")
    with pytest.raises(MoveError) as raised:
        generator.copy_state(trainer, "model")
    assert str(raised.value).splitlines() == [
        "copying 'model' from trainer to generator: nothing was changed",
        "  model.0.weight is float32[10, 6] on trainer, and float32[11, 6] on generator[1]",
        "  model.0.bias is float32[10] on trainer, and float32[11] on generator[1]",
        "  not on trainer: 'model.lacks.weight' (strict=False leaves them alone)",
        "  not on generator: 'model.only_here.weight' (strict=False leaves them out)",
    ]
    same = "all(torch.equal(v, before[k]) for k, v in model.state_dict().items())"
    assert run(generator, same) == (True, True)
    moved = generator.slice(gpus=0).copy_state(trainer, "model", strict=False)
    assert (moved.missing, moved.unexpected) == (("model.lacks.weight",), ("model.only_here.weight",))
    assert "1 missing; 1 unexpected" in repr(moved)
    assert run(generator, same) == (False, True)
    assert run(trainer, "len(PROCESS.client.exports)") == (0, 0, 0, 0)


def test_parts_that_are_missing_are_counted(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, generator = meshes
    run(trainer, "x = distribute_tensor(torch.arange(8.), mesh, [Shard(0), Replicate()])")
    run(generator, "x = torch.zeros(8)")
    with pytest.raises(MoveError, match="the ranks of trainer have 4 of its 8 elements"):
        generator.copy_state(trainer.slice(dp=0), "x")
    generator.copy_state(trainer.slice(tp=1), "x")
    assert run(generator, "x.tolist()") == ([*map(float, range(8))],) * 2


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("pass", "name 'nothing' is not defined"),
        ("nothing = {'a': {1: object()}}", r"nothing\.a\.1 is an object: only modules, tensors, arrays"),
        ("nothing = {'a': torch.zeros(2, device='meta')}", r"nothing\.a: the tensor is on meta"),
        ("nothing = {'a': {'b': 1}, 'a.b': 2}", r"nothing\.a\.b occurs twice"),
    ],
)
def test_unsupported_objects_are_named(meshes: tuple[ProcMesh, ProcMesh], code: str, error: str) -> None:
    trainer, generator = meshes
    run(trainer, "nothing = 1; del nothing\n" + code)
    run(generator, "nothing = {'a': torch.zeros(2)}")
    with pytest.raises(RemoteError, match=error) as raised:
        generator.copy_state(trainer, "nothing")
    assert not raised.value.primary.traceback  # without frames of this package


def test_tied_parameters_are_one(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, generator = meshes
    run(trainer, "model = {'embed': torch.arange(6.)}")
    run(generator, "w = torch.zeros(6); model = {'embed': w, 'head': w}")
    assert generator.copy_state(trainer, "model", strict=False).missing == ()
    assert generator.copy_state(generator.slice(gpus=0), "model").nbytes == 6 * 4  # rank 0 has it
    assert run(generator, "w.tolist()") == ([*map(float, range(6))],) * 2


def test_copies_that_cross_do_not_wait_for_each_other(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, generator = meshes
    run(trainer, "x = torch.ones(1000); y = torch.zeros(1000)")
    run(generator, "x = torch.zeros(1000); y = torch.ones(1000)")

    def copy(target: ProcMesh, source: ProcMesh, name: str) -> Callable[[], None]:
        return lambda: [target.copy_state(source, name) for _ in range(20)] and None

    threads = [
        threading.Thread(target=copy(generator, trainer, "x")),
        threading.Thread(target=copy(trainer, generator, "y")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert run(trainer, "int(y.sum())") == (1000,) * 4
    assert run(generator, "int(x.sum())") == (1000,) * 2


# -- failures during a copy

TRAP = """
class Trap(dict):
    looks = 0
    def items(self):
        Trap.looks += 1
        if Trap.looks == 2:  # the first look describes it, the second fills it
            spring()
        return super().items()
x = Trap(w=torch.zeros(1 << 20))
"""


def test_a_source_that_dies_during_a_copy_is_named(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    _, generator = meshes
    source = this_host().spawn_procs({"gpus": 2}, name="source", device="cpu")
    (_, pid) = run(source, "import os, torch\nx = {'w': torch.ones(1 << 20)}\nos.getpid()")
    spring = f"""
def spring():
    if rank == 0:
        os.kill({pid}, 9)
    while lives():
        time.sleep(0.001)
def lives():
    try:
        return ') Z' not in pathlib.Path('/proc/{pid}/stat').read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
"""
    run(generator, TRAP + spring)
    with pytest.raises(SupervisionError) as raised:
        generator.copy_state(source, "x")
    assert raised.value.ranks == (1,)
    assert "SIGKILL" in str(raised.value)
    assert "'x' on generator is undefined now" in str(raised.value)
    run(generator, "x = {'w': torch.zeros(1 << 20)}")
    with pytest.raises(SupervisionError):
        generator.copy_state(source, "x")
    generator.copy_state(source.slice(gpus=0), "x")
    assert run(generator, "int(x['w'].sum())") == (1 << 20,) * 2
    source.stop(grace_s=0).get()


def test_a_target_that_dies_during_a_copy_is_named(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, _ = meshes
    target = this_host().spawn_procs({"gpus": 2}, name="target", device="cpu")
    run(trainer, "x = {'w': torch.ones(1 << 20)}")
    run(target, "import os, torch" + TRAP + "def spring():\n    if rank == 1: os._exit(7)\n")
    with pytest.raises(SupervisionError, match="'x' on target is undefined now") as raised:
        target.copy_state(trainer, "x")
    assert raised.value.ranks == (1,)
    assert run(trainer, "len(PROCESS.client.exports)") == (0, 0, 0, 0)
    target.stop(grace_s=0).get()


def test_a_source_that_writes_during_a_copy_is_named(meshes: tuple[ProcMesh, ProcMesh], tmp_path: Path) -> None:
    trainer, generator = meshes
    run(
        trainer,
        f"""
import threading
x = {{'w': torch.ones(1 << 20), 'v': torch.ones(2)}}
def write():
    while not pathlib.Path('{tmp_path}/go').exists():
        time.sleep(0.001)
    with torch.no_grad():
        x['w'].add_(1)
    pathlib.Path('{tmp_path}/done').touch()
writer = threading.Thread(target=write)
if rank == 2: writer.start()
""",
    )
    spring = f"""
def spring():
    pathlib.Path('{tmp_path}/go').touch()
    while not pathlib.Path('{tmp_path}/done').exists():
        time.sleep(0.001)
"""
    run(generator, TRAP + "x['v'] = torch.ones(2)\n" + spring)
    with pytest.raises(MoveError, match=r"trainer\[2\] wrote to 'x.w' meanwhile"):
        generator.copy_state(trainer, "x")
    run(trainer, "if rank == 2: writer.join()")
    assert generator.copy_state(trainer, "x").tensors == 4
