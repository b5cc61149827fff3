"""F14 and F16: an error inside a model names the module in full, its inputs, and its parameters here and on all ranks."""

from __future__ import annotations

import pytest

from monarch_kernel.errors import RemoteError
from monarch_kernel.notebook.view.errors import error_block
from tests.support.ranks import Ranks

SPARSE = """
class SparseAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.gate = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.mode = "ok"
    def forward(self, x):
        if self.mode == "shape":
            return self.q(x[..., :5])
        if self.mode == "dtype":
            return self.q(x.double())
        if self.mode == "device":
            return self.q(x.to("meta"))
        return self.q(x) * torch.sigmoid(F.linear(x, self.gate.weight))
"""


@pytest.fixture(scope="module")
def ranks(two: Ranks) -> Ranks:
    two.run(SPARSE)
    return two


def failure(ranks: Ranks, code: str) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        ranks.run(code)
    return caught.value


MODES = {
    "shape": "Tensor[4, 6, 5] float32 cpu",
    "dtype": "Tensor[4, 6, 16] float64 cpu",
    "device": "Tensor[4, 6, 16] float32 meta",
}


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_module_that_gets_a_wrong_input(ranks: Ranks, mode: str, strategy: str) -> None:
    error = failure(
        ranks,
        f"model = parallelize(Net(SparseAttention), mesh, {strategy!r}, example=batch(0, 4), quiet=True)\n"
        f"model.blocks[2].extra.mode = {mode!r}\nloss_of(model, batch(0, 4))",
    )
    assert error.ranks == (0, 1)
    notes = error.primary.notes
    assert notes[0] == f"in blocks.2.extra.q (Linear), called with input: {MODES[mode]} requires_grad"
    plan = {
        "fsdp": "Parameter[16, 16] float32 cpu requires_grad: split by FSDP along dp, in the unit blocks.2",
        "ddp": "Parameter[16, 16] float32 cpu requires_grad: whole on each rank",
    }[strategy]
    weight = notes[1].strip()
    assert weight.startswith("blocks.2.extra.q.weight: ")
    assert weight.endswith(plan.partition(": ")[2])
    assert "[16, 16]" in weight
    shown = "\n".join(error_block(error, color=False))
    assert notes[0] in shown
    assert notes[0] in str(error)


def test_a_parameter_that_is_used_while_it_is_split(ranks: Ranks) -> None:
    """Names the parameter, where a plain "rank 2: shape mismatch" would be as helpful as a check-engine light."""
    error = failure(
        ranks,
        "model = parallelize(Net(SparseAttention), mesh, 'fsdp', units=['blocks.1.extra', 'blocks.1.extra.gate'], quiet=True)\n"
        "loss_of(model, batch(0, 4))",
    )
    notes = "\n".join(error.primary.notes)
    assert error.primary.notes[0].startswith("in blocks.1.extra (SparseAttention), called with x: Tensor[4, 6, 16]")
    assert "blocks.1.extra.gate.weight: DTensor[16, 16] float32 cpu, here [8, 16]" in notes
    assert "split by FSDP along dp, in the unit blocks.1.extra.gate" in notes
    assert "replicate=['blocks.1.extra.gate.weight']" in notes
    assert "give parallelize an example= that" in notes
    ranks.run(
        "model = parallelize(Net(SparseAttention), mesh, 'fsdp', units=['blocks.1.extra', 'blocks.1.extra.gate'],\n"
        "                    example=batch(0, 4), quiet=True)\nloss_of(model, batch(0, 4)).backward()"
    )


def test_the_error_of_a_plan_that_torch_refuses_says_what_to_write(ranks: Ranks) -> None:
    error = failure(
        ranks,
        "model = Net()\nplan = plan_for(model, {'dp': 2}, 'fsdp').edit(units=('blocks',))\nparallelize(model, mesh, plan)",
    )
    assert error.primary.etype == "PlanError"
    assert "FSDP refuses blocks: fully_shard does not support containers" in error.primary.message
    assert "remove it from units=" in error.primary.message


def test_errors_outside_of_a_forward_have_no_notes(ranks: Ranks) -> None:
    assert failure(ranks, "1 / 0").primary.notes == ()
    assert (
        failure(ranks, "class M(nn.Module):\n    def __init__(self): super().__init__(); 1 / 0\nM()").primary.notes
        == ()
    )
