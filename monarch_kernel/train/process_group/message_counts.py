"""Finds out whether the ranks have sent messages that no rank has received, without asking them.

Theory of operation
===================

Each message between two ranks has a key, which sender and receiver compute alike: the name of its process group, the two ranks
and the tag. A rank adds the keys of the messages that it starts to send, and subtracts those of the messages that it starts to
receive, modulo 2^64. The sum over all ranks is 0 if each message has both ends. It is another number, except by a chance of
about 1 in 2^64, if a message lacks one: the message, or the receive, would then meet one of a later cell.

Messages that C++ code starts, such as those of ``monitored_barrier``, are not in the sum. A receive from any rank is counted
when its wait tells the sender.

Torch numbers the collectives of a group, and gloo counts messages among them. The number of collectives without messages is
the same on all ranks of a correct program; torch's number is not, because a message has two of them only.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from hashlib import blake2b

__all__ = ["MessageCounts"]

_MODULUS = 1 << 64


class MessageCounts:
    """The messages that this process has started to send or receive; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = 0
        self._numbers: dict[str, int] = {}  # by group
        self._thread = _Thread()

    def begins(self, at: float) -> None:
        """Note that the calling thread begins to send or receive a message, at a time of `time.perf_counter`."""
        self._thread.began_at = at

    def since(self, at: float) -> bool:
        """Whether the calling thread has started to send or receive a message since a time of `time.perf_counter`."""
        return self._thread.began_at >= at

    def sent(self, group: str, rank: int, target: int, tag: int) -> None:
        """Count a message from this rank.

        Args:
            group: torch's name of the process group.
            rank: this rank, by its number in the group.
            target: the rank that receives it, likewise.
            tag: its tag.
        """
        self._add(_key(group, rank, target, tag))

    def received(self, group: str, rank: int, source: int, tag: int) -> None:
        """Count a message to this rank; see `sent`."""
        self._add(-_key(group, source, rank, tag))

    def take(self) -> int:
        """Return the sum since the last call, from 0 to 2^64 - 1; 0 without messages."""
        with self._lock:
            taken, self._sum = self._sum, 0
        return taken

    def numbered(self, group: str, numbers: int) -> None:
        """Note by how many torch has raised the number of the group's collectives for messages: by each, where it is gloo's."""
        if numbers:
            with self._lock:
                self._numbers[group] = self.numbers(group) + numbers

    def numbers(self, group: str) -> int:
        """How much of torch's number of collectives in a group is messages of this rank."""
        return self._numbers.get(group, 0)

    def forget(self) -> None:
        """Forget all messages: their groups have ended."""
        with self._lock:
            self._sum = 0
            self._numbers.clear()

    def _add(self, key: int) -> None:
        with self._lock:
            self._sum = (self._sum + key) % _MODULUS


class _Thread(threading.local):
    began_at = -math.inf


@lru_cache(4096)
def _key(name: str, source: int, target: int, tag: int) -> int:
    text = f"{source} {target} {tag} {name}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
