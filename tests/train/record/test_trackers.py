"""Weights & Biases, MLflow and Trackio get what a record holds, without a network. `make test-trackers` installs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.train.record.opened import open as open_record
from tests.features.record.runs import write_run

LOSSES = [(1 / (step + 1) + 2 / (step + 1)) / 2 for step in range(6)]


def test_mlflow_has_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # other stores need more packages
    mlflow = pytest.importorskip("mlflow")
    write_run(tmp_path / "run").close()
    uri = (tmp_path / "mlruns").as_uri()
    with open_record(tmp_path / "run") as record:
        record.send("mlflow", tracking_uri=uri, experiment="gpt", team="a")
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("gpt")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((each.step, each.value) for each in history) == list(enumerate(LOSSES))
    assert {each.step: each.value for each in client.get_metric_history(run.info.run_id, "knobs.lr")} == {
        0: 0.1,
        2: 0.5,
    }
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["ranks of t"] == "2"
    assert run.data.tags["team"] == "a"


def test_wandb_has_each_step(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    write_run(tmp_path / "run").close()
    folders = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")}
    subprocess.run(  # its service outlives the run, and ends with the process
        [
            sys.executable,
            "-m",
            "monarch_kernel",
            "record",
            "send",
            tmp_path / "run",
            "wandb",
            "project=gpt",
            "mode=offline",
        ],
        env={**os.environ, **folders, "PYTHONPATH": str(Path(__file__).parents[3]), "WANDB_DIR": str(tmp_path)},
        check=True,
        timeout=100,
    )
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = history_of(path)
    assert [(row["step"], row["loss"]) for row in rows] == list(enumerate(LOSSES))
    assert [(row["step"], row["knobs/lr"]) for row in rows if "knobs/lr" in row] == [(0, 0.1), (2, 0.5)]
    assert rows[1]["loss/max"] == 1.0


def history_of(path: Path) -> list[dict[str, float]]:
    """Read the history from the file of an offline run."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in records_of(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append(items)
    return rows


def records_of(data: bytes) -> Iterator[bytes]:
    """Read the records of a log in the format of LevelDB, after the 7 bytes with which W&B begins it."""
    at, record, block = 7, b"", 32 << 10
    while at + 7 <= len(data):
        if block - at % block < 7:  # the rest of a block
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def test_trackio_has_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    write_run(tmp_path / "run").close()
    with open_record(tmp_path / "run") as record:
        record.send("trackio", project="gpt")
    logs = SQLiteStorage.get_logs("gpt", "run")
    assert [(row["step"], row["loss"]) for row in logs] == list(enumerate(LOSSES))
    assert [(row["step"], row["knobs/lr"]) for row in logs if "knobs/lr" in row] == [(0, 0.1), (2, 0.5)]
