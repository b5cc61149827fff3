"""F17: a checkpoint does not fit the model; the error has the keys and the shapes, and nothing has changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from monarch_kernel.train import checkpoint
from monarch_kernel.train.checkpoint import CheckpointError


def test_keys_and_shapes_are_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model.add_module("extra", nn.Linear(2, 2))
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path / "a", model=model)
    text = str(caught.value)
    assert "does not fit model; nothing has changed" in text
    assert "extra.weight" in text
    assert "1.weight [3, 4] here, [2, 4] in the checkpoint" in text
    assert all(map(torch.equal, before, model.parameters()))
