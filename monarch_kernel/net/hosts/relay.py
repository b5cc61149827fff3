"""Routes messages between hosts so that none is lost or arrives twice: no I/O, no threads, no clock.

Theory of operation
===================

Hosts are numbered; the controller's is 0. Each has one `Relay`. Its *neighbours* are the hosts to which it has a connection.
A message for another host goes to the neighbour that brought the last message of that host, or to the default neighbour if
there was none. So hosts can form any graph: a star, a tree of agents, or pairs that bypass the controller.

A message to send becomes a *draft*. The same frames for processes of many hosts are one draft with a *hop* (`Hop`) for each
host, and travel once per neighbour: that is fan-out. Frames of several senders that are equal byte by byte, for the same
receiver, are one draft with several senders: that is folding. A sender joins only a draft after its last one, so order per
sender is kept.
`flush` numbers the drafts and returns the messages for each neighbour; the caller decides when, and so how long messages wait
to be folded. Messages that are forwarded for other hosts are folded likewise, as one entry with the hops of several.

TCP loses what is in transit when a connection breaks, and the next connection may take another path through the tree. So each
pair of hosts numbers its messages end to end, and keeps them until the other acknowledges them (`Beat`). A receiver that sees a
gap drops the messages after it and requests all from there; it drops duplicates, too. Relays on the way keep nothing.

A large message is cut into pieces: each piece that arrives shows that the host is alive, while a gigabyte in one frame would
not. The `Outbox` of a neighbour limits how many pieces are in transit to it; the messages that wait there are numbered already.

A new controller starts a new *epoch*: the numbers of the last one are void, and an agent that gets its messages starts
again, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from monarch_kernel.net.hosts.flow_control import FOLD_DEPTH, PIECE_NBYTES, Outbox, is_small
from monarch_kernel.net.transport.base import Peer
from monarch_kernel.net.wire.codec import Frame
from monarch_kernel.net.wire.envelope import Beat, Entry, Hop, open_envelope

__all__ = ["CONTROLLER_HOST", "Delivery", "Relay"]

CONTROLLER_HOST = 0
ACK_EVERY = 512
ACK_NBYTES = 8 << 20


class Delivery(NamedTuple):
    """A message for processes of this host: from each of the senders to each of the receivers."""

    source: int
    senders: Sequence[Peer]
    receivers: Sequence[Peer]
    frames: list[Frame]


class _Draft:
    """A message without a number yet, with its senders and receivers for each host."""

    __slots__ = ("frames", "hops", "is_small")

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.frames = frames
        self.hops: dict[int, tuple[list[Peer], list[Peer]]] = {}
        self.is_small = is_small(frames)


class _SentMessage(NamedTuple):
    """A sent message that is kept in case it must be sent again."""

    hop: Hop
    frames: Sequence[Frame]
    goes_on: bool
    is_cut: bool


@dataclass
class _Session:
    """The state of the exchange with another host."""

    epoch: int = 0
    sent: int = 0
    received: int = 0
    unacknowledged: int = 0  # received messages that are not acknowledged, and their bytes
    unacknowledged_nbytes: int = 0
    has_asked: bool = False
    latest: int = 0  # number of the last message that came after a gap
    kept: deque[_SentMessage] = field(default_factory=deque)
    pieces: list[Frame | bytearray] = field(
        default_factory=list
    )  # the frames received so far; the last one may be incomplete
    is_cut: bool = False


class Relay:
    """Routes the messages of one host.

    Args:
        host: its number.
        epoch: the number of controllers before this one, or before the one that the host belongs to.
        default: the neighbour for hosts that have sent nothing yet; None to queue messages for them.
        members: the hosts of the session; None if they are not known, and any host is accepted.

    Attributes:
        dropped: number of messages that had no path, or came from a host where they do not belong.
        passed_on: number of messages between other hosts that were forwarded.
        active: hosts that have sent something since the owner last emptied the set.
        is_given_up: whether the controller has given this host up.
        is_attached: whether there is certainly a path to the controller's process, as this host's beats say.
        attached: hosts that have said so of themselves since the owner last emptied the set.
    """

    def __init__(
        self, host: int, epoch: int = 0, default: int | None = None, members: Container[int] | None = None
    ) -> None:
        self.host = host
        self._members = members
        self.default = default
        self.dropped = 0
        self.passed_on = 0
        self.active: set[int] = set()
        self.is_given_up = False
        self.is_attached = False
        self.attached: set[int] = set()
        self._epoch = epoch
        self._paths: dict[int, int] = {}
        self._sessions: dict[int, _Session] = {}
        self._drafts: list[_Draft] = []
        self._last: dict[tuple[Peer, int], int] = {}
        self._without_path: dict[int, list[tuple[Entry, Sequence[Frame]]]] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._due: set[int] = set()  # neighbours for which there may be something to send
        self._given_up: set[int] = set()

    # -- paths

    def lead(self, host: int, neighbour: int) -> None:
        """Send messages for a host to this neighbour from now on, including those that waited for a path."""
        former = self._paths.get(host, self.default)
        self._paths[host] = neighbour
        for entry, frames in self._without_path.pop(host, ()):
            self._put(neighbour, entry, frames)
        if former not in (None, neighbour):
            self._redirect(former, lambda hop: hop.target == host)

    def lead_by(self, former: int, neighbour: int) -> None:
        """Send everything that went to one neighbour to another from now on."""
        if self.default == former:
            self.default = neighbour
        for host, way in list(self._paths.items()):
            if way == former:
                self._paths[host] = neighbour
        self._redirect(former, lambda hop: True)

    def _redirect(self, former: int, which: Callable[[Hop], bool]) -> None:
        """Move messages that wait for a neighbour to their current paths."""
        box = self._outboxes.get(former)
        for entry, frames in box.withdraw(which) if box is not None and box.waits else ():
            for hop in entry.hops:
                if (way := self.way(hop.target)) is not None:
                    self._put(way, Entry([hop], entry.nframes, entry.goes_on, entry.is_cut), frames)

    def way(self, host: int) -> int | None:
        """Return the neighbour for messages to a host; None if they wait."""
        return self._paths.get(host, self.default)

    def is_congested(self, host: int) -> bool:
        """Whether messages wait for the neighbour on the way to a host, or for a path."""
        box = self._outboxes.get(way) if (way := self.way(host)) is not None else None
        return host in self._without_path or (box is not None and box.waits)

    def give_up(self, host: int) -> None:
        """Drop the messages for a lost host; if it sends anything again, it receives the order to end."""
        self._given_up.add(host)
        self._sessions.pop(host, None)
        self._without_path.pop(host, None)
        for box in self._outboxes.values():
            box.withdraw(lambda hop: hop.target == host)

    # -- outgoing messages

    def send(self, sender: Peer, receiver: Peer, host: int, frames: Sequence[Frame]) -> None:
        """Queue a message to a process of another host; `flush` sends it."""
        drafts, place = self._drafts, (sender, host)
        if drafts:
            last = drafts[-1]
            if last.frames is frames:  # a broadcast calls this for one receiver after the other
                hop = last.hops.get(host)
                if hop is None:
                    last.hops[host] = [sender], [receiver]
                    self._last[place] = len(drafts) - 1
                    return
                if hop[0] == [sender] and receiver not in hop[1]:
                    hop[1].append(receiver)
                    return
            elif self._fold(sender, receiver, host, frames):
                return
        draft = _Draft(frames)
        draft.hops[host] = [sender], [receiver]
        self._last[place] = len(drafts)
        drafts.append(draft)

    def _fold(self, sender: Peer, receiver: Peer, host: int, frames: Sequence[Frame]) -> bool:
        """Join an equal message that waits as one more sender, if there is one."""
        if not is_small(frames):
            return False
        drafts = self._drafts
        first = max(self._last.get((sender, host), -1) + 1, len(drafts) - FOLD_DEPTH)
        for i in range(len(drafts) - 1, first - 1, -1):
            draft = drafts[i]
            if draft.is_small and len(draft.hops) == 1 and draft.frames[0] == frames[0]:
                hop = draft.hops.get(host)
                if hop is not None and hop[1] == [receiver]:
                    hop[0].append(sender)
                    self._last[sender, host] = i
                    return True
        return False

    @property
    def waits(self) -> bool:
        """Whether there is anything to flush."""
        return bool(self._drafts or self._due)

    @property
    def senders(self) -> int:
        """Number of senders of messages that have no number yet."""
        return len(self._last)

    def beat(self) -> None:
        """Send a beat to all known hosts: we are alive, and what we have received; call this at even intervals."""
        for host in self._sessions:
            self._beat(host)
        for box in self._outboxes.values():
            box.tick()

    def greet(self, host: int) -> None:
        """Start to send beats to a host."""
        self._session(host)

    def flush(self) -> list[tuple[int, list[Frame]]]:
        """Return the messages to send to neighbours now: (neighbour, multipart message)."""
        drafts, self._drafts = self._drafts, []
        if drafts:
            self._last.clear()
        for draft in drafts:
            pieces = [(draft.frames, False, False)] if draft.is_small else list(_pieces(draft.frames))
            for frames, goes_on, is_cut in pieces:
                by_neighbour: dict[int, Entry] = {}
                for host, (senders, receivers) in draft.hops.items():
                    if host in self._given_up:
                        continue
                    session = self._session(host)
                    session.sent += 1
                    hop = Hop(self.host, host, session.sent, session.epoch, senders, receivers)
                    session.kept.append(_SentMessage(hop, frames, goes_on, is_cut))
                    way = self.way(host)
                    if way is None:
                        entry = Entry([hop], len(frames), goes_on, is_cut)
                        self._without_path.setdefault(host, []).append((entry, frames))
                    elif way in by_neighbour:
                        by_neighbour[way].hops.append(hop)
                    else:
                        by_neighbour[way] = Entry([hop], len(frames), goes_on, is_cut)
                for neighbour, entry in by_neighbour.items():
                    self._put(neighbour, entry, frames)
        due, self._due = self._due, set()
        return [(neighbour, parts) for neighbour in due for parts in self._outboxes[neighbour].messages()]

    def _put(self, neighbour: int, entry: Entry, frames: Sequence[Frame]) -> None:
        self._outbox(neighbour).put(entry, frames)

    def _outbox(self, neighbour: int) -> Outbox:
        """Return the outbox of a neighbour, and mark the neighbour as due."""
        self._due.add(neighbour)
        box = self._outboxes.get(neighbour)
        if box is None:
            box = self._outboxes[neighbour] = Outbox()
        return box

    def _beat(self, host: int, *, again: bool = False) -> None:
        session = self._session(host)
        session.unacknowledged = session.unacknowledged_nbytes = 0
        self._pass_beat(
            Beat(self.host, host, session.epoch, session.sent, session.received, again, False, self.is_attached)
        )

    def _pass_beat(self, beat: Beat) -> None:
        way = self.way(beat.target)
        if way is not None:
            self._outbox(way).put_beat(beat)

    def _session(self, host: int) -> _Session:
        session = self._sessions.get(host)
        if session is None:
            epoch = self._epoch if CONTROLLER_HOST in (host, self.host) else 0
            session = self._sessions[host] = _Session(epoch)
        return session

    # -- incoming messages

    def receive(self, neighbour: int, parts: Sequence[Frame]) -> Iterator[Delivery]:
        """Process a message of a neighbour: yields what is for this host, and queues what is for others until `flush`.

        Raises:
            WireError: it is not a valid envelope.
        """
        envelope = open_envelope(parts)
        if self._members is not None and neighbour not in self._members:
            self.dropped += 1
            return
        box = self._outboxes.get(neighbour)
        if box is None:
            box = self._outboxes[neighbour] = Outbox()
        if box.acknowledge(envelope.given, envelope.taken):
            self._due.add(neighbour)
        taken = 1
        for entry in envelope.entries:
            frames = parts[taken : taken + entry.nframes]
            taken += entry.nframes
            onward: dict[int, list[Hop]] = {}
            for hop in entry.hops:
                if hop.source == self.host or hop.source in self._given_up:
                    self._order_end(hop.source, neighbour)
                    continue
                if not self._may_come_by(hop.source, neighbour):
                    self.dropped += 1
                    continue
                self._note_active(hop.source, neighbour)
                if hop.target != self.host:
                    way = self.way(hop.target)
                    if way is None or way == neighbour:
                        self.dropped += 1
                    else:
                        onward.setdefault(way, []).append(hop)
                elif (whole := self._accept(hop, entry, frames)) is not None:
                    yield Delivery(hop.source, hop.senders, hop.receivers, whole)
            for way, hops in onward.items():
                self.passed_on += len(hops)
                self._put(way, Entry(hops, entry.nframes, entry.goes_on, entry.is_cut), frames)
        for beat in envelope.beats:
            if beat.source == self.host or beat.source in self._given_up:
                self._order_end(beat.source, neighbour)
                continue
            if not self._may_come_by(beat.source, neighbour):
                self.dropped += 1
                continue
            self._note_active(beat.source, neighbour)
            if beat.target == self.host:
                self._handle_beat(beat)
            elif self.way(beat.target) != neighbour:
                self._pass_beat(beat)
            else:
                self.dropped += 1

    def _may_come_by(self, host: int, neighbour: int) -> bool:
        """Whether a host is of the session; the controller, which can end this host, must send on the path to it."""
        if host == CONTROLLER_HOST:
            return neighbour in (CONTROLLER_HOST, self.way(host), self.default)
        return self._members is None or host in self._members

    def _note_active(self, host: int, neighbour: int) -> None:
        self.active.add(host)
        if self._paths.get(host) != neighbour:
            self.lead(host, neighbour)

    def _order_end(self, host: int, neighbour: int) -> None:
        self.dropped += 1
        if host != self.host:
            over = Beat(self.host, host, self._epoch, 0, 0, over=True)
            self._outbox(neighbour).put_beat(over)

    def _is_of_this_epoch(self, host: int, epoch: int, session: _Session) -> bool:
        """Whether a number belongs to the current epoch; an agent that learns of a new controller starts again."""
        if epoch > session.epoch and self.host != CONTROLLER_HOST and host == CONTROLLER_HOST:
            self._sessions[host] = _Session(epoch)
            return True
        return epoch == session.epoch

    def _accept(self, hop: Hop, entry: Entry, frames: Sequence[Frame]) -> list[Frame] | None:
        """Return a message if it is the next one and all of its pieces have arrived."""
        host = hop.source
        if not self._is_of_this_epoch(host, hop.epoch, self._session(host)):
            self.dropped += 1
            return None
        session = self._session(host)
        if hop.number <= session.received:
            return None  # a duplicate
        if hop.number > session.received + 1:
            if not session.has_asked or hop.number <= session.latest:  # the requested messages were lost, too
                session.has_asked = True
                self._beat(host, again=True)
            session.latest = hop.number
            return None
        session.received += 1
        session.has_asked = False
        session.unacknowledged += 1
        session.unacknowledged_nbytes += sum(len(frame) for frame in frames)
        if session.unacknowledged >= ACK_EVERY or session.unacknowledged_nbytes >= ACK_NBYTES:
            self._beat(host)
        if not (entry.goes_on or session.pieces):
            return list(frames)
        whole = session.pieces
        if session.is_cut:
            # Piece by piece: joining a gigabyte at once takes so long that this host would be considered dead.
            unfinished = whole[-1]
            if not isinstance(unfinished, bytearray):
                unfinished = whole[-1] = bytearray(unfinished)
            unfinished += frames[0]
            frames = frames[1:]
        whole.extend(frames)
        session.is_cut = entry.is_cut
        if entry.goes_on:
            return None
        session.pieces = []
        return [memoryview(frame) if isinstance(frame, bytearray) else frame for frame in whole]

    def _handle_beat(self, beat: Beat) -> None:
        if beat.over:
            self.is_given_up |= beat.source == CONTROLLER_HOST
            return
        if not self._is_of_this_epoch(beat.source, beat.epoch, self._session(beat.source)):
            self.dropped += 1
            return
        if beat.attached:
            self.attached.add(beat.source)
        session = self._session(beat.source)
        if beat.received > session.sent:  # it acknowledges a message that was never sent
            self.dropped += 1
            return
        while session.kept and session.kept[0].hop.number <= beat.received:
            session.kept.popleft()
        if beat.again and (way := self.way(beat.source)) is not None:
            if (box := self._outboxes.get(way)) is not None:
                box.withdraw(lambda hop: hop.source == self.host and hop.target == beat.source)
            for kept in session.kept:
                self._put(way, Entry([kept.hop], len(kept.frames), kept.goes_on, kept.is_cut), kept.frames)
        if beat.sent:
            session.has_asked = False
        if beat.sent > session.received:  # a beat comes after the messages it counts: they are lost
            session.has_asked = True
            self._beat(beat.source, again=True)


def _pieces(frames: Sequence[Frame]) -> Iterator[tuple[list[Frame], bool, bool]]:
    """Cut a message: (frames of a piece, whether another follows, whether the next one continues the last frame)."""
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
