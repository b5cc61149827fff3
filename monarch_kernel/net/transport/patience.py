"""How often a thread yields the CPU before it sleeps. No I/O, no clock.

An answer that arrives while a thread yields needs no wake-up, which saves a third of a small call. An answer that comes later
makes all yields useless, and each costs two system calls. Which of the two is the case depends on what the other process does
and on how busy the machine is. So a thread yields only as long as most of the last waits have ended that way, and hardly longer
than these; otherwise it tries again now and then.
"""

from __future__ import annotations

__all__ = ["Patience"]

_WEIGHT = 1 / 8
"""Of the last wait in the share of waits that yields have ended."""

_PAYS = 0.5
_TRY_EVERY = 32
_SPARE = 8


class Patience:
    """Decides for each wait of one thread.

    Args:
        most: the largest number of yields in a wait.
    """

    __slots__ = ("_most", "_share", "_skipped", "_usual")

    def __init__(self, most: int) -> None:
        self._most = most
        self._share = 1.0
        self._usual = float(most)  # yields of a wait that they have ended
        self._skipped = 0

    def begin(self) -> int:
        """Return how often to yield in the wait that starts."""
        if self._share >= _PAYS:
            return min(self._most, int(2 * self._usual) + _SPARE)
        self._skipped += 1
        if self._skipped < _TRY_EVERY:
            return 0
        self._skipped = 0
        return self._most

    def end(self, yields: int, *, has_come: bool) -> None:
        """Note how a wait with yields has ended: whether something came before the thread had to sleep."""
        if has_come:
            self._usual += (yields - self._usual) * _WEIGHT
            self._share = max(_PAYS, self._share + (1 - self._share) * _WEIGHT)
        else:
            self._share -= self._share * _WEIGHT
