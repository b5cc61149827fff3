"""Sends a record to an experiment tracker, while it is written or afterwards."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from monarch_kernel.errors import RecordError
from monarch_kernel.features.record.reading import RecordReader
from monarch_kernel.features.record.tables import Metric
from monarch_kernel.features.record.tailing import Point, Tail
from monarch_kernel.features.record.trackers import Tracker, open_tracker

__all__ = ["Mirror", "config_of", "send"]

_EVERY_S = 1.0
_CLOSE_S = 60.0


class Mirror:
    """Sends what a record gets to a tracker, in a thread that nothing waits for, until the record ends.

    Args:
        folder: the folder of the record.
        to: ``wandb``, ``mlflow`` or ``trackio``.
        options: for the tracker.
        say: tells the user of a problem.

    Attributes:
        url: where to look at the run.
        problem: why nothing is sent any more; empty while all is well.

    Raises:
        RecordError: the record can't be read, or the tracker is unknown, not installed, or refuses the options.
    """

    def __init__(
        self, folder: Path, to: str, options: Mapping[str, Any], say: Callable[[str], None] | None = None
    ) -> None:
        self._reader = RecordReader(folder)
        try:
            self._tracker = open_tracker(to, folder.name, config_of(self._reader), options)
        except BaseException:
            self._reader.close()
            raise
        self.to = to
        self.url = self._tracker.url
        self.problem = ""
        self._tail = Tail(self._reader)
        self._say = say or _say
        self._wake = threading.Event()
        self._is_ending = False
        self._thread = threading.Thread(target=self._work, name="monarch-record-mirror", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"<mirror of {self._reader.folder} to {self.to}: {self.problem or self.url}>"

    def close(self) -> None:
        """Send what the record holds now, and end the run of the tracker."""
        self._is_ending = True
        self._wake.set()
        self._thread.join(_CLOSE_S)
        atexit.unregister(self.close)

    def _work(self) -> None:
        try:
            is_over = False
            while not is_over:
                self._wake.wait(_EVERY_S)
                self._reader.reload("run")
                is_whole = "ended" in self._reader.run  # read before the values, which are all there then
                is_over = is_whole or self._is_ending
                _log(self._tracker, self._tail.points(time.monotonic(), is_last=is_over))
            self._tracker.close(is_whole=is_whole)
        except Exception as error:  # of the network, or of the library: the run goes on
            self.problem = f"{type(error).__name__}: {error}"
            self._say(
                f"the record {self._reader.folder} is no longer sent to {self.to}: {self.problem}. The record goes on; "
                f"record.open({str(self._reader.folder)!r}).send({self.to!r}, ...) sends all of it later"
            )
        finally:
            self._reader.close()


def send(reader: RecordReader, to: str, options: Mapping[str, Any]) -> str:
    """Send a whole record; returns where to look at it.

    Raises:
        RecordError: the tracker is unknown, not installed, or fails.
    """
    tracker = open_tracker(to, reader.folder.name, config_of(reader), options)
    try:
        _log(tracker, Tail(reader).points(0.0, is_last=True))
        tracker.close(is_whole="ended" in reader.run)
    except Exception as error:
        raise RecordError(
            f"{reader.folder} was not sent to {to}, or only in part: {type(error).__name__}: {error}"
        ) from error
    return tracker.url


def config_of(reader: RecordReader) -> dict[str, str | int | float]:
    """Return what a tracker keeps beside the metrics: versions, the commit, ranks, and the folder of the record."""
    run = reader.run
    found: dict[str, str | int | float] = {"record": str(reader.folder)}
    for key, name in (("python", "python"), ("git_commit", "git_commit"), ("package:torch", "torch"), ("host", "host")):
        if run.get(key):
            found[name] = run[key]
    if run.get("git_diff"):
        found["git_is_changed"] = 1
    found |= {f"ranks of {mesh}": ranks for mesh, ranks in reader.meshes().items()}
    return found


def _log(tracker: Tracker, points: list[Point]) -> None:
    for point in points:
        prefix = "" if point.loop == 1 else f"loop_{point.loop}/"
        values: dict[str, float] = {}
        for metric in point.metrics:
            values |= _values(f"{prefix}{metric.name}", metric)
        for knob in point.knobs:
            if isinstance(knob.value, (int, float)):
                values[f"{prefix}knobs/{knob.name}"] = float(knob.value)
        if values:
            tracker.log(point.step, values)
    flush: Callable[[], None] | None = getattr(tracker, "flush", None)
    if flush is not None:
        flush()


def _values(name: str, metric: Metric) -> dict[str, float]:
    """The mean over ranks, and the ends where ranks differ."""
    if metric.min == metric.max or metric.mean != metric.mean:
        return {name: metric.mean}
    return {name: metric.mean, f"{name}/min": metric.min, f"{name}/max": metric.max}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
