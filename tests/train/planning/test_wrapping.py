"""Each parameter is kept, or used only while its unit runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.errors import PlanError
from monarch_kernel.train.planning.model_facts import ModelFacts, ModuleFacts, Needs, ParamFacts, above
from monarch_kernel.train.planning.wrapping import blocks, is_sound, unit_of, wrap
from tests.train.planning.models import gpt, param


def with_param(facts: ModelFacts, name: str, **changes: object) -> ModelFacts:
    params = tuple(replace(each, **changes) if each.name == name else each for each in facts.params)  # type: ignore[arg-type]
    return replace(facts, params=params)


def test_blocks_are_the_outermost_modules_that_repeat() -> None:
    assert blocks(gpt(3)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_units_are_blocks_and_large_modules() -> None:
    assert wrap(gpt(4)).units == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert wrap(gpt(4, vocabulary=4096)).units == (
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "blocks.3",
        "embed",
        "head",
    )


def test_tied_weights_are_in_no_separate_unit() -> None:
    facts = gpt(4, vocabulary=4096)
    uses = (frozenset({"embed", ""}), frozenset({"head", ""}))
    tied = ParamFacts(("embed.weight", "head.weight"), (4096, 64), uses=uses)
    facts = replace(facts, params=(tied, *(each for each in facts.params if each.name not in tied.names)))
    wrapping = wrap(facts)
    assert wrapping.units == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert not wrapping.kept
    asked = wrap(facts, ["head", "blocks.0"])
    assert asked.units == ("blocks.0",)
    assert asked.notes == ("head is not wrapped separately: embed.weight is shared: embed.weight, head.weight",)


def test_a_small_parameter_that_others_use_is_kept_and_its_unit_stays() -> None:
    gate = param("blocks.1.gate", 64, uses=(frozenset({"", "blocks.1"}), frozenset({""})))
    wrapping = wrap(gpt(4, extra=[gate]))
    assert "blocks.1" in wrapping.units
    assert wrapping.kept == {"blocks.1.gate": "is used in the model's own forward, while blocks.1 is not running"}


def test_the_unit_of_a_large_unsound_parameter_is_dissolved() -> None:
    wrapping = wrap(with_param(gpt(4), "blocks.1.up.weight", uses=(frozenset({"", "blocks.0"}),)))
    assert wrapping.units == ("blocks.0", "blocks.2", "blocks.3")
    assert not wrapping.kept
    assert wrapping.notes == (
        "blocks.1 is not wrapped separately: blocks.1.up.weight is used in blocks.0, while blocks.1 is not running",
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"shape": ()}, "it is a scalar"),
        ({"has_sparse_gradient": True}, "its gradient is sparse"),
        ({"viewed_by": "norm.saved"}, "norm.saved is an existing view of it"),
        ({"is_written": True}, "a forward writes to it"),
        ({"dtype": "bfloat16", "itemsize": 2}, "it is bfloat16, and the rest of its unit float32"),
        ({"uses": (frozenset(),)}, "is used in code outside of any forward, while the model is not running"),
    ],
)
def test_parameters_that_fsdp_can_not_shard_are_kept(changes: dict[str, object], why: str) -> None:
    assert wrap(with_param(gpt(4), "norm.weight", **changes)).kept == {"norm.weight": why}


def test_a_frozen_parameter_may_have_another_dtype() -> None:
    assert not wrap(with_param(gpt(4), "norm.weight", dtype="int8", itemsize=1, trains=False)).kept


def test_a_layer_states_its_needs() -> None:
    facts = gpt(2)
    needs = Needs(replicate=["up.weight"], together=True, why="rows are looked up")
    modules = dict(facts.modules) | {"blocks.0": replace(facts.modules["blocks.0"], needs=needs)}
    wrapping = wrap(replace(facts, modules=modules), units=["blocks.0", "blocks.0.down", "blocks.1"])
    assert wrapping.units == ("blocks.0", "blocks.1")
    assert wrapping.kept == {"blocks.0.up.weight": "rows are looked up"}
    assert wrapping.notes == ("blocks.0: no part of it is wrapped separately (rows are looked up)",)
    wrong = dict(facts.modules) | {"blocks.0": replace(facts.modules["blocks.0"], needs=Needs(replicate=["u"]))}
    with pytest.raises(PlanError, match=r"parallel_needs of blocks\.0 names a parameter that it does not have: 'u'"):
        wrap(replace(facts, modules=wrong))


@pytest.mark.parametrize(
    ("units", "replicate", "said"),
    [
        (["blcks.0"], (), "units: the model has no module 'blcks.0'; there is "),
        (["blocks"], (), "units: blocks is a ModuleList, which is never called; name its children: blocks.0, blocks.1"),
        ([""], (), "units: the model has no module ''"),
        (None, ["head.weigh"], "replicate: the model has no parameter 'head.weigh'"),
        (None, ["x.weight"], "there is embed.weight, "),
    ],
)
def test_unknown_names_are_refused(units: list[str] | None, replicate: list[str], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        wrap(gpt(2), units, replicate)
    assert said in str(caught.value)


NAMES = ["", "a", "a.0", "a.0.x", "a.0.y", "a.1", "a.1.x", "b", "b.x", "b.x.z"]
stacks = st.sampled_from(NAMES).flatmap(
    lambda top: st.sets(st.sampled_from(NAMES)).map(lambda more: frozenset({*above(top), *more}))
)


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    params = []
    for i in range(draw(st.integers(1, 6))):
        owners = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True))
        names = tuple(f"{owner}.p{i}".lstrip(".") for owner in owners)
        shape = draw(st.sampled_from([(), (2,), (64,), (1024,)]))
        uses = draw(st.none() | st.lists(stacks, max_size=3).map(tuple))
        dtype, itemsize = draw(st.sampled_from([("float32", 4), ("bfloat16", 2)]))
        params.append(ParamFacts(names, shape, dtype, itemsize, draw(st.booleans()), uses))
    modules = {name: ModuleFacts(name, "ModuleList" if name == "a" else "Layer", name != "a") for name in NAMES}
    return ModelFacts(tuple(params), modules)


@given(models(), st.lists(st.sampled_from(["a.0", "a.1", "b", "b.x", "a.0.x"]), unique=True))
def test_each_parameter_is_kept_or_its_unit_is_sound_for_it(facts: ModelFacts, units: list[str]) -> None:
    units = [unit for unit in units if next(facts.below(unit), None) is not None]
    wrapping = wrap(facts, units)
    for each in facts.params:
        assert each.name in wrapping.kept or (is_sound(each, wrapping.units) and each.shape)
    assert set(wrapping.units) <= set(units)
    for at, unit in enumerate(wrapping.units):  # inner units come first
        assert not any(later.startswith(f"{unit}.") for later in wrapping.units[at + 1 :])
    groups: dict[str, set[str]] = {}
    for each in facts.params:
        if each.trains and each.name not in wrapping.kept:
            groups.setdefault(unit_of(each.owners[0], wrapping.units), set()).add(each.dtype)
    assert all(len(dtypes) == 1 for dtypes in groups.values())
