"""Spans and meters: those of OpenTelemetry where it is installed, and otherwise ones that do nothing."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

__all__ = ["TracingForwarder", "get_meter", "get_tracer", "span", "traced"]

F = TypeVar("F", bound=Callable[..., Any])

_NAME = "monarch"


class _Nothing:
    """Takes every call, and does nothing; stands for tracers, meters, spans and instruments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def get_tracer(name: str = _NAME) -> Any:
    """Return a tracer of OpenTelemetry; one that does nothing if OpenTelemetry is not installed."""
    try:
        from opentelemetry import trace
    except ImportError:
        return _Nothing()
    return trace.get_tracer(name)


def get_meter(name: str = _NAME) -> Any:
    """Return a meter of OpenTelemetry; one that does nothing if OpenTelemetry is not installed."""
    try:
        from opentelemetry import metrics
    except ImportError:
        return _Nothing()
    return metrics.get_meter(name)


class TracingForwarder(logging.Handler):
    """Adds records of a logger to the current span."""

    def emit(self, record: logging.LogRecord) -> None:
        """Add a record; without OpenTelemetry nothing happens."""
        try:
            from opentelemetry import trace
        except ImportError:
            return
        trace.get_current_span().add_event(self.format(record), {"level": record.levelname, "logger": record.name})


@contextlib.contextmanager
def span(name: str, attributes: dict[str, Any] | None = None, **more: Any) -> Iterator[Any]:
    """Run a block as a span.

    Args:
        name: the name of the span.
        attributes: its attributes.
        more: further attributes.
    """
    tracer = get_tracer()
    if isinstance(tracer, _Nothing):
        yield tracer
        return
    with tracer.start_as_current_span(name, attributes={**(attributes or {}), **more}) as current:
        yield current


@overload
def traced(fn: F) -> F: ...
@overload
def traced(fn: None = None, *, name: str | None = None, **attributes: Any) -> Callable[[F], F]: ...
def traced(fn: Any = None, *, name: str | None = None, **attributes: Any) -> Any:
    """Mark a function, sync or async, so that each call is a span with the name of the function, or another name."""
    if fn is None:
        return lambda inner: traced(inner, name=name, **attributes) if name or attributes else traced(inner)
    label = name or str(getattr(fn, "__qualname__", "a function"))
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            with span(label, attributes):
                return await fn(*args, **kwargs)

        return call_async

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with span(label, attributes):
            return fn(*args, **kwargs)

    return call
