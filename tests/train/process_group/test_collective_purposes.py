"""Which parameters a bucket of DistributedDataParallel has, by its number of elements."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from monarch_kernel.train.process_group.collective_purposes import bucket_text, reducer_text

SIZES = [("0.weight", 32), ("0.bias", 8), ("1.weight", 64), ("1.bias", 8), ("2.weight", 5)]


def test_a_bucket_names_its_parameters() -> None:
    assert bucket_text(SIZES, 5) == "DDP's gradients of 2.weight"
    assert bucket_text(SIZES, 72) == "DDP's gradients"  # 0.bias and 1.weight, or 1.weight and 1.bias
    assert bucket_text(SIZES, 13) == "DDP's gradients of 1.bias and 2.weight"
    assert bucket_text(SIZES, 117) == "DDP's gradients of 0.weight, 0.bias and 3 more"
    assert bucket_text(SIZES, 6) == ""
    assert bucket_text([], 6) == ""


def test_one_element_is_no_gradient_if_the_model_was_used_in_join() -> None:
    def model(joins: bool) -> Any:
        return SimpleNamespace(module=torch.nn.Linear(4, 1), _join_config=SimpleNamespace(enable=joins))

    assert reducer_text([model(False)], 1) == "DDP's gradients of bias"
    assert reducer_text([model(True)], 1) == ""
    assert reducer_text([model(True)], 5) == "DDP's gradients of weight and bias"
    assert reducer_text([], 5) == ""
