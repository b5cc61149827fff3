"""Predictions of ranks are merged into the order of the data set."""

from __future__ import annotations

import pytest
import torch

from monarch_kernel.integrations.lightning.predictions import in_order


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers).reshape(-1, 1) * 10


def test_rows_are_split_into_the_batches_of_one_process() -> None:
    first = ([[rows(0, 2), rows(4)]], [[[0, 2], [4]]])
    second = ([[rows(1, 3)]], [[[1, 3]]])
    assert [each.tolist() for each in in_order([first, second])] == [[[0], [10]], [[20], [30]], [[40]]]


def test_several_loaders_stay_apart() -> None:
    one = ([[rows(0)], [rows(0)]], [[[0]], [[0]]])
    two = ([[rows(1)], []], [[[1]], []])
    assert [[each.tolist() for each in loader] for loader in in_order([one, two])] == [[[[0]], [[10]]], [[[0]]]]


@pytest.mark.parametrize("odd", ["text", None, torch.tensor(3.0), torch.zeros(5, 1)])
def test_predictions_without_a_row_for_each_sample_come_batch_by_batch(odd: object) -> None:
    first, second = ([[odd, odd]], [[[0, 2], [4]]]), ([[odd]], [[[1, 3]]])
    with pytest.warns(UserWarning, match="not in the order"):
        made = in_order([first, second])
    assert len(made) == 3
    assert all(each is odd for each in made)


def test_predictions_of_a_loader_without_indices_come_batch_by_batch() -> None:
    with pytest.warns(UserWarning, match="not in the order"):
        assert len(in_order([([[rows(0)]], [[]]), ([[rows(1)]], [[]])])) == 2
