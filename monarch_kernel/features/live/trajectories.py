"""Samples of a generator that ranks show: their texts, and the last ones of each mesh. Pure, no I/O.

A rank sends at most `PER_MESSAGE` samples at a time, `MAX_TEXT` characters of each text, and the controller keeps `KEPT` of a
mesh. So what is shown costs the same however many samples there are, and however long they are.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from monarch_kernel.base.events import TrajectoryView
from monarch_kernel.net.wire.messages import Trajectories, Trajectory

__all__ = ["KEPT", "MAX_TEXT", "PER_MESSAGE", "TrajectoryBook", "make_trajectory", "shortened"]

MAX_TEXT = 1_000
"""Characters of a prompt or completion; of a longer one the beginning and the end are kept."""

PER_MESSAGE = 16
"""Samples that a rank sends at a time: the last ones."""

KEPT = 32
"""Samples of a mesh that the controller keeps: the last ones."""

_MESHES = 16
"""Meshes whose samples the controller keeps: those that have shown some last."""

_MOST = 1 << 63
_SHOWN = 40


def make_trajectory(prompt: Any, completion: Any, reward: Any, version: Any) -> Trajectory:
    """Make a trajectory of what a user passes.

    Raises:
        TypeError: a text is neither a str nor token ids, or a number is none.
        ValueError: the version has more than 63 bits.
    """
    texts = shortened(_text("prompt", prompt)), shortened(_text("completion", completion))
    return Trajectory(*texts, _reward(reward), _version(version))


def shortened(text: str) -> str:
    """Return a text of at most `MAX_TEXT` characters: of a longer one the beginning and the end, as an answer comes last.

    Characters that can't be sent, such as half of a surrogate pair, become question marks.
    """
    if len(text) > MAX_TEXT:
        middle = f" … {len(text) - MAX_TEXT + _SHOWN:,} characters … "
        half = (MAX_TEXT - _SHOWN) // 2
        text = f"{text[:half]}{middle}{text[-half:]}"
    return text.encode("utf-8", "replace").decode()


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    ids = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(ids, Sequence) and not isinstance(ids, (bytes, bytearray)) and all(isinstance(i, int) for i in ids):
        return " ".join(map(str, ids))
    raise TypeError(f"live.trajectory({name}=a {type(value).__name__}): pass a text, or token ids as a list of int")


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, str):
        try:
            return float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass  # RuntimeError: a tensor with several elements, or one without a value
    raise TypeError(f"live.trajectory(reward=a {type(value).__name__}): pass a number, or a tensor with one element")


def _version(value: Any) -> int | None:
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"live.trajectory(version=a {type(value).__name__}): pass an integer, such as the step"
        ) from None
    if not -_MOST <= number < _MOST:
        raise ValueError(
            f"live.trajectory(version=...): the integer has {number.bit_length()} bits, but may have at most 63"
        )
    return number


class TrajectoryBook:
    """The last samples that the ranks of each mesh have shown."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[tuple[int, TrajectoryView]]] = {}  # by mesh, each with its process
        self._counts: dict[str, dict[int, int]] = {}  # by mesh, process -> how many it has shown

    def add(self, mesh: str, proc: int, rank: int, message: Trajectories) -> None:
        """Note the samples of a rank; longer texts and more samples than a rank sends are cut."""
        kept = self._samples[mesh] = self._samples.pop(mesh, deque(maxlen=KEPT))  # moves the mesh to the end
        counts = self._counts.setdefault(mesh, {})
        for each in message.samples[-PER_MESSAGE:]:
            texts = shortened(each.prompt), shortened(each.completion)
            kept.append((proc, TrajectoryView(rank, *texts, each.reward, each.version)))
        counts[proc] = counts.get(proc, 0) + max(len(message.samples), message.count)
        while len(self._samples) > _MESHES:
            oldest = next(iter(self._samples))
            del self._samples[oldest], self._counts[oldest]

    def of(self, mesh: str, procs: Collection[int]) -> tuple[tuple[TrajectoryView, ...], int]:
        """Return the last samples of these processes of a mesh, the newest last, and how many they have shown."""
        if mesh not in self._samples:
            return (), 0
        return _of(self._samples[mesh].copy(), procs), sum(
            count for proc, count in self._counts[mesh].copy().items() if proc in procs
        )


def _of(samples: Iterable[tuple[int, TrajectoryView]], procs: Collection[int]) -> tuple[TrajectoryView, ...]:
    return tuple(sample for proc, sample in samples if proc in procs)
