"""Values that a loop logs, on a rank: what is kept of them in a step, how it is read, and how many steps become few values.

Tensors stay unread until the report: to read a tensor on a GPU is to wait for all of its queued work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from monarch_kernel.net.wire.messages import Logged

__all__ = ["MAX_VALUES", "kept_value", "numbers_of", "summed"]

MAX_VALUES = 64
"""Values of a metric in one report. If there are more, each 2, 4, 8 ... steps become one value, the same steps on all ranks."""


def kept_value(name: str, value: Any) -> Any:
    """Convert a value to what a loop keeps: a float, or a detached tensor with one element.

    Raises:
        TypeError: the value is something else.
        ValueError: the value is too large for a float.
    """
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"live.log({name}=...): the integer is too large for a float") from None
    if callable(getattr(value, "full_tensor", None)):  # a DTensor; a collective, so all ranks must log it
        value = value.full_tensor()
    detach: Callable[[], Any] | None = getattr(value, "detach", None)
    if detach is not None and (kind := _unread(value)):
        raise TypeError(f"live.log({name}=...) takes a number or a tensor with one element, not a tensor {kind}")
    if detach is not None and value.numel() == 1:
        return detach()
    if detach is None and getattr(value, "shape", None) == () and hasattr(value, "item"):
        with suppress(TypeError, ValueError):  # an array of texts or objects
            return float(value.item())
    what = f"a tensor of shape {list(value.shape)}" if hasattr(value, "shape") else f"a {type(value).__name__}"
    raise TypeError(f"live.log({name}=...) takes a number or a tensor with one element, not {what}")


def _unread(tensor: Any) -> str:
    """Say what kind of tensor has no number that the report could read later; empty for others."""
    if tensor.is_meta:
        return "on the meta device, which has no value"
    if tensor.is_complex():
        return "of complex numbers"
    if tensor.is_quantized or str(tensor.layout) != "torch.strided":
        return "that is sparse or quantized"
    return ""


def numbers_of(values: list[tuple[int, Any]]) -> list[tuple[int, float]]:
    """Convert tensors to numbers, with one read per device."""
    at = [i for i, (_, value) in enumerate(values) if type(value) is not float]
    if not at:
        return values
    import torch

    tensors = [values[i][1].reshape(()).to(torch.float64) for i in at]
    by_device: dict[Any, list[int]] = {}
    for i, tensor in zip(at, tensors):
        by_device.setdefault(tensor.device, []).append(i)
    read = list(values)
    by_place = dict(zip(at, tensors))
    for places in by_device.values():
        for i, number in zip(places, torch.stack([by_place[i] for i in places]).tolist()):
            read[i] = read[i][0], number
    return read


def summed(values: list[tuple[int, float]], most: int = MAX_VALUES, *, is_first: bool = False) -> Iterator[Logged]:
    """Combine values of neighbouring steps until there are at most ``most``; keeps their order.

    Args:
        values: steps and their values, in the order of the steps; at least one.
        most: how many combined values there may be.
        is_first: whether the metric begins with these values. Its first step is then not combined with others, and comes in
            addition, so that a chart begins where the loop does.
    """
    begin = 0
    if is_first:
        begin = sum(step == values[0][0] for step, _ in values)
        yield _combined(values[:begin], 1)
    rest, size = values[begin:], 1
    while len(rest) > most and rest[-1][0] // size - rest[0][0] // size >= most:
        size *= 2
    for _, some in groupby(rest, lambda each: each[0] // size):
        yield _combined(list(some), size)


def _combined(values: Sequence[tuple[int, float]], size: int) -> Logged:
    finite = [value for _, value in values if math.isfinite(value)]
    step, last = values[-1]
    return Logged(step, math.fsum(finite), len(finite), last, size)
