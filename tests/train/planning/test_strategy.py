"""The plan chooses the first strategy that fits, follows or refuses requests, and explains both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from monarch_kernel.errors import PlanError
from monarch_kernel.train.planning.model_facts import ModelFacts, ModuleFacts
from monarch_kernel.train.planning.plan import Plan
from monarch_kernel.train.planning.request import PlanRequest, Resources
from monarch_kernel.train.planning.strategy import make_plan
from tests.train.planning.models import MIB, gpt, param

SPLIT = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
WIDE = gpt(4, width=512)  # 8.6 M parameters, 131 MiB of state, 5 MiB of activations


def plan(
    facts: ModelFacts = WIDE, free_mib: int = 0, request: PlanRequest | None = None, hosts: int = 1, **axes: int
) -> Plan:
    return make_plan(facts, Resources(axes or {"dp": 4}, hosts, free_mib * MIB), request)


@pytest.mark.parametrize(
    ("free_mib", "strategy", "is_recomputed"),
    [(200, "ddp", False), (160, "fsdp", False), (84, "fsdp", False), (80, "fsdp", True)],
)
def test_the_first_strategy_that_fits_is_chosen(free_mib: int, strategy: str, is_recomputed: bool) -> None:
    chosen = plan(free_mib=free_mib)
    assert (chosen.strategy, bool(chosen.checkpoint)) == (strategy, is_recomputed)
    assert [option.why_not for option in chosen.options].count("") == 1


def test_figures_are_those_of_the_papers() -> None:
    n = WIDE.numel
    chosen = plan()
    assert chosen.strategy == "ddp"
    assert (chosen.memory.parameters, chosen.memory.gradients, chosen.memory.optimizer) == (4 * n, 4 * n, 8 * n)
    assert chosen.memory.activations == 5 * MIB
    assert chosen.sent.total == chosen.sent.all_reduce == round(2 * 3 / 4 * 4 * n)
    split = plan(request=PlanRequest("fsdp"))
    assert (split.memory.parameters, split.memory.optimizer) == (n, 2 * n)
    block = 2 * 512 * 2048 * 4
    root = 4 * n - 4 * block
    assert split.memory.gathered == 2 * 2 * block
    assert split.sent.all_gather == 3 * (2 * 4 * block + root) // 4
    assert split.sent.reduce_scatter == 3 * n
    assert split.sent.all_reduce == 0
    half = plan(request=PlanRequest("fsdp", precision="bfloat16"))
    assert half.memory.gathered == 2 * block
    assert half.sent.all_gather == split.sent.all_gather // 2


def test_between_hosts_only_gradients_travel_where_a_host_holds_a_copy() -> None:
    chosen = plan(free_mib=160, hosts=2, hosts_=2, gpus=2)
    assert chosen.strategy == "hsdp"
    assert (chosen.copy_axes, chosen.shard_axes) == (("hosts_",), ("gpus",))
    assert chosen.memory.parameters == 2 * WIDE.numel
    assert chosen.sent.all_reduce == 2 * WIDE.numel
    assert plan(free_mib=85, hosts=2, hosts_=2, gpus=2).strategy == "fsdp"


def test_a_model_that_does_not_fit_is_refused_with_figures() -> None:
    with pytest.raises(PlanError) as caught:
        plan(free_mib=30)
    said = str(caught.value)
    assert "does not fit into the 30 MiB that the smallest of 4 ranks has free:" in said
    assert "DDP: 137 MiB a rank" in said
    assert "FSDP with blocks recomputed: " in said
    assert "more ranks do not help" in said
    with pytest.raises(PlanError, match=r"about \d+ ranks of this size would suffice"):
        plan(free_mib=50)
    assert "needs 137 MiB a rank, but 22 MiB can be used" in plan(free_mib=30, request=PlanRequest("ddp")).reason


def test_explain_says_what_was_chosen_and_what_not() -> None:
    gate = param("blocks.1.gate", uses=(frozenset({"", "blocks.1"}),))
    said = plan(gpt(4, 512, extra=[gate]), free_mib=160).explain()
    assert said.splitlines()[0] == "FSDP over dp=4, 5 units, 1 parameter kept whole; about 70 MiB a rank"
    assert "  wrapped separately: blocks.0, blocks.1, blocks.2, blocks.3; the rest is one unit" in said
    assert "  kept whole on each rank: blocks.1.gate: it is a scalar" in said
    assert "  not DDP (137 MiB a rank): needs 137 MiB a rank, but 120 MiB can be used" in said
    assert "free: 160 MiB" in said


def test_about_describes_a_parameter() -> None:
    chosen = plan(request=PlanRequest("fsdp+tp", tensor=SPLIT), dp=2, tp=2)
    assert (chosen.shard_axes, chosen.tensor_axis) == (("dp",), "tp")
    up = "split colwise along tp, split by FSDP along dp, in the unit blocks.0"
    assert chosen.about("blocks.0.up.weight") == up
    assert chosen.about("head.weight") == "split by FSDP along dp, in the unit of the model itself"
    assert chosen.memory.parameters == round(4 * (512 * 513 + 8 * 512 * 2048 / 2) / 2)
    assert plan().about("head.weight") == "whole on each rank"


def test_a_plan_can_be_edited() -> None:
    chosen = plan(request=PlanRequest("fsdp"))
    assert chosen.edit(units=("blocks.0",)).unit_of("blocks.1.up.weight") == ""
    with pytest.raises(TypeError, match="a plan has no unit; it has averaged, axes"):
        chosen.edit(unit=())


def test_layers_are_split_on_request() -> None:
    assert plan(request=PlanRequest(tensor=SPLIT), tp=4).strategy == "tp"
    assert plan(request=PlanRequest(tensor=SPLIT), free_mib=300, dp=2, tp=2).strategy == "tp"
    assert plan(request=PlanRequest(tensor=SPLIT), free_mib=70, dp=2, tp=2).strategy == "fsdp+tp"
    assert plan(request=PlanRequest(tensor={"blocks.*.up": "colwise"}), tp=2).notes == tuple(
        f"blocks.{i}.up is split colwise and no layer beside it the other way: its output is whole on each rank"
        for i in range(4)
    )


@pytest.mark.parametrize(
    ("asked", "axes", "said"),
    [
        (PlanRequest("fdsp"), {}, "strategy='fdsp' must be one of auto, none, ddp, fsdp, hsdp, tp, fsdp+tp"),
        (PlanRequest("none"), {}, "strategy='none' is for one rank, but there are 4"),
        (PlanRequest(), {"dp": 0}, "an axis of the mesh must have 1 rank or more, not dp=0"),
        (PlanRequest("hsdp"), {}, "strategy='hsdp' needs a mesh with two axes"),
        (PlanRequest("tp"), {"tp": 2}, "strategy='tp' needs the layers to split"),
        (PlanRequest(tensor=SPLIT), {}, "the mesh has no axis 'tp' along which to split matrices; it has dp=4"),
        (PlanRequest("ddp", tensor=SPLIT), {"tp": 2}, "strategy='ddp' splits no matrices"),
        (PlanRequest(tensor={"blocks.*.upp": "colwise"}), {"tp": 2}, "no module matches 'blocks.*.upp'"),
        (PlanRequest(tensor={"head": "column"}), {"tp": 2}, "'column' of 'head' must be one of colwise, rowwise"),
        (
            PlanRequest(tensor={"norm": "colwise"}),
            {"tp": 2},
            "norm is a LayerNorm; only Linear and Embedding can be split",
        ),
        (PlanRequest(tensor=SPLIT), {"tp": 3}, "of shape [2048, 512] can't be split colwise among 3 ranks"),
        (PlanRequest(precision="bf16"), {}, "precision='bf16' must be one of bfloat16, float16, float32"),
    ],
)
def test_impossible_requests_are_refused(asked: PlanRequest, axes: dict[str, int], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(request=asked, **axes)
    assert said in str(caught.value)


def test_one_rank_needs_no_parallelism() -> None:
    assert plan(dp=1).explain().splitlines()[:2] == ["no parallelism; about 137 MiB a rank", "  why: there is one rank"]


def test_recomputation_needs_repeated_blocks() -> None:
    flat = ModelFacts((param("up.weight", 8, 8),), {name: ModuleFacts(name, "Linear") for name in ("", "up")})
    with pytest.raises(PlanError, match="the model has no repeated blocks"):
        plan(flat, request=PlanRequest(checkpoint=True))
    assert plan(request=PlanRequest(checkpoint=True)).checkpoint == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


def test_averaged_statistics_are_noted() -> None:
    noted = plan(replace(WIDE, averaged=("norm.running_mean",))).notes[0]
    assert noted.startswith("1 buffer is averaged over the ranks after each step; for statistics of the whole batch")
