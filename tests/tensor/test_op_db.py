"""Each operation of torch's own table gives what it gives on a plain tensor, or is refused with a reason."""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from monarch_kernel.errors import TensorError
from monarch_kernel.tensor import DistributedTensor, inspect
from tests.tensor.in_process import InProcess

# It imports torch's tests, and runs some 600 operations.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MAX_SAMPLES = 2
RANDOM = ("rand", "normal", "bernoulli", "dropout", "uniform", "multinomial", "cauchy", "exponential", "geometric",
          "rrelu", "empty", "svd_lowrank", "pca_lowrank")  # fmt: skip
"""Parts of the names of operations whose results are random, or undefined."""


def samples() -> list[Any]:
    """The table; torch's tests import a library for their expectations, which the table does not use."""
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if torch.float32 in op.dtypes]


def test_operations_of_the_table() -> None:
    session = InProcess(1)
    wrong: dict[str, str] = {}
    refused: dict[str, str] = {}
    right = 0
    for op in samples():
        if any(word in op.name for word in RANDOM) or op.variant_test_name == "partial_views":
            continue  # such a view shows memory around its tensor, which is not put on ranks
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = list(zip(range(MAX_SAMPLES), op.sample_inputs("cpu", torch.float32, requires_grad=False)))
            except Exception:  # it needs a library that is not here
                continue
            for _, sample in found:
                args = (sample.input, sample.args, sample.kwargs)
                try:
                    expected = call(op, *args)
                except Exception:  # wrong for plain tensors, too
                    continue
                here = pytree.tree_map(lambda each: session.device.put(each) if is_plain(each) else each, args)
                try:
                    result = fetched(call(op, *here))
                except (TensorError, NotImplementedError) as error:
                    refused.setdefault(name, str(error).splitlines()[0])
                except Exception as error:
                    if "data is not allocated" in str(error):  # torch reads a tensor that says how to split another
                        continue
                    wrong[name] = f"{type(error).__name__}: {error}"
                else:
                    if same(result, expected):
                        right += 1
                    else:
                        wrong[name] = "another result"
    for name, why in sorted(refused.items()):
        print(f"refused {name}: {why}")
    for name, why in sorted(wrong.items()):
        print(f"WRONG {name}: {why[:200]}")
    print(f"{right} right")
    assert not wrong
    assert right > 900


def call(op: Any, first: Any, args: Any, kwargs: Any) -> Any:
    return op(first, *args, **kwargs)


def is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided


def fetched(result: Any) -> Any:
    return pytree.tree_map(lambda each: inspect(each) if isinstance(each, DistributedTensor) else each, result)


def same(one: Any, other: Any) -> bool:
    first, there = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(first) == len(there) and all(
        equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b or a != a
        for a, b in zip(first, there)
    )


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype == torch.complex32:
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    is_exact = not (a.is_floating_point() or a.is_complex())
    return torch.equal(a, b) if is_exact else torch.allclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True)
