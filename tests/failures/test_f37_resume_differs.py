"""F37: the state of generators, samplers or loaders differs between ranks; each rank resumes its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch_kernel.train.checkpoint.replicas import differing, refusal
from tests.failures.cells import Cells


def test_tensors_that_differ_are_named_by_rank() -> None:
    place = ("model.weight", ())
    digests = [{place: bytes([rank]), ("model.bias", ()): b"5"} for rank in range(4)]
    text = str(refusal(Path("/data/step-5"), differing(digests), "Train the same model"))
    assert "/data/step-5 was not saved: a checkpoint stores these once, but their values differ between ranks" in text
    assert "  model.weight: [1-3] differ from [0]\nTrain the same model" in text


@pytest.mark.slow  # the import of torch.distributed.checkpoint on the ranks
def test_random_states_that_differ_are_resumed_exactly(cells: Cells, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    cells.ok("from monarch_kernel.train import checkpoint\ntorch.manual_seed(rank)")
    cells.ok(f"checkpoint.save({path!r}, rng=checkpoint.rng, state=torch.get_rng_state(), step=1)")
    before = cells.ok("torch.rand(3).tolist()")
    cells.ok(f"values = checkpoint.load({path!r}, rng=checkpoint.rng)")
    assert cells.ok("torch.rand(3).tolist()") == before
    cells.ok("torch.set_rng_state(values['state'])")
    assert cells.ok("torch.rand(3).tolist()") == before
    assert before[0] != before[1]
