"""The rank's part of `monarch_kernel.live.trajectory`: sends the last samples to the controller, a few times a second."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any

from monarch_kernel.errors import ForkedError
from monarch_kernel.features.live.trajectories import PER_MESSAGE, make_trajectory
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Trajectories, Trajectory
from monarch_kernel.runtime.rpc.handles import PROCESS
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank
from monarch_kernel.runtime.worker.timers import later

__all__ = ["EVERY_S", "TrajectorySender"]

EVERY_S = 0.2
"""A sample is sent after this time, with those that follow it meanwhile."""


@register
class TrajectorySender:
    """Sends the samples of a rank. A rank that shows none has no thread for this.

    Args:
        rank: the rank.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._samples: deque[Trajectory] = deque(maxlen=PER_MESSAGE)
        self._count = 0
        PROCESS.trajectories = self

    def add(self, prompt: Any, completion: Any, reward: Any, version: Any) -> None:
        """Show a sample, soon; for any thread.

        Raises:
            TypeError: a text is neither a str nor token ids, or a number is none.
            ValueError: the version has more than 63 bits.
        """
        sample = make_trajectory(prompt, completion, reward, version)
        with self._lock:
            self._samples.append(sample)
            self._count += 1
            is_first = self._count == 1
        if is_first:
            later(EVERY_S, self._send)

    def _send(self) -> None:
        with self._lock:
            message = Trajectories(self._count, tuple(self._samples))
            self._samples.clear()
            self._count = 0
        if not self._rank.is_detached():
            with contextlib.suppress(ForkedError):
                self._rank.driver.submit(pack(message))
