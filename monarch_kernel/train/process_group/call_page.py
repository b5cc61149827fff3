"""Memory in which the ranks of one machine publish the collective that each calls in a process group.

Theory of operation
===================

For each of the last collectives of the group, each rank has a *word* and a *record*. The record is the call, as bytes, and the
line that made it; the word has the number of the collective and a digest of the call. A rank first publishes its own call, and
then compares the words of the others for the same number. Of two ranks with different calls at least the later one finds the
difference, before it has exchanged any data, and no rank ever waits: a rank that has not come yet has no word for this number.

The memory is a file in the directory of the session, mapped by all ranks of the group that have this directory. Its name
contains a random key, which the ranks have agreed on when they formed the group, so that a group never sees calls of an earlier
one. The last rank that maps the file removes its name. Ranks write aligned words of 8 bytes, which no reader sees half written;
a record is valid only with the digest in the word, so that one that is just overwritten is ignored.

Messages between two ranks have separate places (`MessagePlaces`), because only these two ranks count them: the sender and the
receiver of a message number it alike, by the messages before it with the same sender, receiver and tag.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from hashlib import blake2b
from typing import NamedTuple

from monarch_kernel.train.process_group.collective_calls import Call

__all__ = ["MAX_RANKS", "CallPage", "Message", "MessagePlaces", "Published"]

MAX_RANKS = 256
"""Larger groups are not checked: each call would read the words of all ranks."""

_SLOTS = 64
"""Collectives whose calls are kept. A rank that is this far ahead of another one is not compared with it."""

_RECORD_NBYTES = 512
_TEXT_NBYTES = 4096
_HEAD_NBYTES = 4096
"""A word for the rank that has refused a collective, then one byte for each rank that has the page."""

_RANKS = 8
_MARKS = _RANKS + MAX_RANKS
"""Offset of one byte for each rank: whether its messages can be numbered."""

_MAX_TAG = 1 << 22
_MAX_NUMBER = 1 << 32
_DIGEST_BITS = 40
_DIGEST = (1 << _DIGEST_BITS) - 1
_NUMBER = (1 << 24) - 1
_SPREAD = 0x9E3779B97F  # odd, so that different numbers of uncompared collectives never cancel out


class Published:
    """A call as it is published: made once for each kind of call and each line.

    Args:
        call: the call.
        line: the line of code that made it.
    """

    __slots__ = ("call", "digest", "line", "record")

    def __init__(self, call: Call, line: str) -> None:
        data = call.encode()
        most = _RECORD_NBYTES - 4
        text = line.encode()[: max(0, most - len(data))]
        self.call = call
        self.line = text.decode(errors="ignore")
        self.digest = _digest(data)
        fits = len(data) <= most  # else others see that it differs, but not how, and ignore it
        head = (len(data) if fits else 0).to_bytes(2, "little") + (len(text) if fits else 0).to_bytes(2, "little")
        self.record = head + data + text if fits else head


class Message(NamedTuple):
    """A message between two ranks of a group.

    Attributes:
        source: the rank in the group that sends it.
        target: the rank in the group that receives it.
        tag: its tag.
        number: its number among the messages with the same source, target and tag, counted from 1.
    """

    source: int
    target: int
    tag: int
    number: int


class MessagePlaces:
    """Where each rank of a group publishes the messages that it sends and receives; a part of a `CallPage`.

    Each rank has places for some messages. A word with the message says which one is in a place, and a word with a digest
    belongs to the record, as for a collective.

    Args:
        memory: the memory of the page from the first place on.
        marks: one byte for each rank.
        rank: rank of this process in the group.
        size: number of ranks in the group.
    """

    def __init__(self, memory: memoryview, marks: memoryview, rank: int, size: int) -> None:
        words = 8 * _SLOTS * size
        self._messages = memory[:words].cast("Q")
        self._digests = memory[words : 2 * words].cast("Q")
        self._records = memory[2 * words : self.nbytes(size)]
        self._marks = marks
        self._rank = rank
        self._lock = threading.Lock()

    @staticmethod
    def nbytes(size: int) -> int:
        """The memory that the places of so many ranks take."""
        return (16 + _RECORD_NBYTES) * _SLOTS * size

    def mark(self) -> None:
        """Note that messages of this rank can't be numbered: it receives from any rank, or C++ code sends some."""
        self._marks[self._rank] = 1

    def compares(self, message: Message) -> bool:
        """Whether both ranks of a message, as far as they share this memory, can number it."""
        return not (self._marks[message.source] or self._marks[message.target])

    def publish(self, message: Message, published: Published) -> tuple[Call, str] | None:
        """Publish this rank's call for a message; returns the other rank's call and line if it is there and different.

        Args:
            message: the message; this rank is its source or its target.
            published: the call, which has the same record on both ranks if the two calls are equal.
        """
        word = self._word(message)
        if not word or not self.compares(message):
            return None
        is_sent = message.source == self._rank
        other = message.target if is_sent else message.source
        place = (message.number + 5 * other + 11 * message.tag) % _SLOTS
        theirs = (message.number + 5 * self._rank + 11 * message.tag) % _SLOTS + _SLOTS * other
        mine = place + _SLOTS * self._rank
        record = published.record
        with self._lock:  # its release is also a barrier between this write and the reads of the other rank
            self._messages[mine] = 0
            self._records[_RECORD_NBYTES * mine : _RECORD_NBYTES * mine + len(record)] = record
            self._digests[mine] = published.digest
            self._messages[mine] = word << 1 | is_sent
        wanted = word << 1 | (not is_sent)
        if self._messages[theirs] != wanted or self._digests[theirs] == published.digest:
            return None
        digest = self._digests[theirs]
        found = _read(bytes(self._records[_RECORD_NBYTES * theirs : _RECORD_NBYTES * (theirs + 1)]), digest)
        return found if self._messages[theirs] == wanted else None

    def retract(self, message: Message) -> None:
        """Withdraw this rank's call, which has failed before it took part."""
        other = message.target if message.source == self._rank else message.source
        place = (message.number + 5 * other + 11 * message.tag) % _SLOTS
        self._messages[place + _SLOTS * self._rank] = 0

    @staticmethod
    def _word(message: Message) -> int:
        """All of a message in 63 bits; 0 for one that has no word."""
        source, target, tag, number = message
        if not 0 <= tag < _MAX_TAG or number >= _MAX_NUMBER:
            return 0
        return (number << 22 | tag) << 8 | (source ^ target)


