"""How messages find their way between hosts, and none is lost or comes twice: no I/O, no threads, no clock.

Theory of operation
===================

Hosts are numbered; the controller's is 0. Each has one `Relay`. Its *neighbours* are the hosts to which it has a connection;
what is for another host goes to the neighbour from which it was last heard, and to the default one if it never was. So hosts
form any graph: a star, a tree of agents, or pairs that talk past the controller.

What is sent becomes a *draft*. The same frames for processes of many hosts are one draft with a *leg* for each host, and travel
once per neighbour: that is fan-out. Frames of several senders that are equal byte by byte, for the same receiver, are one draft
with several senders: that is folding. A draft is only joined behind the last one of its sender, so order per sender is kept.
`flush` numbers the drafts and gives what is to be handed to each neighbour; by when he calls it, the owner decides how long he
waits for what can be folded. What is passed on for other hosts is folded likewise, as one entry with the legs of several.

TCP loses what it holds when a connection breaks, and another connection may be another way through the tree. So each pair of
hosts numbers what it sends, from end to end, and keeps it until the other says that it has it (`Beat`). Who sees a gap drops
what comes after it and asks for all from there; what has come before is dropped. Relays on the way keep nothing.

A large message is cut into pieces: each that comes shows that the host is alive, while a gigabyte in one frame would not.

A new controller begins a new *life*: the numbers of the last one are void, and an agent that hears from it begins anew, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from monarch_kernel.transport.base import Peer
from monarch_kernel.wire.codec import Frame
from monarch_kernel.wire.envelope import Beat, Entry, Envelope, Leg, open_envelope, seal

__all__ = ["CONTROLLER_HOST", "Delivery", "Relay"]

CONTROLLER_HOST = 0
ACK_EVERY = 512
ACK_NBYTES = 8 << 20
PIECE_NBYTES = 2 << 20
MAX_NAMES = 100_000
"""In one envelope: so it is a frame of a few MiB at most, as the pieces are."""

MAX_FOLD_NBYTES = 64 * 1024
"""Larger messages are not compared: it would cost more than it saves."""

_FOLD_DEPTH = 8


class Delivery(NamedTuple):
    """A message has come, for processes of this host: to each of the receivers from each of the senders."""

    source: int
    senders: Sequence[Peer]
    receivers: Sequence[Peer]
    frames: list[Frame]


class _Draft:
    """A message that has not been numbered: for each host who has sent it, and to whom."""

    __slots__ = ("frames", "is_small", "legs")

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.frames = frames
        self.legs: dict[int, tuple[list[Peer], list[Peer]]] = {}
        self.is_small = _is_small(frames)


class _Kept(NamedTuple):
    """What was sent and may have to be sent again."""

    leg: Leg
    frames: Sequence[Frame]
    goes_on: bool
    is_cut: bool


@dataclass
class _Line:
    """What we and another host have sent each other."""

    life: int = 0
    sent: int = 0
    received: int = 0
    untold: int = 0  # messages, and their bytes, of which the other does not know that they have come
    untold_nbytes: int = 0
    has_asked: bool = False
    kept: deque[_Kept] = field(default_factory=deque)
    pieces: list[list[Frame]] = field(default_factory=list)  # by frame
    is_cut: bool = False


@dataclass
class _Outbox:
    """What waits for one neighbour; ``last`` is the place of each host's last message."""

    entries: list[tuple[Entry, Sequence[Frame]]] = field(default_factory=list)
    beats: list[Beat] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)


