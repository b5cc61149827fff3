"""F22: the disk is too full for a checkpoint; the error has the path and the space, and the last good one is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monarch_kernel.train import checkpoint
from monarch_kernel.train.checkpoint import CheckpointError, saving


def test_a_save_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    checkpoint.save(path, model=torch.nn.Linear(1024, 1023), step=1)
    monkeypatch.setattr(saving, "_free", lambda where: (1, 2 << 20))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(path, model=torch.nn.Linear(1024, 1023), step=2)
    text = str(caught.value)
    assert f"{path} was not saved: it takes 4.0 MiB" in text
    assert "2.0 MiB are free there; the previous checkpoint is intact" in text
    assert checkpoint.load(path)["step"] == 1


def test_a_first_save_that_does_not_fit_promises_no_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_free", lambda where: (1, 2 << 20))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "a", model=torch.nn.Linear(1024, 1023))
    assert f"2.0 MiB are free there; there is no earlier checkpoint in {tmp_path}. Remove" in str(caught.value)
