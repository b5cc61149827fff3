"""Messages that wait for one neighbour, and how many bytes may be in transit to it: no I/O, no threads, no clock.

Each envelope says how many bytes its sender has sent to the neighbour in all, and how many it has received from it. The
difference is in transit: in ZeroMQ's queue, the kernel's buffers, or the network. When as much is in transit as the connection
takes in an eighth of a second, further messages wait here. So beats and small messages never wait behind megabytes, and a host
is not considered dead because its link is full. Beats go first; a beat that overtakes messages does not count them as sent.

Bytes that a broken connection has lost count as received as soon as something later arrives: the numbers are sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from monarch_kernel.net.wire.codec import Frame
from monarch_kernel.net.wire.envelope import Beat, Entry, Envelope, Hop, seal

__all__ = ["FOLD_DEPTH", "MAX_FOLD_NBYTES", "PIECE_NBYTES", "Outbox", "is_small"]

PIECE_NBYTES = 128 << 10
"""Size of the pieces of a large message; a connection that takes a megabyte a second has eight of them in transit."""

MAX_NAMES = 10_000
"""In one envelope, which is then a frame of some 100 KiB, the size of a piece."""

MAX_FOLD_NBYTES = 64 * 1024
"""Larger messages are not compared with others: comparing costs more than it saves."""

FOLD_DEPTH = 8
_WINDOW_NBYTES = 256 << 10, 64 << 20
_ACKNOWLEDGE_NBYTES = 128 << 10, 8 << 20
"""Bounds of the number of received bytes after which they are acknowledged, even if there is nothing else to send."""


class Outbox:
    """The messages that wait for one neighbour."""

    def __init__(self) -> None:
        self._entries: deque[tuple[Entry, Sequence[Frame]]] = deque()
        self._removed = 0  # entries that were removed from the front
        self._last: dict[int, int] = {}  # the position of each host's last entry, removed ones included
        self._beats: dict[tuple[int, int, bool], Beat] = {}
        self._given = 0
        self._taken = 0
        self._window = _WINDOW_NBYTES[0]
        self._taken_before = 0
        self._received = 0
        self._received_before = 0
        self._acknowledged = 0
        self._acknowledge_after = _ACKNOWLEDGE_NBYTES[0]

    @property
    def waits(self) -> bool:
        """Whether any entry waits."""
        return bool(self._entries)

    # -- incoming entries

    def put(self, entry: Entry, frames: Sequence[Frame]) -> None:
        """Queue an entry; merges it with an equal one that waits, unless that changes the order of a host's messages."""
        entries, last = self._entries, self._last
        end = self._removed + len(entries)
        if entries and not entry.goes_on and is_small(frames):
            first = max([self._removed, end - FOLD_DEPTH, *(last.get(hop.source, -1) + 1 for hop in entry.hops)])
            for i in range(end - 1, first - 1, -1):
                other, theirs = entries[i - self._removed]
                if len(theirs) == 1 and not other.goes_on and theirs[0] == frames[0]:
                    other.hops.extend(entry.hops)
                    last.update((hop.source, i) for hop in entry.hops)
                    return
        last.update((hop.source, end) for hop in entry.hops)
        entries.append((entry, frames))

    def put_beat(self, beat: Beat) -> None:
        """Queue a beat; it replaces an earlier one for the same hosts."""
        key = beat.source, beat.target, beat.over
        before = self._beats.pop(key, None)
        if before is not None and before.again and before.epoch == beat.epoch and not beat.again:
            beat = Beat(beat.source, beat.target, beat.epoch, beat.sent, beat.received, True, False, beat.attached)
        self._beats[key] = beat

    def withdraw(self, which: Callable[[Hop], bool]) -> list[tuple[Entry, Sequence[Frame]]]:
        """Remove these hops from the waiting entries, and return them in order."""
        taken, entries = [], list(self._entries)
        self._entries.clear()
        self._last.clear()
        self._removed = 0
        for entry, frames in entries:
            hops = [hop for hop in entry.hops if which(hop)]
            if hops:
                taken.append((_with(entry, hops), frames))
                entry.hops = [hop for hop in entry.hops if not which(hop)]
            if entry.hops:
                self.put(entry, frames)
        return taken

    # -- outgoing messages

    def messages(self) -> list[list[Frame]]:
        """Return what may be sent now, as multipart messages."""
        entries = self._entries
        if len(entries) != 1 or self._beats or len(entries[0][0].hops) > 1 or self._given - self._taken >= self._window:
            return list(self._messages())
        ((entry, frames),) = entries  # the usual case
        entries.clear()
        self._last.clear()
        self._removed += 1
        for frame in frames:
            self._given += len(frame)
        self._acknowledged = self._received
        return [seal(Envelope([entry], [], self._given, self._received), frames)]

    def _messages(self) -> Iterator[list[Frame]]:
        batches = list(self._batches())
        beats = list(self._beats.values())
        self._beats.clear()
        if self._entries and beats:  # the beats overtake the messages that they count
            yield self._sealed([], [beat if beat.over else _light(beat) for beat in beats])
            beats = []
        for i, batch in enumerate(batches):
            self._given += sum(len(frame) for _, frames in batch for frame in frames)
            yield self._sealed(batch, beats if i == len(batches) - 1 else [])
        if not batches and (beats or self._received - self._acknowledged >= self._acknowledge_after):
            yield self._sealed([], beats)

    def _batches(self) -> Iterator[list[tuple[Entry, Sequence[Frame]]]]:
        room = self._window - (self._given - self._taken)
        batch: list[tuple[Entry, Sequence[Frame]]] = []
        nbytes = nnames = 0
        while self._entries and room > 0:
            entry, frames = self._entries.popleft()
            self._removed += 1
            nbytes_more = sum(len(frame) for frame in frames)
            while (nnames_more := _nnames(entry)) > MAX_NAMES and len(entry.hops) > 1:
                half = len(entry.hops) // 2
                self._entries.appendleft((_with(entry, entry.hops[half:]), frames))
                self._removed -= 1
                entry = _with(entry, entry.hops[:half])
            if batch and (nbytes + nbytes_more > PIECE_NBYTES or nnames + nnames_more > MAX_NAMES):
                yield batch
                batch, nbytes, nnames = [], 0, 0
            batch.append((entry, frames))
            nbytes += nbytes_more
            nnames += nnames_more
            room -= nbytes_more
        if batch:
            yield batch
        if not self._entries:
            self._last.clear()

    def _sealed(self, batch: Sequence[tuple[Entry, Sequence[Frame]]], beats: list[Beat]) -> list[Frame]:
        self._acknowledged = self._received
        envelope = Envelope([entry for entry, _ in batch], beats, self._given, self._received)
        return seal(envelope, [frame for _, frames in batch for frame in frames])

    # -- reports of the neighbour

    def acknowledge(self, given: int, taken: int) -> bool:
        """Process the totals that the neighbour reports; returns whether there is something to send to it now."""
        self._received = given
        self._taken = max(self._taken, min(taken, self._given))
        since = self._taken - self._taken_before
        self._window = max(self._window, _between(_WINDOW_NBYTES, _WINDOW_NBYTES[0] + since // 2))
        return bool(self._entries) or self._received - self._acknowledged >= self._acknowledge_after

    def tick(self) -> None:
        """Adapt to the bytes taken in one beat: half of them may be in transit, and they are acknowledged in four parts."""
        self._window = _between(_WINDOW_NBYTES, (self._taken - self._taken_before) // 2)
        self._acknowledge_after = _between(_ACKNOWLEDGE_NBYTES, (self._received - self._received_before) // 8)
        self._taken_before, self._received_before = self._taken, self._received


def is_small(frames: Sequence[Frame]) -> bool:
    """Whether a message is compared with others, and sent in one piece."""
    return len(frames) == 1 and len(frames[0]) <= MAX_FOLD_NBYTES


def _nnames(entry: Entry) -> int:
    return sum(2 + len(hop.senders) + len(hop.receivers) for hop in entry.hops)


def _with(entry: Entry, hops: list[Hop]) -> Entry:
    return Entry(hops, entry.nframes, entry.goes_on, entry.is_cut)


def _between(bounds: tuple[int, int], nbytes: int) -> int:
    return min(bounds[1], max(bounds[0], nbytes))


def _light(beat: Beat) -> Beat:
    """The same beat, without the count of sent messages."""
    return Beat(beat.source, beat.target, beat.epoch, 0, beat.received, beat.again, False, beat.attached)
