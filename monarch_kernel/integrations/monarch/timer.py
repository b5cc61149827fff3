"""``monarch.timer``: the time that named sections of code take, on the GPU where there is one.

Sections on a GPU are measured by events of the current stream. Nothing waits for the GPU until a measurement is read.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

__all__ = [
    "ExecutionTimer",
    "execution_timer_start",
    "execution_timer_stop",
    "get_execution_timer_average_ms",
    "get_execution_timer_summary",
    "get_latest_timer_measurement",
]

_DEFAULT = "default"

_log = logging.getLogger(__name__)


class ExecutionTimer:
    """The measurements of this process. A section may be measured often, also within itself."""

    _lock = threading.Lock()
    _started: ClassVar[dict[tuple[str, bool], list[Any]]] = {}
    _ended: ClassVar[dict[str, list[Any]]] = {}

    @classmethod
    @contextmanager
    def time(cls, name: str | None = None, use_cpu: bool = False) -> Iterator[None]:
        """Measure a block of code. The arguments are those of `start`."""
        cls.start(name, use_cpu)
        try:
            yield
        finally:
            cls.stop(name, use_cpu)

    @classmethod
    def start(cls, name: str | None = None, use_cpu: bool = False) -> None:
        """Start a measurement.

        Args:
            name: the section, by default ``default``.
            use_cpu: whether to measure the time of the program although there is a GPU.
        """
        begin = _event() if _has_gpu() and not use_cpu else time.perf_counter()
        with cls._lock:
            cls._started.setdefault((name or _DEFAULT, use_cpu), []).append(begin)

    @classmethod
    def stop(cls, name: str | None = None, use_cpu: bool = False) -> None:
        """End the measurement of a section that started last. The arguments are those of `start`.

        Raises:
            RuntimeError: none has started.
        """
        end_s = time.perf_counter()
        name = name or _DEFAULT
        with cls._lock:
            open_ = cls._started.get((name, use_cpu))
            if not open_:
                raise RuntimeError(f"the section {name!r} has not started: call start() first")
            begin = open_.pop()  # a number if there was no GPU, or no torch yet
            measured = (end_s - begin) * 1000 if isinstance(begin, float) else (begin, _event())
            cls._ended.setdefault(name, []).append(measured)

    @classmethod
    def reset(cls) -> None:
        """Forget all measurements."""
        with cls._lock:
            cls._started.clear()
            cls._ended.clear()

    @classmethod
    def summary(cls) -> dict[str, dict[str, float]]:
        """Return the number of measurements of each section, and their mean, sum, least and greatest, in milliseconds."""
        with cls._lock:
            ended = {name: list(each) for name, each in cls._ended.items()}
        found = {}
        for name, each in ended.items():
            times = [_milliseconds(one) for one in each]
            found[name] = {
                "count": len(times),
                "mean_ms": sum(times) / len(times),
                "total_ms": sum(times),
                "min_ms": min(times),
                "max_ms": max(times),
            }
        return found

    @classmethod
    def get_latest_measurement(cls, name: str | None = None) -> float:
        """Return the last measurement of a section in milliseconds; 0, with a warning in the log, if there is none."""
        name = name or _DEFAULT
        with cls._lock:
            ended = cls._ended.get(name)
            last = ended[-1] if ended else None
        if last is None:
            _log.warning("the section %r has no measurement", name)
            return 0.0
        return _milliseconds(last)


def execution_timer_start(name: str | None = None, use_cpu: bool = False) -> None:
    """Start a measurement, as `ExecutionTimer.start` does."""
    ExecutionTimer.start(name, use_cpu)


def execution_timer_stop(name: str | None = None, use_cpu: bool = False) -> None:
    """End a measurement, as `ExecutionTimer.stop` does."""
    ExecutionTimer.stop(name, use_cpu)


def get_execution_timer_average_ms(name: str = _DEFAULT) -> Any:
    """Return the mean of a section in milliseconds, as a tensor.

    Raises:
        KeyError: the section has no measurement.
    """
    return _tensor(ExecutionTimer.summary()[name]["mean_ms"])


def get_latest_timer_measurement(name: str | None = None) -> Any:
    """Return the last measurement of a section in milliseconds, as a tensor."""
    return _tensor(ExecutionTimer.get_latest_measurement(name))


def get_execution_timer_summary() -> dict[str, dict[str, float]]:
    """Return what `ExecutionTimer.summary` returns."""
    return ExecutionTimer.summary()


def _has_gpu() -> bool:
    torch = sys.modules.get("torch")  # code that has not imported torch has no work on a GPU
    return torch is not None and torch.cuda.is_available()


def _event() -> Any:
    import torch

    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _milliseconds(measured: Any) -> float:
    if isinstance(measured, float):
        return measured
    begin, end = measured
    end.synchronize()
    return float(begin.elapsed_time(end))


def _tensor(value: float) -> Any:
    import torch

    return torch.tensor(value, dtype=torch.float64)
