"""F37: the state of generators, samplers or loaders differs between ranks; a checkpoint that would lose it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch_kernel.train.checkpoint.replicas import differing, refusal
from tests.failures.cells import Cells


def test_what_differs_is_named_by_rank() -> None:
    place = ("value", "")
    digests = [{("rng", place): bytes([rank]), ("step", place): b"5"} for rank in range(4)]
    text = str(refusal(Path("/data/step-5"), differing(digests), "Gather the states of all ranks"))
    assert "/data/step-5 was not saved: a checkpoint stores these once, but their values differ between ranks" in text
    assert "  rng: [1-3] differ from [0]\nGather the states" in text


@pytest.mark.slow  # the import of torch.distributed.checkpoint on the ranks
def test_random_states_that_differ_are_refused_with_the_way_to_keep_them(cells: Cells, tmp_path: Path) -> None:
    cells.ok("from monarch_kernel.train import checkpoint\ntorch.manual_seed(rank)")
    text = cells.fails(f"checkpoint.save({str(tmp_path / 'a')!r}, rng=torch.get_rng_state(), step=1)")
    assert "was not saved: a checkpoint stores these once, but their values differ between ranks" in text
    assert "rng: [1] differs from [0]" in text
    assert "torch.distributed.all_gather_object" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # for the same reason
def test_states_that_are_gathered_are_resumed_exactly(cells: Cells, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    cells.ok("from monarch_kernel.train import checkpoint\ntorch.manual_seed(rank)\nstates = [None] * world_size")
    cells.ok(f"dist.all_gather_object(states, torch.get_rng_state())\ncheckpoint.save({path!r}, states=states)")
    before = cells.ok("torch.rand(3).tolist()")
    cells.ok(f"torch.set_rng_state(checkpoint.load({path!r})['states'][rank])")
    assert cells.ok("torch.rand(3).tolist()") == before
    assert before[0] != before[1]
