"""A rank lists what it holds of modules and tensors; in this process."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from monarch_kernel.features.replicas.compare import PIECE, difference_text, differing, locate
from monarch_kernel.features.replicas.compare import compare as compare_copies
from monarch_kernel.features.replicas.worker import copies_of, modules_in, piece_digests, pieces_of


class Wrapped(nn.Module):
    """Names its module as torch.compile does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def listed(**things: Any) -> list[tuple[str, str]]:
    return [(each.kind, each.path) for each in copies_of(things).copies]


def test_a_module_has_parameters_then_gradients_then_buffers() -> None:
    m = model()
    m(torch.ones(4, 3))[:, 0].sum().backward()
    m[1].bias.grad = None
    assert listed(m=m) == [
        ("parameter", "m.0.weight"),
        ("parameter", "m.0.bias"),
        ("parameter", "m.1.weight"),
        ("parameter", "m.1.bias"),
        ("gradient", "m.0.weight"),
        ("gradient", "m.0.bias"),
        ("gradient", "m.1.weight"),
        ("buffer", "m.1.running_mean"),
        ("buffer", "m.1.running_var"),
        ("buffer", "m.1.num_batches_tracked"),
    ]


def test_names_are_without_the_prefixes_of_wrappers() -> None:
    assert listed(m=Wrapped(nn.Linear(1, 1))) == [("parameter", "m.weight"), ("parameter", "m.bias")]


def test_shared_parameters_are_listed_once() -> None:
    m = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    m[1].weight = m[0].weight
    assert listed(m=m) == [("parameter", "m.0.weight")]


def test_other_variables_are_listed_as_tensors_and_values() -> None:
    things = {"x": torch.ones(2), "d": {"a": np.ones(3), "n": 3}, "s": 0.5}
    assert listed(**things) == [("tensor", "x"), ("tensor", "d.a"), ("value", "d.n"), ("value", "s")]


class Optimizer:
    """An optimizer, as far as the comparison uses one; torch.optim takes seconds to import."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "state": {0: {"exp_avg": torch.ones(2)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
        }


def test_an_optimizer_is_compared_by_its_state() -> None:
    paths = [path for _, path in listed(optimizer=Optimizer())]
    assert "optimizer.state.0.exp_avg" in paths
    assert "optimizer.param_groups.0.lr" in paths


def test_what_has_no_memory_is_skipped_with_the_reason() -> None:
    held = copies_of({"m": nn.Linear(2, 2, bias=False, device="meta")})
    assert held.copies == ()
    assert list(held.skipped) == ["m.weight"]


def test_what_cannot_be_compared_is_listed_and_the_rest_compared() -> None:
    held = copies_of(
        {
            "lazy": nn.LazyLinear(3),
            "far": nn.Linear(2, 2, bias=False, device="meta"),
            "d": {"lock": threading.Lock(), "sparse": torch.eye(2).to_sparse(), "n": 1},
            "meta": torch.ones(2, device="meta"),
            "parameter": nn.LazyLinear(3).weight,
            "x": object(),
            "m": nn.Linear(1, 1, bias=False),
        }
    )
    assert [each.path for each in held.copies] == ["d.n", "m.weight"]
    assert held.skipped == {
        "lazy.weight": "not initialized",
        "lazy.bias": "not initialized",
        "far.weight": "a meta tensor has no values",
        "d.lock": "a lock",
        "d.sparse": "a tensor of layout sparse_coo",
        "meta": "a meta tensor has no values",
        "parameter": "not initialized",
        "x": "an object",
    }


def test_a_path_that_occurs_twice_is_listed() -> None:
    held = copies_of({"d": {"a.b": 1, "a": {"b": 2}}})
    assert list(held.skipped) == ["d.a.b"]
    assert len(held.copies) == 1


def test_modules_and_optimizers_in_a_dict_are_compared_like_others() -> None:
    paths = listed(d={"m": nn.Linear(1, 1, bias=False), "o": Optimizer()})
    assert ("parameter", "d.m.weight") in paths
    assert ("tensor", "d.o.state.0.exp_avg") in paths


def test_modules_are_found_without_their_parts_and_hidden_ones() -> None:
    m = model()
    namespace = {
        "m": m,
        "again": m,
        "layer": m[0],
        "_1": model(),
        "other": nn.Linear(1, 1),
        "hidden": model(),
        "x": torch.ones(1),
    }
    assert list(modules_in(namespace, {"hidden"})) == ["m", "other"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_one_changed_element_is_found(dtype: torch.dtype) -> None:
    one = torch.zeros(3, PIECE, dtype=dtype)
    other = one.clone()
    other[2, 5] = 1
    things, changed = {"x": one}, {"x": other}
    (difference,) = compare_copies({0: copies_of(things).copies, 1: copies_of(changed).copies}).differences
    assert difference_text(difference) == "x: [0] and [1] differ"
    numbers, total = differing(piece_digests(things, "tensor", "x"), piece_digests(changed, "tensor", "x"))
    assert total == 1
    here, there = (pieces_of(each, "tensor", "x", numbers, total) for each in (things, changed))
    assert "1 of 49,152 elements differs" in locate(difference.copy, here, there, ((0,), (1,)))
    if not dtype.is_complex:
        assert locate(difference.copy, here, there, ((0,), (1,))).startswith("at [2, 5]: ")


def test_a_transposed_tensor_has_the_digest_of_its_elements() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert copies_of({"x": tensor.t()}).copies == copies_of({"x": tensor.t().contiguous()}).copies


def test_plain_tensors_of_other_shapes_are_replicas() -> None:
    by_rank = {rank: copies_of({"shape": torch.zeros(3 if rank else 4)}).copies for rank in range(4)}
    (difference,) = compare_copies(by_rank).differences
    assert difference_text(difference) == "shape: float32 [4] on [0], [3] on [1-3]"
    layers = {rank: copies_of({"m": nn.Linear(4, 101 if rank == 3 else 100)}).copies for rank in range(4)}
    weight, bias = compare_copies(layers).differences
    assert difference_text(weight) == "m.weight: float32 [100, 4] on [0-2], [101, 4] on [3]"
    assert difference_text(bias) == "m.bias: float32 [100] on [0-2], [101] on [3]"


def test_a_plain_tensor_without_elements_is_a_replica() -> None:
    by_rank = {rank: copies_of({"x": torch.zeros(rank)}).copies for rank in range(2)}
    assert [difference_text(each) for each in compare_copies(by_rank).differences] == [
        "x: float32 [0] on [0], [1] on [1]"
    ]
    assert compare_copies({rank: copies_of({"x": np.zeros(0)}).copies for rank in range(2)}).compared == 1
