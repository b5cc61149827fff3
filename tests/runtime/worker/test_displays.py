"""A rank that displays faster than the controller reads waits, so that its queue stays small."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_kernel.net.wire.codec import Packed
from monarch_kernel.runtime.worker.displays import MOST_NBYTES, Displays


class Queue:
    """A connection whose other end reads a little whenever the rank waits."""

    def __init__(self, reads: int) -> None:
        self.nbytes = self.most = self.waits = 0
        self.is_closed = False
        self._reads = reads

    def submit(self, packed: Packed) -> None:
        self.nbytes += len(packed.header)
        self.most = max(self.most, self.nbytes)

    def wait(self, waiter: Any, timeout_s: float) -> bool:
        assert timeout_s > 0  # otherwise nothing is sent
        self.waits += 1
        self.nbytes = max(0, self.nbytes - self._reads)
        return False


@pytest.mark.parametrize("nbytes", [1_000, 1_000_000, 100_000_000])
def test_the_queue_is_bounded(nbytes: int) -> None:
    queue = Queue(reads=500_000)
    displays = Displays(queue, lambda: queue.nbytes)  # type: ignore[arg-type]
    display = Packed(bytes(nbytes))
    for _ in range(300_000_000 // nbytes):
        displays.send(display)
        displays.wait()
    assert queue.most <= MOST_NBYTES + (1 << 20) + nbytes
    assert queue.waits


def test_a_few_small_displays_wait_for_nothing() -> None:
    queue = Queue(reads=0)
    displays = Displays(queue, lambda: queue.nbytes)  # type: ignore[arg-type]
    for _ in range(100):
        displays.send(Packed(bytes(1_000)))
        displays.wait()
    assert queue.waits == 0


def test_a_rank_that_ends_does_not_wait() -> None:
    queue = Queue(reads=0)
    queue.is_closed = True
    displays = Displays(queue, lambda: queue.nbytes)  # type: ignore[arg-type]
    displays.send(Packed(bytes(2 * MOST_NBYTES)))
    displays.wait()
    assert queue.nbytes > MOST_NBYTES
