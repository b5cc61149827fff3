"""Training on parts of a batch on several ranks equals training on the whole batch in one process."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ("", "ddp"),
        ("strategy='fsdp'", "fsdp"),
        ("strategy='fsdp', checkpoint=True", "fsdp"),
        ("strategy='ddp', checkpoint=True", "ddp"),
        ("strategy='fsdp', units=['blocks.1']", "fsdp"),
        ("strategy='fsdp', replicate=['head.weight']", "fsdp"),
    ],
)
def test_losses_and_parameters_equal_those_of_one_process(two: Ranks, options: str, strategy: str) -> None:
    found = two.run(f"trains_as_one(Net, {options}).strategy" if options else "trains_as_one(Net).strategy")
    assert found == (strategy, strategy)


def test_tied_weights_and_no_example(two: Ranks) -> None:
    plan = two.run("trains_as_one(lambda: Net(tied=True), example=None, strategy='fsdp').explain()")[0]
    assert "note: the model was not probed: there is no example=" in plan


@pytest.mark.parametrize("strategy", ["hsdp", "fsdp", "ddp"])
def test_meshes_of_two_axes(four: Ranks, strategy: str) -> None:
    found = four.run(
        "grid = init_device_mesh('cpu', (2, 2), mesh_dim_names=('copies', 'shards'))\n"
        f"p = trains_as_one(Net, mesh=grid, strategy={strategy!r})\np.copy_axes, p.shard_axes"
    )
    expected = {
        "hsdp": (("copies",), ("shards",)),
        "fsdp": ((), ("copies", "shards")),
        "ddp": (("copies", "shards"), ()),
    }
    assert set(found) == {expected[strategy]}


SPLIT = "{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise', 'embed': 'rowwise', 'head': 'colwise'}"
TRAINS_ON_A_GRID = """
grid = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))
torch.manual_seed(1)
model = Net()
reference = copy.deepcopy(model)
parallelize(model, grid, {strategy!r}, example=batch(0, 4), tensor={split}, quiet=True)
losses = train(model, 2, grid.get_local_rank("dp"))
torch.testing.assert_close(losses, train(reference), atol=2e-5, rtol=1e-4)
same(model, reference)
plan_of(model).strategy, tuple(model.blocks[0].up.weight.to_local().shape)
"""


@pytest.mark.parametrize(("strategy", "shape"), [("tp", (16, 16)), ("fsdp+tp", (8, 16))])
def test_matrices_are_split(four: Ranks, strategy: str, shape: tuple[int, int]) -> None:
    assert set(four.run(TRAINS_ON_A_GRID.format(strategy=strategy, split=SPLIT))) == {(strategy, shape)}


def test_a_layer_that_knows_its_own_size_is_not_split(four: Ranks) -> None:
    said = four.fails(
        "class Sized(nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__(); self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)\n"
        "    def forward(self, x):\n"
        "        return self.down(self.up(x).view(*x.shape[:-1], 4, x.shape[-1] // 4).flatten(-2))\n"
        "grid = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\n"
        "parallelize(Net(Sized), grid, example=batch(0, 4),\n"
        "            tensor={'blocks.*.extra.up': 'colwise', 'blocks.*.extra.down': 'rowwise'})"
    )
    assert said.startswith("PlanError: split along tp (blocks.0.extra.up, ")
    assert "write -1 for the split dim, or do not split that layer" in said


def test_a_split_that_changes_results_is_refused(four: Ranks) -> None:
    said = four.fails(
        "class Norm(nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__(); self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)\n"
        "    def forward(self, x):\n"
        "        return self.down(torch.softmax(self.up(x), -1))\n"
        "parallelize(Net(Norm), init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp')), example=batch(0, 4),\n"
        "            tensor={'blocks.*.extra.up': 'colwise', 'blocks.*.extra.down': 'rowwise'})"
    )
    assert "the model computes something else: output 0 differs" in said


def test_different_batches_among_ranks_that_share_a_matrix_are_refused(four: Ranks) -> None:
    said = four.fails(
        "grid = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\n"
        f"model = parallelize(Net(), grid, 'tp', tensor={SPLIT}, quiet=True)\nloss_of(model, batch(rank))"
    )
    assert "ranks that split matrices got different batches" in said


META = """
with torch.device('meta'):
    model = Net(tied={tied})
