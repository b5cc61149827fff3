"""Checksums of snapshots, which are verified before a snapshot is restored.

Theory of operation. A loop must not wait for a checksum, which takes longer than the snapshot itself: about a second for a
gigabyte. So a thread computes it while training continues (`Sealer`), and the rank sends it to its buddy after the snapshot. If
snapshots are taken faster than that, the thread skips some; these, and one whose rank dies before its checksum is complete, are
restored without verification. A seal has a checksum for each tensor, so that a damaged one has a name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b

from monarch_kernel.net.wire.codec import Frame

__all__ = ["Place", "Sealer", "seal_of", "wrong_places"]

Place = tuple[int, int]
"""Where the elements of a tensor begin in a snapshot, and their number of bytes."""

_REST = (-1, 0)


class Sealer:
    """Computes seals on a thread; only the newest if it is late.

    Args:
        done: gets the key of a snapshot and its seal.
    """

    def __init__(self, done: Callable[[tuple[int, int, int], bytes], None]) -> None:
        self._done = done
        self._lock = threading.Lock()
        self._next: tuple[tuple[int, int, int], Frame, Frame, Sequence[Place]] | None = None
        self._thread: threading.Thread | None = None

    def submit(self, key: tuple[int, int, int], rest: Frame, elements: Frame, places: Sequence[Place]) -> None:
        """Seal a snapshot soon."""
        with self._lock:
            self._next = key, rest, elements, places
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-seal", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until all snapshots that were submitted are sealed or skipped."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                todo, self._next = self._next, None
                if todo is None:
                    self._thread = None
                    return
            key, rest, elements, places = todo
            self._done(key, seal_of(rest, elements, places))


def seal_of(rest: Frame, elements: Frame, places: Sequence[Place]) -> bytes:
    """Compute the seal of a snapshot.

    Args:
        rest: everything but the elements of tensors.
        elements: these elements.
        places: the place of each tensor in them.
    """
    whole = memoryview(elements)
    lines = [_line(_REST, memoryview(rest)), *(_line(place, whole[place[0] : sum(place)]) for place in places)]
    return "\n".join(lines).encode()


def _line(place: Place, content: memoryview) -> str:
    return f"{place[0]} {place[1]} {blake2b(content, digest_size=16).hexdigest()}"


def wrong_places(rest: Frame, elements: Frame, seal: bytes) -> list[Place] | None:
    """Verify a snapshot.

    Returns:
        The places of damaged tensors; None if the rest is damaged, so that they have no names.
    """
    first, *lines = seal.decode().split("\n")
    if first != _line(_REST, memoryview(rest)):
        return None
    whole = memoryview(elements)
    found = []
    for line in lines:
        at, nbytes, _ = line.split()
        place = int(at), int(nbytes)
        if line != _line(place, whole[place[0] : sum(place)]):
            found.append(place)
    return found
