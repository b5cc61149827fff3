"""The road between machines: several streams at once, straight to the process that has lent the memory.

Streams to an owner are opened when something large is carried, and kept for a while for the next time. Each takes pieces of a
transfer, and asks for one more while it waits for the last, so that the way there and back costs nothing. Pieces of a stream
that breaks are left to the others. Where no stream comes about it is remembered of the machine, so that the next transfer
loses no time. Nothing is lost by giving up: what was carried by then is carried again by another road.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from monarch_kernel.errors import Failure
from monarch_kernel.net.memory.exports import Loan
from monarch_kernel.net.memory.layout import Memory, Place, boxes, matched
from monarch_kernel.net.memory.paths import SLAB_NBYTES, Gone, NoRoad
from monarch_kernel.net.memory.threads import Crew
from monarch_kernel.net.wire.codec import join, load, pack, split
from monarch_kernel.net.wire.messages import EndStream, Failed, OpenStreams, Payload, ReadLoan, WriteLoan
from monarch_kernel.runtime.buffers.local_paths import Tables
from monarch_kernel.runtime.buffers.message_path import error_of
from monarch_kernel.runtime.buffers.streams import INVITED_S, Invitation, Stream, StreamError, reach
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.client import Asker

__all__ = ["NetworkRoad"]

LEAST_NBYTES = 1 << 20
"""What is smaller is not worth opening a stream."""

STREAMS = 4
"""To one owner, of one transfer."""

_NBYTES_EACH = 8 << 20
"""A transfer takes a stream for each of these."""

PIECE_NBYTES = 8 << 20
_AHEAD = 2
REACH_S = 2.0
BARRED_S = 60.0
"""How long a machine is not tried again that could not be reached."""

KEPT_S = 10.0
"""How long a stream is kept that nobody uses; of an owner as many as one transfer takes."""

_THREADS = 3 * STREAMS


class NetworkRoad:
    """By streams of its own between two processes, encrypted, where the machine of the owner can be reached.

    Args:
        asker: asks owners where they listen.
        tables: of this machine, for which there are better roads.
    """

    name = "network"
    is_direct = False
    takes_devices = False
    slab_nbytes = SLAB_NBYTES

    def __init__(self, asker: Asker, tables: Tables) -> None:
        self._asker = asker
        self._tables = tables
        self._crew = Crew("monarch-stream", _THREADS)
        self._changed = threading.Condition()
        self._owners: dict[bytes, _Owner] = {}
        self._used: set[Stream] = set()
        self._barred: dict[str, float] = {}
        self._is_tidying = False

    def leads_to(self, loan: Loan) -> bool:
        if self._tables.are_near(loan.lent) or self._barred.get(loan.lent.machine, 0.0) > time.monotonic():
            return False
        owner = self._owners.get(loan.lent.cookie)
        return loan.layout.nbytes >= LEAST_NBYTES or (owner is not None and bool(owner.idle))

    def carry(self, loan: Loan, here: Memory, *, is_write: bool) -> None:
        ours, theirs = matched(here.layout, loan.layout)
        offset = loan.address - loan.base
        # Both are cut by their shapes, which are the same.
        haul = _Haul(
            [
                _Piece(Place(here.address + near, mine), Place(offset + far, other))
                for (near, mine), (far, other) in zip(boxes(ours, PIECE_NBYTES), boxes(theirs, PIECE_NBYTES))
            ]
        )
        wanted = max(1, min(STREAMS, loan.layout.nbytes // _NBYTES_EACH))
        for _ in range(2):  # the second time with new streams, should those that were kept be dead
            stream = self._stream(loan, wanted, is_needed=True)
            assert stream is not None
            for _ in range(wanted - 1):
                self._crew.submit(lambda: self._help(loan, wanted, haul, is_write))
            self._take_part(stream, loan, haul, is_write)
            haul.wait()
            if haul.error is not None:
                raise haul.error
            if haul.is_done:
                return
            self._drop_idle(loan)
        raise NoRoad(haul.why)

    def close(self) -> None:
        with self._changed:
            for owner in self._owners.values():
                owner.close()
            self._owners.clear()
            for stream in self._used:
                stream.hang_up()
            self._changed.notify_all()

    # -- pieces

    def _help(self, loan: Loan, wanted: int, haul: _Haul, is_write: bool) -> None:
        if haul.is_done:
            return
        try:
            stream = self._stream(loan, wanted, is_needed=False)
        except NoRoad:  # there is another stream, or the transfer ends without us
            return
        if stream is not None:
            self._take_part(stream, loan, haul, is_write)

    def _take_part(self, stream: Stream, loan: Loan, haul: _Haul, is_write: bool) -> None:
        """Carry pieces by a stream as long as there are some, and it is good."""
        is_good = False
        haul.enter()
        try:
            is_good = self._carry_pieces(stream, loan, haul, is_write)
        except BaseException as error:
            haul.fail(error)
        finally:
            self._give_back(stream, loan, is_good)
            haul.leave()

    def _carry_pieces(self, stream: Stream, loan: Loan, haul: _Haul, is_write: bool) -> bool:
        under_way: deque[_Piece] = deque()
        try:
            while True:
                while len(under_way) < _AHEAD and (piece := haul.take()) is not None:
                    under_way.append(piece)
                    _begin(stream, loan, piece, is_write)
                if not under_way:
                    return True
                _finish(stream, under_way[0], is_write)
                under_way.popleft()
        except StreamError as error:
            if is_write:  # what is still in the stream is not to come after what is written there next
                self._end(stream, loan)
            haul.put_back(under_way, str(error))
            return False

    # -- streams

    def _stream(self, loan: Loan, wanted: int, *, is_needed: bool) -> Stream | None:
        """A stream to the owner of a loan; None if there is none and it ``is_needed`` not.

        Raises:
            Gone: the owner has ended.
            NoRoad: there is none, and none comes about.
        """
        cookie = loan.lent.cookie
        with self._changed:
            owner = self._owners.setdefault(cookie, _Owner())
            stream = owner.kept()
            if stream is not None:
                self._used.add(stream)
                return stream
            token = owner.token()
        if token is None:
            if not is_needed:
                return None
            asked_at = time.monotonic()
            invitation = self._invitation(loan, wanted)
            with self._changed:
                owner.invite(invitation, asked_at + INVITED_S)
                token = owner.token()
            if token is None:
                raise NoRoad("its owner has no room for another stream")
        assert owner.invitation is not None
        try:
            address, stream = reach(owner.invitation, token, REACH_S, lambda: bool(self._asker.deaths((loan.proc,))))
        except StreamError as error:
            self._barred[loan.lent.machine] = time.monotonic() + BARRED_S
            raise NoRoad(str(error)) from None
        with self._changed:
            owner.invitation = owner.invitation._replace(addresses=(address,))
            self._used.add(stream)
        return stream

    def _give_back(self, stream: Stream, loan: Loan, is_good: bool) -> None:
        """Keep a stream for the next time, if it is good still."""
        with self._changed:
            self._used.discard(stream)
            owner = self._owners.setdefault(loan.lent.cookie, _Owner())
            if not is_good or len(owner.idle) == STREAMS:
                stream.close()
                return
            stream.used_at = time.monotonic()
            owner.idle.append(stream)
            if not self._is_tidying:
                self._is_tidying = True
                threading.Thread(target=self._tidy, name="monarch-streams", daemon=True).start()

    def _drop_idle(self, loan: Loan) -> None:
        with self._changed:
            self._owners.pop(loan.lent.cookie, _Owner()).close()

    def _tidy(self) -> None:
        """Close what was not used for a while, as long as there is something."""
        with self._changed:
            while self._owners:
                until = time.monotonic() - KEPT_S
                for owner in self._owners.values():
                    owner.close(until)
                self._owners = {cookie: owner for cookie, owner in self._owners.items() if not owner.is_idle}
                self._changed.wait(KEPT_S / 4)
            self._is_tidying = False

    def _end(self, stream: Stream, loan: Loan) -> None:
        """Have the owner take nothing any more from a stream that broke.

        Raises:
            Gone: it has ended.
        """

        def finish(answers: Sequence[Answer]) -> None:
            (answer,) = answers
            if isinstance(answer, Failure):
                raise error_of(answer)

        stream.hang_up()
        ask = self._asker.request(
            (loan.proc,), lambda id: pack(EndStream(id, stream.token)), "ending a stream", finish, quiet=True
        )
        ask.get(warn_after_s=None)

    def _invitation(self, loan: Loan, count: int) -> Invitation:
        def finish(answers: Sequence[Answer]) -> Invitation:
            (answer,) = answers
            if isinstance(answer, Failure):
                raise _refused(answer)
            addresses, port, certificate, tokens = load(answer.payload, answer.frames)
            return Invitation(tuple(addresses), port, certificate, tuple(tokens))

        ask = self._asker.request(
            (loan.proc,), lambda id: pack(OpenStreams(id, count)), "opening streams", finish, quiet=True
        )
        return ask.get(warn_after_s=None)


def _refused(answer: Failure) -> BaseException:
    error = error_of(answer)
    return error if isinstance(error, Gone) else NoRoad(str(error))


class _Piece(NamedTuple):
    """A block here, and there, where its address counts from the beginning of what was lent."""

    here: Place
    there: Place


def _begin(stream: Stream, loan: Loan, piece: _Piece, is_write: bool) -> None:
    described = (0, loan.lent.cookie, *loan.lease, piece.there.address, *piece.there.layout[1:])
    message = WriteLoan(*described, Payload()) if is_write else ReadLoan(*described)
    stream.send_header(bytes(join([pack(message)])[0]))
    if is_write:
        stream.send_block(piece.here)


def _finish(stream: Stream, piece: _Piece, is_write: bool) -> None:
    ((answer, _),) = split([stream.receive_header()])
    if isinstance(answer, Failed):
        raise error_of(answer.failure)
    if not is_write:
        stream.receive_block(piece.here)


class _Haul:
    """What is left of a transfer, for several threads.

    Attributes:
        error: why it can't be done at all.
        why: what the last stream that broke has said.
    """

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._left = deque(pieces)
        self._busy = 0
        self._changed = threading.Condition()
        self.error: BaseException | None = None
        self.why = ""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to take."""
        return not self._left

    def enter(self) -> None:
        """A thread is about to take pieces."""
        with self._changed:
            self._busy += 1

    def leave(self) -> None:
        """It touches the memory no more."""
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until nobody touches the memory."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)

    def take(self) -> _Piece | None:
        """A piece that nobody has; None if there is none."""
        with self._changed:
            return self._left.popleft() if self._left else None

    def put_back(self, pieces: Sequence[_Piece], why: str) -> None:
        """They have not come."""
        with self._changed:
            if self.error is None:
                self._left.extend(pieces)
            self.why = why

    def fail(self, error: BaseException) -> None:
        """There is no use in going on."""
        with self._changed:
            self.error = self.error or error
            self._left.clear()


class _Owner:
    """Streams to a process that nobody uses at the moment, and what it takes to open more; under the lock of the road."""

    def __init__(self) -> None:
        self.idle: list[Stream] = []
        self.invitation: Invitation | None = None
        self._tokens: list[bytes] = []
        self._invited_until = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to keep."""
        return not self.idle and time.monotonic() > self._invited_until

    def invite(self, invitation: Invitation, until: float) -> None:
        self.invitation = invitation
        self._tokens = list(invitation.tokens)
        self._invited_until = until

    def token(self) -> bytes | None:
        return self._tokens.pop() if self._tokens and time.monotonic() < self._invited_until else None

    def kept(self) -> Stream | None:
        while self.idle:
            stream = self.idle.pop()
            if stream.is_fresh():
                return stream
            stream.close()
        return None

    def close(self, until: float = float("inf")) -> None:
        """Close the streams that were not used since then."""
        for stream in [stream for stream in self.idle if stream.used_at <= until]:
            self.idle.remove(stream)
            stream.close()
