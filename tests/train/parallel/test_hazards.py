"""`parallelize` handles models that naive wrapping breaks, loudly or silently."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks

# Layers that a block calls, for `Net(Layer)`.
LAYERS = '''
class Foreign(nn.Module):
    """A sparse attention: functions use weights of other modules, and one weight is indexed."""
    def __init__(self, width):
        super().__init__()
        self.gate, self.mha = nn.Linear(width, width, bias=False), nn.MultiheadAttention(width, 2, batch_first=True)
        self.table, self.t = nn.Parameter(torch.randn(4, width)), nn.Parameter(torch.tensor(1.0))
    def forward(self, x):
        y, _ = self.mha(x, x, x, need_weights=False)
        keep = torch.sigmoid(F.linear(x, self.gate.weight))
        return x + self.t * y * keep + self.table[1] + self.table[2:].sum(0)

class Strided(nn.Module):
    def __init__(self, width):
        super().__init__(); self.w = nn.Parameter(torch.randn(width, width).t() / 4)
    def forward(self, x): return x @ self.w

class Mixed(nn.Module):
    def __init__(self, width):
        super().__init__(); self.a = nn.Parameter(torch.randn(width, dtype=torch.float64))
    def forward(self, x): return x * self.a.float()

class Written(nn.Module):
    def __init__(self, width):
        super().__init__(); self.a = nn.Parameter(torch.randn(width))
    def forward(self, x):
        with torch.no_grad(): self.a.clamp_(-0.5, 0.5)
        return x + self.a

class Viewed(nn.Module):
    def __init__(self, width):
        super().__init__(); self.w = nn.Parameter(torch.randn(2, width)); self.first = self.w[0]
    def forward(self, x): return x + self.first + self.w[1]

class Listed(nn.Module):
    def __init__(self, width):
        super().__init__(); self.ws = [nn.Parameter(torch.randn(width)) for _ in range(2)]
    def forward(self, x): return x + self.ws[0]

class Held(nn.Module):
    """Modules that are not attributes."""
    def __init__(self, width, hold):
        super().__init__(); self.o = nn.Linear(width, width); self.ms = hold(self.o)
    def forward(self, x): return self.o(x)

class Normed(nn.Module):
    def __init__(self, width):
        super().__init__(); self.bn = nn.BatchNorm1d(width, affine=False)
    def forward(self, x): return x + 0 * self.bn(x.transpose(1, 2)).transpose(1, 2)

class Spectral(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.w = torch.nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.s = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
    def forward(self, x): return x + self.s(self.w(x))

class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__(); self.rnn, self.frozen = nn.LSTM(width, width, batch_first=True), nn.Linear(width, width)
        self.frozen.requires_grad_(False)
    def forward(self, x): return self.frozen(self.rnn(x)[0] + self.rnn(x)[0])

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w): ctx.save_for_backward(x, w); return x * w * w
    @staticmethod
    def backward(ctx, g): x, w = ctx.saved_tensors; return g * w * w, (g * 2 * x * w).sum((0, 1))

class Custom(nn.Module):
    def __init__(self, width):
        super().__init__(); self.w = nn.Parameter(torch.randn(width)); self.unused = nn.Linear(3, 1)
    def forward(self, x): return Square.apply(x, self.w)

class Stated(nn.Module):
    parallel_needs = Needs(replicate=["w"], why="rows are looked up")
    def __init__(self, width):
        super().__init__(); self.w = nn.Parameter(torch.randn(width))
    def forward(self, x): return x + self.w
'''


@pytest.fixture(scope="module")
def ranks(two: Ranks) -> Ranks:
    two.run(LAYERS)
    return two


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@pytest.mark.parametrize(
    "layer", ["Foreign", "Strided", "Mixed", "Written", "Viewed", "Spectral", "Recurrent", "Custom", "Stated"]
)
def test_training_equals_that_of_one_process(ranks: Ranks, layer: str, strategy: str) -> None:
    make = f"lambda: Net({layer})"
    if layer == "Viewed":  # a copy would have views of the original
        ranks.run(
            "torch.manual_seed(1)\nmodel = Net(Viewed)\ntorch.manual_seed(1)\nreference = Net(Viewed)\n"
            f"parallelize(model, mesh, {strategy!r}, example=batch(0, 4), quiet=True)\n"
            "torch.testing.assert_close(train(model, world_size, rank), train(reference), atol=2e-5, rtol=1e-4)\n"
            "same(model, reference)"
        )
        return
    # Where a gradient is almost zero (a bias of keys), Adam would amplify its rounding errors.
    sgd = "{'make': lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)}"
    ranks.run(f"trains_as_one({make}, strategy={strategy!r}, training={sgd})")


@pytest.mark.parametrize(
    ("layer", "name", "why"),
    [
        ("Foreign", "blocks.0.extra.t", "it is a scalar"),
        ("Mixed", "blocks.0.extra.a", "it is float64, and the rest of its unit float32"),
        ("Written", "blocks.0.extra.a", "a forward writes to it"),
        ("Viewed", "blocks.0.extra.w", "blocks.0.extra.first is an existing view of it"),
        ("Stated", "blocks.0.extra.w", "rows are looked up"),
    ],
)
def test_a_plan_says_what_is_kept_and_why(ranks: Ranks, layer: str, name: str, why: str) -> None:
    kept = ranks.run(f"plan_of(parallelize(Net({layer}), mesh, 'fsdp', example=batch(0, 4), quiet=True)).kept")[0]
    assert kept[name] == why
    assert f"blocks.1.{name.removeprefix('blocks.0.')}" in kept


def test_a_sparse_attention_stays_in_its_block(ranks: Ranks) -> None:
    plan = ranks.run("plan_of(parallelize(Net(Foreign), mesh, 'fsdp', example=batch(0, 4), quiet=True))")[0]
    assert plan.units[:3] == ("blocks.0", "blocks.1", "blocks.2")
    assert "blocks.0.extra.gate.weight" not in plan.kept


def test_a_parameter_in_a_list_is_refused(ranks: Ranks) -> None:
    said = ranks.fails("parallelize(Net(Listed), mesh, example=batch(0, 4))")
    assert said.startswith("PlanError: blocks.0.extra.ws[0] is a parameter that is not registered in the model")
    assert "nn.ParameterList" in said


@pytest.mark.parametrize(
    ("held", "where"),
    [
        ("[nn.Linear(8, 8) for _ in range(2)]", "ms[0] is a module (Linear)"),
        ("(o, nn.Linear(8, 8))", "ms[1] is a module (Linear)"),
        ("{'k': nn.Linear(8, 8)}", "ms['k'] is a module (Linear)"),
        ("{'k': (nn.Linear(8, 8),)}", "ms['k'][0] is a module (Linear)"),
        ("[o, [{'k': nn.Sequential(nn.Linear(8, 8))}]]", "ms[1][0]['k'] is a module (Sequential)"),
        ("[nn.BatchNorm1d(8, affine=False)]", "ms[0] is a module (BatchNorm1d)"),
        ("{'k': [nn.Parameter(torch.ones(8))]}", "ms['k'][0] is a parameter"),
    ],
)
def test_modules_in_plain_containers_are_refused(ranks: Ranks, held: str, where: str) -> None:
    said = ranks.fails(
        f"model = nn.Sequential(nn.Identity(), Held(8, lambda o: {held}))\n"
        "parallelize(model, mesh, 'ddp', example=torch.randn(2, 8))"
    )
    assert said.startswith(f"PlanError: 1.{where} that is not registered in the model"), said
    assert "nn.ModuleDict" in said or "nn.ParameterDict" in said


def test_modules_that_are_only_also_in_a_list_are_allowed(ranks: Ranks) -> None:
    """Modules without parameters are allowed, too, and a list that contains itself causes no endless loop."""
    ranks.run(
        "def hold(o):\n    held = [o, {'k': (o, nn.GELU())}]\n    return [*held, held]\n"
        "for strategy in ('ddp', 'fsdp'):\n"
        "    model = Held(8, hold)\n    model.ms.append(model.ms)\n    model.up = [model]\n"
        "    parallelize(model, mesh, strategy, example=torch.randn(2, 8), quiet=True)(torch.randn(2, 8)).sum().backward()\n"
        "    assert model.o.weight.grad is not None and not plan_of(model).kept"
    )


@pytest.mark.parametrize("example", ["batch(0, 4)", "None"])
def test_parameters_without_a_gradient(ranks: Ranks, example: str) -> None:
    """Plain DDP would wait for a gradient that never comes, and fail one step later with a long message of numbers."""
    make = "lambda: Net(Custom)"
    ranks.run(f"trains_as_one({make}, strategy='ddp', example={example})")
    ranks.run(f"parallelize(Net().requires_grad_(False), mesh, 'ddp', example={example}, quiet=True)(batch(0))")


def test_a_sparse_embedding(ranks: Ranks) -> None:
    ranks.run(
        "def make():\n    model = Net()\n    model.embed = nn.Embedding(50, 16, sparse=True)\n    return model\n"
        "sgd = {'make': lambda params: torch.optim.SGD(params, lr=0.1)}\n"
        "trains_as_one(make, strategy='ddp', training=sgd)\n"
        "plan = trains_as_one(make, strategy='fsdp', training=sgd)\n"
        "assert plan.kept == {'embed.weight': 'its gradient is sparse'}, plan.kept"
    )


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_statistics_of_a_batch_norm_are_averaged(ranks: Ranks, strategy: str) -> None:
    found = ranks.run(
        f"model = parallelize(Net(Normed), mesh, {strategy!r}, example=batch(0, 4), quiet=True)\n"
        "train(model, world_size, rank)\n"
        "model.blocks[0].extra.bn.running_mean, plan_of(model).averaged[0], list(plan_of(model).notes)"
    )
    assert found[0][0].equal(found[1][0])
    assert found[0][0].abs().sum() > 0
    assert found[0][1] == "blocks.0.extra.bn.running_mean"
    assert "use torch.nn.SyncBatchNorm" in found[0][2][0]


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_an_optimizer_made_before_trains_the_new_parameters(ranks: Ranks, strategy: str) -> None:
    notes = ranks.run(
        "torch.manual_seed(1)\nmodel = Net()\nreference = copy.deepcopy(model)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
        f"parallelize(model, mesh, {strategy!r}, quiet=True)\n"
        "losses = train(model, world_size, rank, optimizer=optimizer)\n"
        "torch.testing.assert_close(losses, train(reference), atol=2e-5, rtol=1e-4)\nsame(model, reference)\n"
        "list(plan_of(model).notes)"
    )[0]
    assert ("AdamW was created before, and now trains the new parameters" in notes) == (strategy == "fsdp")
    said = ranks.fails(
        "model = Net()\noptimizer = torch.optim.AdamW(model.parameters())\n"
        "loss_of(model, batch(0)).backward()\noptimizer.step()\nparallelize(model, mesh, 'fsdp')"
    )
    assert said.startswith("PlanError: the optimizer (AdamW) has made steps already")


def test_ranks_that_begin_with_other_weights_get_those_of_the_first(ranks: Ranks) -> None:
    found = ranks.run(
        "torch.manual_seed(rank)\nmodel = parallelize(Net(), mesh, 'fsdp', quiet=True)\ntorch.manual_seed(0)\n"
        "same(model, Net())\nlist(plan_of(model).notes)"
    )
    assert "the ranks had different values of embed.weight, " in found[0][-1]
    assert "all now have those of rank 0" in found[1][-1]


def test_a_branch_that_depends_on_the_rank_is_reported(ranks: Ranks) -> None:
    said = ranks.fails(
        "class Branch(Net):\n"
        "    def forward(self, tokens):\n"
        "        x = self.embed(tokens)\n"
        "        return self.head(self.blocks[1 + dist.get_rank() * self.split](self.blocks[0](x)))\n"
        "model = Branch(); model.split = 0\n"
        "parallelize(model, mesh, 'fsdp', quiet=True)\nloss_of(model, batch(0)).backward()\n"
        "model.split = 1\nloss_of(model, batch(0))"
    )
    assert "step 1: the ranks entered different units of the model: after 2 equal ones comes " in said
    assert "blocks.1 on [0], blocks.2 on [1]" in said


def test_the_first_module_whose_output_is_not_finite_is_named(ranks: Ranks) -> None:
    code = (
        "model = Net(Foreign)\nparallelize(model, mesh, {strategy!r}, example=batch(0, 4), quiet=True)\n"
        "train(model, world_size, rank, steps=2)\n"
        "spoilt = model.blocks[1].extra.mha.register_forward_hook(\n"
        "    lambda module, args, result: (result[0] / 0, result[1]) if rank == 1 else None)\n"
        "train(model, world_size, rank)"
    )
    for strategy in ("fsdp", "ddp"):
        said = ranks.fails(code.format(strategy=strategy))
        assert said == (
            "FloatingPointError: step 2: the output of the model is not finite: on rank 1 first the output of "
            "blocks.1.extra.mha, whose inputs are finite"
        )


def test_parameters_that_are_not_finite_are_named(ranks: Ranks) -> None:
    said = ranks.fails(
        "model = parallelize(Net(), mesh, 'fsdp', quiet=True)\n"
        "with torch.no_grad(): model.blocks[2].up.weight.fill_(float('nan'))\nloss_of(model, batch(0))"
    )
    assert "first the output of blocks.2.up" in said
    assert said.endswith("Parameters that are not finite: blocks.2.up.weight: an earlier step made them so")


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_inputs_that_are_not_finite_are_named(ranks: Ranks, strategy: str) -> None:
    given = (
        "class Given(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)\n"
        "    def forward(self, x, more=None):\n"
        "        return self.b(self.a(x) + (0 if more is None else more['scale'][0]))\n"
        f"m = parallelize(Given(), mesh, {strategy!r}, quiet=True)\nx, bad = torch.randn(2, 8), torch.randn(2, 8)\n"
    )
    said = "FloatingPointError: step 0: the output of the model is not finite: inputs of the model are not finite: "
    assert ranks.fails(f"{given}if rank == 1: x[0, 0] = float('nan')\nm(x)") == (
        f"{said}x has nan on [1]; check the batch there"
    )
    code = f"{given}bad[0, 0] = float('inf')\nm(x, more={{'scale': [bad]}})"
    assert ranks.fails(code) == f"{said}more['scale'][0] has inf on [0-1]; check the batch there"
    both = (
        f"{given}if rank == 0: x[0, 0] = float('nan')\n"
        "spoilt = m.b.register_forward_hook(lambda module, args, result: result / 0 if rank == 1 else None)\nm(x)"
    )
    assert ranks.fails(both) == (
        f"{said}x has nan on [0]; check the batch there; on rank 1 first the output of b, whose inputs are finite"
    )


def test_an_input_in_a_container_without_names_is_named(ranks: Ranks) -> None:
    said = ranks.fails(
        "import torch.utils._pytree as pytree\n"
        "class Pair:\n    def __init__(self, *parts): self.parts = parts\n"
        "pytree.register_pytree_node(Pair, lambda pair: (list(pair.parts), None), lambda parts, _: Pair(*parts))\n"
        "class Takes(nn.Linear):\n    def forward(self, pair): return super().forward(pair.parts[0] + pair.parts[1])\n"
        "m = parallelize(Takes(8, 8), mesh, 'ddp', quiet=True)\n"
        "m(Pair(torch.randn(2, 8), torch.full((2, 8), float('nan'))))"
    )
    assert "inputs of the model are not finite: pair has nan on [0-1]; check the batch there" in said


def test_keywords_of_a_module_are_inputs(ranks: Ranks) -> None:
    """A module that gets nan in a keyword is not named as the first."""
    said = ranks.fails(
        "class Scaled(nn.Module):\n"
        "    def forward(self, x, scale): return x * scale\n"
        "class Keywords(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.a, self.s = nn.Linear(8, 8), Scaled()\n"
        "    def forward(self, x): return self.s(self.a(x), scale=x.mean() / 0 * 0)\n"
        "parallelize(Keywords(), mesh, 'ddp', quiet=True)(torch.randn(2, 8))"
    )
    assert "first the output of the model itself, whose inputs are finite" in said


def test_an_attention_mask_is_not_blamed(ranks: Ranks) -> None:
    said = ranks.fails(
        "class Masked(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.a = nn.Linear(8, 8)\n"
        "    def forward(self, x, mask): return self.a(x).softmax(-1) @ (self.a.weight + mask).softmax(-1)\n"
        "m = parallelize(Masked(), mesh, 'ddp', quiet=True)\n"
        "m(torch.randn(2, 8), mask=torch.full((8, 8), -torch.inf))"
    )
    assert said.endswith(
        "is not finite: on rank 0 first the output of the model itself, whose inputs are finite; on rank 1 first "
        "the output of the model itself, whose inputs are finite"
    )


def test_a_frozen_module_may_be_kept_from_the_model(ranks: Ranks) -> None:
    ranks.run(
        "class Student(Net):\n"
        "    def __init__(self): super().__init__(); self.teacher = [Net().requires_grad_(False)]\n"
        "m = parallelize(Student(), mesh, 'fsdp', example=batch(0, 4), quiet=True)"
    )


def test_an_output_that_is_finite_in_a_second_run_is_reported(ranks: Ranks) -> None:
    said = ranks.fails(
        "m = parallelize(nn.Linear(8, 8), mesh, 'ddp', quiet=True)\n"
        "calls = []\nm.forward = lambda x: (calls.append(1), nn.Linear.forward(m, x) / (0 if len(calls) == 1 else 1))[1]\n"
        "m(torch.randn(2, 8))"
    )
    assert said.endswith("is not finite: in a second run it was finite on all ranks")


def test_a_module_that_can_not_be_a_unit_is_refused(ranks: Ranks) -> None:
    assert "units: blocks is a ModuleList, which is never called" in ranks.fails(
        "parallelize(Net(), mesh, units=['blocks'])"
    )


def test_methods_besides_the_forward(ranks: Ranks) -> None:
    ranks.run(
        "class Methods(Net):\n"
        "    def loss(self, tokens): return F.cross_entropy(F.linear(Net.forward.__get__(self)(tokens) @ self.head.weight,\n"
        "        self.head.weight).flatten(0, 1), tokens.flatten())\n"
        "torch.manual_seed(1)\nmodel = Methods()\nreference = copy.deepcopy(model)\n"
        "parallelize(model, mesh, 'fsdp', methods=['loss'], example=lambda m: m.loss(batch(0, 4)), quiet=True)\n"
        "assert not plan_of(model).kept, plan_of(model).kept\n"
        "mine, theirs = model.loss(batch(0).chunk(2)[rank]), reference.loss(batch(0))\n"
        "mine.backward(); theirs.backward(); dist.all_reduce(mine)\n"
        "torch.testing.assert_close(mine / 2, theirs)\n"
        "torch.testing.assert_close(model.head.weight.grad.full_tensor(), reference.head.weight.grad)"
    )


def test_a_forward_that_depends_on_values_is_probed_on_real_tensors(ranks: Ranks) -> None:
    ranks.run(
        "class Depends(nn.Module):\n"
        "    def __init__(self, width):\n        super().__init__(); self.a = nn.Linear(width, width)\n"
        "    def forward(self, x): return self.a(x) if x.abs().sum() > 0 else x\n"
        "trains_as_one(lambda: Net(Depends), strategy='fsdp')"
    )
    said = ranks.run(
        "with torch.device('meta'): m = Net(Depends)\nplan_for(m, {'dp': 2}, 'fsdp', example=batch(0, 4)).explain()"
    )[0]
    assert "note: the model was not probed: on tensors without values its forward fails: " in said


@pytest.mark.slow
def test_a_model_with_fewer_rows_than_ranks(four: Ranks) -> None:
    four.run("trains_as_one(lambda: Net(width=2), strategy='fsdp')")
