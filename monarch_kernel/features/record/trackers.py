"""Sends the metrics of a record to an experiment tracker: Weights & Biases, MLflow or Trackio. One run holds all ranks."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from monarch_kernel.errors import RecordError

__all__ = ["TRACKERS", "MLflow", "Tracker", "Trackio", "WeightsAndBiases", "open_tracker"]

Config = Mapping[str, str | int | float]


class Tracker(Protocol):
    """A run of a tracker."""

    url: str
    """Where to look at it, or what identifies it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values of a step."""
        ...

    def close(self, *, is_whole: bool) -> None:
        """End the run; ``is_whole`` if the record has an end, else its kernel was killed."""
        ...


class WeightsAndBiases:
    """A run of Weights & Biases.

    Args:
        name: the name of the run.
        config: what it ran with.
        options: passed to ``wandb.init``, such as ``project``, ``entity``, ``mode`` or ``dir``.
    """

    def __init__(self, name: str, config: Config, **options: Any) -> None:
        wandb = _module("wandb", "wandb")
        self._run = wandb.init(**{"name": name, "config": dict(config), "reinit": "create_new", **options})
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # a step that runs again is not refused
        self.url = self._run.url or str(self._run.dir)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self, *, is_whole: bool) -> None:
        self._run.finish(exit_code=0 if is_whole else 1)


class MLflow:
    """A run of MLflow.

    Args:
        name: the name of the run.
        config: what it ran with.
        options: ``tracking_uri`` and ``experiment``; the others become tags of the run.
    """

    _AT_ONCE = 1000  # metrics in a request, which is the limit of the server
    _LONGEST = 500

    def __init__(self, name: str, config: Config, **options: Any) -> None:
        mlflow = _module("mlflow", "mlflow")
        self._metric = importlib.import_module("mlflow.entities").Metric
        self._client = mlflow.MlflowClient(tracking_uri=options.pop("tracking_uri", None))
        experiment = options.pop("experiment", "Default")
        found = self._client.get_experiment_by_name(experiment)
        id = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._run = self._client.create_run(id, run_name=name, tags={key: str(value) for key, value in options.items()})
        for key, value in config.items():
            self._client.log_param(self._run.info.run_id, _mlflow_name(key), str(value)[: self._LONGEST])
        self._waits: list[Any] = []
        self.url = str(self._run.info.artifact_uri)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._waits += [self._metric(_mlflow_name(name), value, now, step) for name, value in values.items()]
        if len(self._waits) >= self._AT_ONCE:
            self._send()

    def flush(self) -> None:
        """Send what waits."""
        while self._waits:
            self._send()

    def _send(self) -> None:
        now, self._waits = self._waits[: self._AT_ONCE], self._waits[self._AT_ONCE :]
        self._client.log_batch(self._run.info.run_id, metrics=now)

    def close(self, *, is_whole: bool) -> None:
        self.flush()
        self._client.set_terminated(self._run.info.run_id, "FINISHED" if is_whole else "KILLED")


class Trackio:
    """A run of Trackio.

    Args:
        name: the name of the run.
        config: what it ran with.
        options: passed to ``trackio.init``, such as ``project`` or ``space_id``.
    """

    def __init__(self, name: str, config: Config, **options: Any) -> None:
        trackio = _module("trackio", "trackio")
        self._run = trackio.init(**{"project": "monarch_kernel", "name": name, "config": dict(config), **options})
        self.url = f"project {options.get('project', 'monarch_kernel')}, run {name}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, is_whole: bool) -> None:
        self._run.finish()


TRACKERS: Mapping[str, Callable[..., Tracker]] = {"wandb": WeightsAndBiases, "mlflow": MLflow, "trackio": Trackio}


def open_tracker(to: str, name: str, config: Config, options: Mapping[str, Any]) -> Tracker:
    """Start a run of a tracker.

    Raises:
        RecordError: the tracker is unknown or not installed, or it refuses the options.
    """
    if to not in TRACKERS:
        raise RecordError(f"unknown tracker {to!r}; known: {', '.join(TRACKERS)}")
    try:
        return TRACKERS[to](name, config, **options)
    except RecordError:
        raise
    except Exception as error:
        raise RecordError(f"{to} starts no run: {type(error).__name__}: {error}") from error


def _module(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecordError(
            f"{name} is not installed where the notebook runs: pip install 'monarch_kernel[{extra}]' ({error})"
        ) from None


def _mlflow_name(name: str) -> str:
    """Replace what MLflow does not allow in a name, and slashes: ``loss/min`` would need a folder where ``loss`` is a file."""
    return re.sub(r"[^\w\-. :]", "_", name.replace("/", "."))[:250]