class Relay:
    """One host's part in passing messages on.

    Args:
        host: its number.
        life: which controller it is, or which it belongs to.
        default: the neighbour for hosts that were not heard of yet; None to have what is for them wait.

    Attributes:
        dropped: what had no way, or came where it does not belong.
        passed_on: messages between other hosts that came by here.
        heard: hosts that were heard of since the owner has last emptied it.
        is_given_up: the controller has given this host up.
    """

    def __init__(self, host: int, life: int = 0, default: int | None = None) -> None:
        self.host = host
        self.default = default
        self.dropped = 0
        self.passed_on = 0
        self.heard: set[int] = set()
        self.is_given_up = False
        self._life = life
        self._ways: dict[int, int] = {}
        self._lines: dict[int, _Line] = {}
        self._drafts: list[_Draft] = []
        self._last: dict[tuple[Peer, int], int] = {}
        self._stuck: dict[int, list[tuple[Entry, Sequence[Frame]]]] = {}
        self._outboxes: dict[int, _Outbox] = {}
        self._given_up: set[int] = set()

    # -- ways

    def lead(self, host: int, neighbour: int) -> None:
        """From now on, what is for a host goes to this neighbour; also what has waited for a way."""
        self._ways[host] = neighbour
        for entry, frames in self._stuck.pop(host, ()):
            self._put(neighbour, entry, frames)

    def lead_by(self, former: int, neighbour: int) -> None:
        """From now on, all that went to one neighbour goes to another."""
        if self.default == former:
            self.default = neighbour
        for host, way in list(self._ways.items()):
            if way == former:
                self._ways[host] = neighbour

    def way(self, host: int) -> int | None:
        """The neighbour to which goes what is for a host; None if it waits."""
        return self._ways.get(host, self.default)

    def give_up(self, host: int) -> None:
        """A host is gone: what is for it is dropped, and should it be heard of again it is told to end."""
        self._given_up.add(host)
        self._lines.pop(host, None)
        self._stuck.pop(host, None)

    # -- messages out

    def send(self, sender: Peer, receiver: Peer, host: int, frames: Sequence[Frame]) -> None:
        """Send a message to a process of another host, soon: see `flush`."""
        drafts, place = self._drafts, (sender, host)
        if drafts:
            last = drafts[-1]
            if last.frames is frames:  # a broadcast comes one receiver after the other
                leg = last.legs.get(host)
                if leg is None:
                    last.legs[host] = [sender], [receiver]
                    self._last[place] = len(drafts) - 1
                    return
                if leg[0] == [sender] and receiver not in leg[1]:
                    leg[1].append(receiver)
                    return
            elif self._fold(sender, receiver, host, frames):
                return
        draft = _Draft(frames)
        draft.legs[host] = [sender], [receiver]
        self._last[place] = len(drafts)
        drafts.append(draft)

    def _fold(self, sender: Peer, receiver: Peer, host: int, frames: Sequence[Frame]) -> bool:
        """Be one more sender of a message that waits, if there is one."""
        if not _is_small(frames):
            return False
        drafts = self._drafts
        first = max(self._last.get((sender, host), -1) + 1, len(drafts) - _FOLD_DEPTH)
        for i in range(len(drafts) - 1, first - 1, -1):
            draft = drafts[i]
            if draft.is_small and len(draft.legs) == 1 and draft.frames[0] == frames[0]:
                leg = draft.legs.get(host)
                if leg is not None and leg[1] == [receiver]:
                    leg[0].append(sender)
                    self._last[sender, host] = i
                    return True
        return False

    @property
    def waits(self) -> bool:
        """Whether there is anything to flush."""
        return bool(self._drafts or self._outboxes)

    @property
    def senders(self) -> int:
        """How many have sent what waits to be numbered."""
        return len(self._last)

    def beat(self) -> None:
        """Tell all hosts that we have to do with that we are alive, and what we have received."""
        for host in self._lines:
            self._beat(host)

    def greet(self, host: int) -> None:
        """Have to do with a host from now on: it gets our beats."""
        self._line(host)

    def flush(self) -> list[tuple[int, list[Frame]]]:
        """Give what is to be handed to neighbours now: (neighbour, a multipart message)."""
        drafts, self._drafts = self._drafts, []
        if drafts:
            self._last.clear()
        for draft in drafts:
            pieces = [(draft.frames, False, False)] if draft.is_small else list(_pieces(draft.frames))
            for frames, goes_on, is_cut in pieces:
                by_neighbour: dict[int, Entry] = {}
                for host, (senders, receivers) in draft.legs.items():
                    if host in self._given_up:
                        continue
                    line = self._line(host)
                    line.sent += 1
                    leg = Leg(self.host, host, line.sent, line.life, senders, receivers)
                    line.kept.append(_Kept(leg, frames, goes_on, is_cut))
                    way = self.way(host)
                    if way is None:
                        entry = Entry([leg], len(frames), goes_on, is_cut)
                        self._stuck.setdefault(host, []).append((entry, frames))
                    elif way in by_neighbour:
                        by_neighbour[way].legs.append(leg)
                    else:
                        by_neighbour[way] = Entry([leg], len(frames), goes_on, is_cut)
                for neighbour, entry in by_neighbour.items():
                    self._put(neighbour, entry, frames)
        outboxes, self._outboxes = self._outboxes, {}
        ready = []
        for neighbour, box in outboxes.items():
            *parts, last = _bounded(box.entries)
            for entries, beats in [
                *((part, []) for part in parts),
                (last, box.beats),
            ]:  # beats come after what they count
                frames_ = [frame for _, frames in entries for frame in frames]
                ready.append((neighbour, seal(Envelope([entry for entry, _ in entries], beats), frames_)))
        return ready

    def _put(self, neighbour: int, entry: Entry, frames: Sequence[Frame]) -> None:
        """Have an entry wait for a neighbour; together with an equal one, if no host's messages change their order."""
        box = self._outboxes.setdefault(neighbour, _Outbox())
        entries, last = box.entries, box.last
        if entries and not entry.goes_on and _is_small(frames):
            first = max([0, len(entries) - _FOLD_DEPTH, *(last.get(leg.source, -1) + 1 for leg in entry.legs)])
            for i in range(len(entries) - 1, first - 1, -1):
                other, theirs = entries[i]
                if len(theirs) == 1 and not other.goes_on and theirs[0] == frames[0]:
                    other.legs.extend(entry.legs)
                    last.update((leg.source, i) for leg in entry.legs)
                    return
        last.update((leg.source, len(entries)) for leg in entry.legs)
        entries.append((entry, frames))

    def _beat(self, host: int, *, again: bool = False) -> None:
        line = self._line(host)
        line.untold = line.untold_nbytes = 0
        self._pass_beat(Beat(self.host, host, line.life, line.sent, line.received, again))

    def _pass_beat(self, beat: Beat) -> None:
        way = self.way(beat.target)
        if way is not None:
            self._outboxes.setdefault(way, _Outbox()).beats.append(beat)

    def _line(self, host: int) -> _Line:
        line = self._lines.get(host)
        if line is None:
            life = self._life if CONTROLLER_HOST in (host, self.host) else 0
            line = self._lines[host] = _Line(life)
        return line

    # -- messages in

    def hear(self, neighbour: int, parts: Sequence[Frame]) -> Iterator[Delivery]:
        """Take a message of a neighbour apart: what is for us is given, what is for others waits for `flush`.

        Raises:
            WireError: it is none of ours.
        """
        envelope = open_envelope(parts)
        taken = 1
        for entry in envelope.entries:
            frames = parts[taken : taken + entry.nframes]
            taken += entry.nframes
            onward: dict[int, list[Leg]] = {}
            for leg in entry.legs:
                if leg.source == self.host or leg.source in self._given_up:
                    self._say_over(leg.source, neighbour)
                    continue
                self._heard_of(leg.source, neighbour)
                if leg.target != self.host:
                    way = self.way(leg.target)
                    if way is None or way == neighbour:
                        self.dropped += 1
                    else:
                        onward.setdefault(way, []).append(leg)
                elif (whole := self._accept(leg, entry, frames)) is not None:
                    yield Delivery(leg.source, leg.senders, leg.receivers, whole)
            for way, legs in onward.items():
                self.passed_on += len(legs)
                self._put(way, Entry(legs, entry.nframes, entry.goes_on, entry.is_cut), frames)
        for beat in envelope.beats:
            if beat.source == self.host or beat.source in self._given_up:
                self._say_over(beat.source, neighbour)
                continue
            self._heard_of(beat.source, neighbour)
            if beat.target == self.host:
                self._heard_beat(beat)
            elif self.way(beat.target) != neighbour:
                self._pass_beat(beat)
            else:
                self.dropped += 1

    def _heard_of(self, host: int, neighbour: int) -> None:
        self.heard.add(host)
        if self._ways.get(host) != neighbour:
            self.lead(host, neighbour)

    def _say_over(self, host: int, neighbour: int) -> None:
        self.dropped += 1
        if host != self.host:
            over = Beat(self.host, host, self._life, 0, 0, over=True)
            self._outboxes.setdefault(neighbour, _Outbox()).beats.append(over)

    def _is_of_this_life(self, host: int, life: int, line: _Line) -> bool:
        """Whether something is numbered as we number; an agent that hears of a new controller begins anew."""
        if life > line.life and self.host != CONTROLLER_HOST and host == CONTROLLER_HOST:
            self._lines[host] = _Line(life)
            return True
        return life == line.life

    def _accept(self, leg: Leg, entry: Entry, frames: Sequence[Frame]) -> list[Frame] | None:
        """Give a message whose turn it is, when all of its pieces have come."""
        host = leg.source
        if not self._is_of_this_life(host, leg.life, self._line(host)):
            self.dropped += 1
            return None
        line = self._line(host)
        if leg.number <= line.received:
            return None  # it was sent again
        if leg.number > line.received + 1:
            if not line.has_asked:
                line.has_asked = True
                self._beat(host, again=True)
            return None
        line.received += 1
        line.has_asked = False
        line.untold += 1
        line.untold_nbytes += sum(len(frame) for frame in frames)
        if line.untold >= ACK_EVERY or line.untold_nbytes >= ACK_NBYTES:
            self._beat(host)
        if not (entry.goes_on or line.pieces):
            return list(frames)
        pieces = line.pieces
        if line.is_cut:
            pieces[-1].append(frames[0])
            frames = frames[1:]
        pieces.extend([frame] for frame in frames)
        line.is_cut = entry.is_cut
        if entry.goes_on:
            return None
        line.pieces = []
        return [_joined(piece) for piece in pieces]

    def _heard_beat(self, beat: Beat) -> None:
        if beat.over:
            self.is_given_up |= beat.source == CONTROLLER_HOST
            return
        if not self._is_of_this_life(beat.source, beat.life, self._line(beat.source)):
            self.dropped += 1
            return
        line = self._line(beat.source)
        while line.kept and line.kept[0].leg.number <= beat.received:
            line.kept.popleft()
        if beat.again and (way := self.way(beat.source)) is not None:
            for kept in line.kept:
                self._put(way, Entry([kept.leg], len(kept.frames), kept.goes_on, kept.is_cut), kept.frames)
        line.has_asked = False
        if beat.sent > line.received:  # it comes after what it counts: that is lost
            line.has_asked = True
            self._beat(beat.source, again=True)