parallelize(model, mesh, {strategy!r}, example=batch(0, 4), seed=7, quiet=True)
losses = train(model, world_size, rank)
sums = {{name: float(value.double().sum()) for name, value in full(model).items()}}
losses.tolist(), sums, type(model.blocks[0].up.weight).__name__
"""


def test_a_model_on_the_meta_device_gets_the_same_values_with_any_plan(two: Ranks) -> None:
    for tied in (False, True):
        split = two.run(META.format(strategy="fsdp", tied=tied))
        whole = two.run(META.format(strategy="ddp", tied=tied))
        assert split[0] == split[1]
        assert whole[0] == whole[1]
        assert split[0][0] == pytest.approx(whole[0][0], abs=2e-5)
        assert split[0][1] == pytest.approx(whole[0][1], abs=2e-3)
        assert (split[0][2], whole[0][2]) == ("DTensor", "Parameter")


def test_a_layer_that_can_not_initialise_itself_is_named(two: Ranks) -> None:
    code = (
        "class Scale(nn.Module):\n"
        "    def __init__(self, width):\n        super().__init__(); self.by = nn.Parameter(torch.ones(width))\n"
        "    def forward(self, x): return x * self.by\n"
        "with torch.device('meta'): model = Net(Scale)\n"
    )
    said = two.fails(f"{code}parallelize(model, mesh, 'fsdp')")
    assert "blocks.0.extra (Scale) is on the meta device and has no reset_parameters()" in said
    init = "lambda module: nn.init.ones_(module.by) if isinstance(module, Scale) else None"
    done = two.run(
        f"{code}parallelize(model, mesh, 'fsdp', init={init}, quiet=True)\nfull(model)['blocks.1.extra.by'].sum()"
    )
    assert [float(each) for each in done] == [16.0, 16.0]


def test_precision(two: Ranks) -> None:
    losses = two.run(
        "torch.manual_seed(1)\nmodel = Net()\nreference = copy.deepcopy(model)\n"
        "parallelize(model, mesh, 'fsdp', precision='bfloat16', quiet=True)\n"
        "(train(model, world_size, rank) - train(reference)).abs().max().item()"
    )
    assert 1e-6 < losses[0] < 3e-2
    assert "use torch.autocast around the forward" in two.fails("parallelize(Net(), mesh, 'ddp', precision='bfloat16')")


def test_gradients_are_clipped_over_all_ranks(two: Ranks) -> None:
    two.run(
        "norms = []\n"
        "def clip(model): norms.append(float(clip_grad_norm_(model, 0.05)))\n"
        "trains_as_one(Net, strategy='fsdp', replicate=['head.weight'], training={'each': clip})\n"
        "assert len(norms) == 8 and torch.allclose(torch.tensor(norms[:4]), torch.tensor(norms[4:]), rtol=1e-4), norms\n"
        "assert min(norms) > 0.05"
    )


def test_a_plan_can_be_made_without_ranks_edited_and_used(two: Ranks) -> None:
    found = two.run(
        "with torch.device('meta'): model = Net()\n"
        "plan = plan_for(model, {'dp': 2}, 'fsdp', example=batch(0, 4)).edit(units=('blocks.0',))\n"
        "trains_as_one(Net, strategy=plan).units"
    )
    assert found == (("blocks.0",), ("blocks.0",))
    assert "the plan is for a mesh of {'dp': 4}" in two.fails("parallelize(Net(), mesh, plan_for(Net(), {'dp': 4}))")


def test_rank_0_prints_the_plan(two: Ranks) -> None:
    two.run(
        "import io, contextlib\nsaid = io.StringIO()\n"
        "with contextlib.redirect_stdout(said): parallelize(Net(), mesh, 'fsdp', example=batch(0, 4))\n"
        "assert said.getvalue().startswith('FSDP over dp=2, ' if rank == 0 else ''), said.getvalue()\n"
        "assert bool(said.getvalue()) == (rank == 0)"
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("parallelize(Net(), mesh, 'fdsp')", "PlanError: strategy='fdsp' must be one of auto, none, ddp"),
        ("parallelize(mesh, Net())", "TypeError: parallelize(model, mesh, ...) takes an nn.Module and a DeviceMesh"),
        ("parallelize(Net(), 4)", "TypeError: mesh must be a torch DeviceMesh"),
        (
            "m = parallelize(Net(), mesh, quiet=True); parallelize(m, mesh)",
            "PlanError: the model is parallelized already",
        ),
        (
            "parallelize(Net(blocks=2 + rank), mesh)",
            "PlanError: the ranks have built different models: blocks.2.norm.weight",
        ),
        ("parallelize(Net(), mesh, ['fsdp', 'ddp'][rank])", "PlanError: the ranks request different plans"),
        ("parallelize(Net(), mesh, units=['blcks.0'])", "PlanError: units: the model has no module 'blcks.0'"),
        (
            "parallelize(Net(), mesh, memory_nbytes=10_000)",
            "PlanError: training 0.0 M parameters does not fit into",
        ),
        ("parallelize(Net(), mesh, methods=['los'])", "PlanError: methods: the model has no method 'los'"),
        (
            "parallelize(Net(), mesh, example=(batch(0, 4), 5))",
            "TypeError: Net.forward() takes 2 positional arguments but 3 were given",
        ),
    ],
)
def test_misuses_are_explained(two: Ranks, code: str, said: str) -> None:
    assert two.fails(code).startswith(said)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("parallelize('no model', mesh)", "takes an nn.Module and a DeviceMesh"),
        ("parallelize(parallelize(net, mesh, quiet=True), mesh)", "is parallelized already"),
        ("parallelize(net, mesh, units=3)", "'int' object is not iterable"),
    ],
)
def test_a_wrong_argument_of_one_rank_is_an_error_on_all(two: Ranks, wrong: str, said: str) -> None:
    calls = (
        "parallelize(net, mesh)"
        if "already" not in said
        else "parallelize(net, mesh, quiet=True); parallelize(Net(), mesh)"
    )
    code = f"""
net = Net()
try:
    if rank: {calls}
    else: {wrong}
except Exception as error: found = str(error)
found
"""
    assert all(said in each for each in two.run(code))


def test_a_failure_on_one_rank_fails_on_all(two: Ranks) -> None:
    said = two.fails(
        "def example(model):\n    if rank: raise ValueError('no data')\nparallelize(Net(), mesh, example=example)"
    )
    assert said in ("PlanError: parallelize: on [1]: ValueError: no data", "ValueError: no data")