class CallPage:
    """The memory of one group, as one rank uses it. Thread-safe.

    Args:
        path: the file; the first rank creates it.
        rank: rank of this process in the group.
        size: number of ranks in the group.

    Raises:
        OSError: the file can't be made or mapped.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._lock = threading.Lock()
        self._records = _HEAD_NBYTES + 16 * _SLOTS * size
        self._texts = self._records + _RECORD_NBYTES * _SLOTS * size
        places = self._texts + _TEXT_NBYTES * size
        nbytes = places + MessagePlaces.nbytes(size)  # memory that is never written takes none
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, nbytes)
            self._map = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        view = memoryview(self._map)
        self._head = view[:_RANKS].cast("Q")
        self._words = view[_HEAD_NBYTES : _HEAD_NBYTES + 8 * _SLOTS * size].cast("Q")
        self._uncompared = view[_HEAD_NBYTES + 8 * _SLOTS * size : self._records].cast("q")
        self.messages = MessagePlaces(view[places:nbytes], view[_MARKS : _MARKS + size], rank, size)
        self._path = path
        self._map[_RANKS + rank] = 1
        if self._map[_RANKS : _RANKS + size].count(1) == size:
            self.unlink()

    def publish(self, number: int, uncompared: int, published: Published) -> bool:
        """Publish the call of this rank; returns whether a rank has published a different one for this number.

        Args:
            number: of the collective in the group.
            uncompared: how many collectives before it were not published.
            published: the call.
        """
        slot = number % _SLOTS
        first = slot * self.size
        mine = first + self.rank
        low = (number & _NUMBER) << _DIGEST_BITS
        word = low | published.digest ^ (uncompared * _SPREAD & _DIGEST)
        at = self._records + _RECORD_NBYTES * mine
        record = published.record
        with self._lock:  # its release is also a barrier between this write and the reads of the others
            self._map[at : at + len(record)] = record
            self._uncompared[mine] = uncompared
            self._words[mine] = word
        row = self._words[first : first + self.size].tolist()
        if row.count(word) == self.size:
            return False
        return any(each != word and each & ~_DIGEST == low for each in row)

    def calls(self, number: int, uncompared: int) -> dict[int, tuple[Call, str]]:
        """The calls that ranks have published for a number, and their lines, by rank.

        A rank that has made another number of collectives that were not published is left out: its call may be for another
        collective.
        """
        slot = number % _SLOTS
        found = {}
        for rank in range(self.size):
            index = slot * self.size + rank
            word = self._words[index]
            if word >> _DIGEST_BITS != number & _NUMBER or self._uncompared[index] != uncompared:
                continue
            at = self._records + _RECORD_NBYTES * index
            call = _read(self._map[at : at + _RECORD_NBYTES], word & _DIGEST ^ (uncompared * _SPREAD & _DIGEST))
            if call is not None:
                found[rank] = call
        return found

    def unlink(self) -> None:
        """Remove the name of the file; ranks that have mapped it keep it."""
        with contextlib.suppress(OSError):  # another rank has removed it
            os.unlink(self._path)

    def retract(self, number: int) -> None:
        """Withdraw the call of this rank, which has failed before it took part."""
        self._words[number % _SLOTS * self.size + self.rank] = 0

    def withdraw(self) -> None:
        """Withdraw all calls of this rank, because collectives that it has started are aborted."""
        for slot in range(_SLOTS):
            self._words[slot * self.size + self.rank] = 0

    @property
    def is_refused(self) -> bool:
        """Whether a rank has refused a collective of the group."""
        return self._head[0] != 0

    @property
    def refusal(self) -> str:
        """Why a rank has refused a collective of the group, from where on it can't be used; empty if none has."""
        refused_by = self._head[0]
        if not refused_by:
            return ""
        at = self._texts + _TEXT_NBYTES * (refused_by - 1)
        return self._map[at : at + _TEXT_NBYTES].rstrip(b"\0").decode(errors="ignore")

    def refuse(self, text: str) -> str:
        """Make the group unusable for all ranks; returns the text of the rank that was first."""
        at = self._texts + _TEXT_NBYTES * self.rank
        data = text.encode()[:_TEXT_NBYTES]
        with self._lock:
            if not self._head[0]:
                self._map[at : at + len(data)] = data
                self._head[0] = self.rank + 1
        return self.refusal


def _read(record: bytes, digest: int) -> tuple[Call, str] | None:
    """Read a record: the call and its line; None if its call did not fit, or if it has another digest."""
    nbytes, text_nbytes = (int.from_bytes(record[i : i + 2], "little") for i in (0, 2))
    data, text = record[4 : 4 + nbytes], record[4 + nbytes : 4 + nbytes + text_nbytes]
    if not data or _digest(data) != digest:
        return None
    return Call.decode(data), text.decode(errors="ignore")


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=_DIGEST_BITS // 8).digest(), "little")