def _bounded(entries: list[tuple[Entry, Sequence[Frame]]]) -> list[list[tuple[Entry, Sequence[Frame]]]]:
    """Distribute entries to as many envelopes as it takes for none to become too large a frame; at least one."""
    parts: list[list[tuple[Entry, Sequence[Frame]]]] = [[]]
    n_names = 0
    for entry, frames in entries:
        n = sum(2 + len(leg.senders) + len(leg.receivers) for leg in entry.legs)
        if n_names + n > MAX_NAMES and parts[-1]:
            parts.append([])
            n_names = 0
        n_names += n
        parts[-1].append((entry, frames))
    return parts


def _is_small(frames: Sequence[Frame]) -> bool:
    return len(frames) == 1 and len(frames[0]) <= MAX_FOLD_NBYTES


def _pieces(frames: Sequence[Frame]) -> Iterator[tuple[list[Frame], bool, bool]]:
    """Cut a message: (frames of a piece, whether another follows, whether that begins with the rest of the last frame)."""
    piece: list[Frame] = []
    room = PIECE_NBYTES
    for i, frame in enumerate(frames):
        view = memoryview(frame)
        start = 0
        while len(view) - start > room:
            piece.append(view[start : start + room])
            start += room
            yield piece, True, True
            piece, room = [], PIECE_NBYTES
        piece.append(frame if not start else view[start:])
        room -= len(view) - start
        if room <= 0 and i < len(frames) - 1:
            yield piece, True, False
            piece, room = [], PIECE_NBYTES
    yield piece, False, False


def _joined(pieces: Iterable[Frame]) -> Frame:
    first, *rest = pieces
    return memoryview(bytearray().join([first, *rest])) if rest else first
