"""A Trainer of a script runs on a mesh of two ranks, with the same results as a single process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("program.py")


@pytest.fixture(scope="module", params=["lightning", "pytorch_lightning"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of the program, for each package of Lightning."""
    run = subprocess.run(
        [sys.executable, str(PROGRAM), request.param, str(tmp_path_factory.mktemp("lightning"))],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return dict(json.loads(run.stdout.splitlines()[-1]))


def close(pair: list[Any]) -> None:
    ours, alone = pair
    assert ours == pytest.approx(alone, abs=1e-5)


def test_the_module_has_the_weights_of_a_single_process(found: dict[str, Any]) -> None:
    close(found["weights"])


def test_the_trainer_has_the_metrics_and_progress_of_a_single_process(found: dict[str, Any]) -> None:
    close(found["metrics"])
    assert found["logged"] == ["loss", "val_loss"]
    assert found["progress"][0] == found["progress"][1] == [3, 3, "TrainerStatus.FINISHED"]


def test_optimizers_refer_to_the_parameters_of_the_callers_module(found: dict[str, Any]) -> None:
    close(found["momenta"])
    close(found["lr"])
    assert found["same parameters"] is True


def test_callbacks_return_with_their_state(found: dict[str, Any]) -> None:
    assert len(found["losses"]) == 3
    assert found["losses"][-1] == pytest.approx(found["metrics"][0]["loss"])
    refers_home, has_lock, is_same = found["callback"]
    assert refers_home
    assert is_same
    assert not has_lock


def test_checkpoints_and_logs_exist_at_their_paths(found: dict[str, Any]) -> None:
    is_there, score = found["best"]
    assert is_there
    assert score == pytest.approx(found["metrics"][0]["val_loss"])
    header, *lines = found["csv"].splitlines()
    assert header == "epoch,loss,step,val_loss"
    assert len(lines) == 6


def test_fit_continues_on_the_same_trainer(found: dict[str, Any]) -> None:
    close(found["again"])
    assert found["progress again"] == [[5, 5], [5, 5]]
    assert len(found["losses again"]) == 5


def test_training_resumes_from_a_checkpoint_of_the_caller(found: dict[str, Any]) -> None:
    resumed, straight, step = found["resumed"]
    close([resumed, straight])
    assert step == 5


def test_validate_and_test_return_the_results_of_a_single_process(found: dict[str, Any]) -> None:
    for name, key in (("validated", "val_loss"), ("tested", "test_loss")):
        ours, alone = found[name]
        assert ours[0][key] == pytest.approx(alone[0][key], abs=1e-5)
    assert found["best tested"][0]["test_loss"] == pytest.approx(found["tested"][0][0]["test_loss"], abs=1e-5)


def test_predictions_of_all_ranks_are_in_the_order_of_the_data(found: dict[str, Any]) -> None:
    assert found["predicted"] is True
    assert found["predicted by"] == [i % 2 for i in range(61)]
    assert found["predicted batches"] == [7] * 8 + [5]
    assert found["predicted two"] == [8, 2]
    assert found["predicted nothing"] is None


def test_predictions_other_than_tensors_come_batch_by_batch(found: dict[str, Any]) -> None:
    words = [f"rank {rank} batch {batch}" for batch in range(3) for rank in range(2)]
    assert found["predicted words"] == words


def test_early_stopping_stops_all_ranks(found: dict[str, Any]) -> None:
    assert found["stopped"] == [2, 3, True]


def test_a_sharded_model_returns_with_all_weights(found: dict[str, Any]) -> None:
    weights, kind = found["sharded"]
    close([weights, found["weights"][1]])
    assert kind == "Sharded"


def test_data_loaders_have_workers(found: dict[str, Any]) -> None:
    close([found["workers"], found["weights"][1]])
