"""Digests tell batches, parameters and states of random generators apart."""

from __future__ import annotations

import random
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch

from monarch_kernel.features.record.digests import digest_of, parameters_digest
from monarch_kernel.features.record.files import FileBook, hash_of_text
from monarch_kernel.features.record.worker import generator_states, generators_digest, restore_generators

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: torch.Tensor


def batches() -> list[object]:
    x = torch.arange(6.0).reshape(2, 3)
    return [
        x,
        x.T,
        x + 1,
        x.double(),
        x.reshape(3, 2),
        torch.tensor(1.0),
        torch.zeros(100_000),
        torch.ones(100_000),
        x.to_sparse(),
        [x],
        (x, x),
        {"x": x},
        Pair(x, 1),
        Sample(x),
        x.numpy().astype("int8"),
        numpy.array(["a", "b"]),
        "text",
        1,
        1.0,
        None,
        b"bytes",
    ]


def test_batches_that_differ_have_digests_that_differ() -> None:
    digests = [digest_of(batch) for batch in batches()]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 8 for digest in digests)


def test_equal_batches_have_equal_digests() -> None:
    assert [digest_of(batch) for batch in batches()] == [digest_of(batch) for batch in batches()]
    assert digest_of(torch.arange(6).reshape(2, 3).T.contiguous()) == digest_of(torch.tensor([[0, 3], [1, 4], [2, 5]]))


@pytest.mark.parametrize("size", [3, 100_000])
def test_strides_and_gradients_do_not_count(size: int) -> None:
    x = torch.arange(4.0 * size).reshape(4, size)
    same = [x.T.contiguous().T, x.repeat(1, 2)[:, :size], x.clone().requires_grad_()]
    assert {digest_of(each) for each in same} == {digest_of(x)}
    z = torch.complex(x, x)
    assert digest_of(z.conj()) == digest_of(torch.complex(x, -x)) != digest_of(z)


@pytest.mark.parametrize("size", [3, 100_000])
def test_two_batches_with_one_bit_changed_differ(size: int) -> None:
    x = torch.zeros(size, dtype=torch.int64)
    digests = set()
    for at in {0, size // 2, size - 1}:
        for bit in (0, 31, 63):
            y = x.clone()
            y[at] ^= 1 << bit if bit < 63 else -(1 << 63)
            digests.add(digest_of(y))
    assert len(digests) == len({0, size // 2, size - 1}) * 3
    assert digest_of(x) not in digests


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float16, torch.int8])
def test_each_type_has_a_digest(dtype: torch.dtype) -> None:
    assert digest_of(torch.ones(3, dtype=dtype)) != digest_of(torch.zeros(3, dtype=dtype))


def test_a_batch_in_a_circle_ends() -> None:
    circle: list[object] = [1]
    circle.append(circle)
    assert len(digest_of(circle)) == 8


def test_generators_go_on_as_they_did() -> None:
    states = generator_states()
    first = random.random(), numpy.random.rand(), torch.rand(()).item()
    restore_generators(states)
    assert (random.random(), numpy.random.rand(), torch.rand(()).item()) == first
    restore_generators({})


def test_a_generator_that_has_moved_has_another_digest() -> None:
    states = generator_states()
    before = generators_digest()
    assert generators_digest() == before
    for draw in (random.random, numpy.random.rand, lambda: torch.rand(())):
        draw()
        assert generators_digest() != before
        restore_generators(states)
        assert generators_digest() == before


def test_parameters_that_change_have_another_digest() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    before = parameters_digest({"model": model})
    assert parameters_digest({"model": model}) == before
    with torch.no_grad():
        model[0].bias[3] += 1e-7
    after = parameters_digest({"model": model})
    assert after != before
    model(torch.rand(5, 3))  # changes the buffers
    assert parameters_digest({"model": model}) != after


def test_files_of_the_user_are_found_when_they_are_new_or_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib
    import sys

    path = tmp_path / "of_the_user_for_records.py"
    path.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    book = FileBook()
    book.news()
    try:
        importlib.import_module(path.stem)
        assert book.news() == {str(path): hash_of_text("x = 1\n")}
        assert book.news() == {}
        path.write_text("x = 1 + 1\n")
        assert book.news() == {str(path): hash_of_text("x = 1 + 1\n")}
        book.forget()
        assert book.news()[str(path)] == hash_of_text("x = 1 + 1\n")
    finally:
        sys.modules.pop(path.stem, None)
