"""The data path between machines: several parallel streams, directly to the process that lends the memory.

A large transfer opens streams to the owner, which are kept for a while for the next transfer. Each stream takes pieces of a
transfer, and requests the next piece while it waits for the previous one, which hides the round-trip time. If a stream breaks,
the other streams take its pieces. If no stream can be opened, the path avoids that machine for a while, so that the next
transfer loses no time. Giving up is safe: the transfer starts again on another data path.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from monarch_kernel.errors import Failure
from monarch_kernel.net.memory.exports import BufferHandle
from monarch_kernel.net.memory.layout import Memory, ProcessBlock, boxes, matched
from monarch_kernel.net.memory.paths import SLAB_NBYTES, OwnerGone, PathUnavailable
from monarch_kernel.net.memory.threads import IdleThreads
from monarch_kernel.net.wire.codec import join, load, pack, split
from monarch_kernel.net.wire.messages import EndStream, Failed, OpenStreams, Payload, ReadBuffer, WriteBuffer
from monarch_kernel.runtime.buffers.local_paths import Tables
from monarch_kernel.runtime.buffers.message_path import error_of
from monarch_kernel.runtime.buffers.streams import INVITED_S, Invitation, Stream, StreamError, reach
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.client import Client

__all__ = ["NetworkPath"]

LEAST_NBYTES = 1 << 20
"""Smaller transfers do not open a stream."""

STREAMS = 4
"""How many streams one transfer uses at most, to one owner."""

_NBYTES_EACH = 8 << 20
"""A transfer uses one stream for each multiple of this size."""

PIECE_NBYTES = 8 << 20
_AHEAD = 2
REACH_S = 2.0
BARRED_S = 60.0
"""How long a machine that could not be reached is not tried again."""

KEPT_S = 10.0
"""How long an idle stream is kept; at most `STREAMS` are kept for each owner."""

_THREADS = 3 * STREAMS


class NetworkPath:
    """Data path over dedicated encrypted streams between two processes, where the machine of the owner can be reached.

    Args:
        client: sends owners the requests for invitations.
        tables: those of this machine, which has better data paths.
    """

    name = "network"
    is_direct = False
    takes_devices = False
    slab_nbytes = SLAB_NBYTES

    def __init__(self, client: Client, tables: Tables) -> None:
        self._client = client
        self._tables = tables
        self._threads = IdleThreads("monarch-stream", _THREADS)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._owners: dict[bytes, _Owner] = {}
        self._used: set[Stream] = set()
        self._barred: dict[str, float] = {}
        self._is_tidying = False

    def leads_to(self, handle: BufferHandle) -> bool:
        if self._tables.is_local(handle.lent) or self._barred.get(handle.lent.machine, 0.0) > time.monotonic():
            return False
        owner = self._owners.get(handle.lent.cookie)
        return handle.layout.nbytes >= LEAST_NBYTES or (owner is not None and bool(owner.idle))

    def carry(self, handle: BufferHandle, here: Memory, *, is_write: bool) -> None:
        ours, theirs = matched(here.layout, handle.layout)
        offset = handle.address - handle.base
        # Both are cut into the same pieces, because their shapes are the same.
        remaining = _RemainingPieces(
            [
                _Piece(ProcessBlock(here.address + near, mine), ProcessBlock(offset + far, other))
                for (near, mine), (far, other) in zip(boxes(ours, PIECE_NBYTES), boxes(theirs, PIECE_NBYTES))
            ]
        )
        wanted = max(1, min(STREAMS, handle.layout.nbytes // _NBYTES_EACH))
        for _ in range(2):  # retry once with new streams, because the kept ones may be dead
            stream = self._stream(handle, wanted, is_needed=True)
            assert stream is not None
            for _ in range(wanted - 1):
                self._threads.submit(lambda: self._help(handle, wanted, remaining, is_write))
            self._transfer_pieces(stream, handle, remaining, is_write)
            remaining.wait()
            if remaining.error is not None:
                raise remaining.error
            if remaining.is_done:
                return
            self._drop_idle(handle)
        raise PathUnavailable(remaining.why)

    def close(self) -> None:
        with self._lock:
            for owner in self._owners.values():
                owner.close()
            self._owners.clear()
            for stream in self._used:
                stream.hang_up()
            self._changed.notify_all()

    # -- pieces

    def _help(self, handle: BufferHandle, wanted: int, remaining: _RemainingPieces, is_write: bool) -> None:
        if remaining.is_done:
            return
        try:
            stream = self._stream(handle, wanted, is_needed=False)
        except PathUnavailable:  # another stream takes the pieces, or the transfer fails without this one
            return
        if stream is not None:
            self._transfer_pieces(stream, handle, remaining, is_write)

    def _transfer_pieces(
        self, stream: Stream, handle: BufferHandle, remaining: _RemainingPieces, is_write: bool
    ) -> None:
        """Transfer pieces by a stream until none is left, or the stream breaks."""
        is_good = False
        remaining.enter()
        try:
            is_good = self._carry_pieces(stream, handle, remaining, is_write)
        except BaseException as error:
            remaining.fail(error)
        finally:
            self._give_back(stream, handle, is_good)
            remaining.leave()

    def _carry_pieces(self, stream: Stream, handle: BufferHandle, remaining: _RemainingPieces, is_write: bool) -> bool:
        under_way: deque[_Piece] = deque()
        try:
            while True:
                while len(under_way) < _AHEAD and (piece := remaining.take()) is not None:
                    under_way.append(piece)
                    _request_piece(stream, handle, piece, is_write)
                if not under_way:
                    return True
                _complete_piece(stream, under_way[0], is_write)
                under_way.popleft()
        except StreamError as error:
            if is_write:  # data still in the stream must not overwrite what is written there next
                self._end(stream, handle)
            remaining.put_back(under_way, str(error))
            return False

    # -- streams

    def _stream(self, handle: BufferHandle, wanted: int, *, is_needed: bool) -> Stream | None:
        """Return a stream to the owner of a lease; None if there is none and it is not needed (``is_needed``).

        Raises:
            OwnerGone: the owner has ended.
            PathUnavailable: there is none, and none can be opened.
        """
        cookie = handle.lent.cookie
        with self._lock:
            owner = self._owners.setdefault(cookie, _Owner())
            stream = owner.take_idle()
            if stream is not None:
                self._used.add(stream)
                return stream
            token = owner.token()
        if token is None:
            if not is_needed:
                return None
            asked_at = time.monotonic()
            invitation = self._invitation(handle, wanted)
            with self._lock:
                owner.invite(invitation, asked_at + INVITED_S)
                token = owner.token()
            if token is None:
                raise PathUnavailable("its owner accepts no more streams")
        assert owner.invitation is not None
        try:
            address, stream = reach(owner.invitation, token, REACH_S, lambda: bool(self._client.deaths((handle.proc,))))
        except StreamError as error:
            self._barred[handle.lent.machine] = time.monotonic() + BARRED_S
            raise PathUnavailable(str(error)) from None
        with self._lock:
            owner.invitation = owner.invitation._replace(addresses=(address,))
            self._used.add(stream)
        return stream

    def _give_back(self, stream: Stream, handle: BufferHandle, is_good: bool) -> None:
        """Keep a stream for the next transfer if it still works."""
        with self._lock:
            self._used.discard(stream)
            owner = self._owners.setdefault(handle.lent.cookie, _Owner())
            if not is_good or len(owner.idle) == STREAMS:
                stream.close()
                return
            stream.used_at = time.monotonic()
            owner.idle.append(stream)
            if not self._is_tidying:
                self._is_tidying = True
                threading.Thread(target=self._tidy, name="monarch-streams", daemon=True).start()

    def _drop_idle(self, handle: BufferHandle) -> None:
        with self._lock:
            self._owners.pop(handle.lent.cookie, _Owner()).close()

    def _tidy(self) -> None:
        """Close idle streams periodically until no owner is left."""
        with self._lock:
            while self._owners:
                until = time.monotonic() - KEPT_S
                for owner in self._owners.values():
                    owner.close(until)
                self._owners = {cookie: owner for cookie, owner in self._owners.items() if not owner.is_idle}
                self._changed.wait(KEPT_S / 4)
            self._is_tidying = False

    def _end(self, stream: Stream, handle: BufferHandle) -> None:
        """Make the owner stop reading from a stream that broke.

        Raises:
            OwnerGone: the owner has ended.
        """

        def finish(answers: Sequence[Answer]) -> None:
            (answer,) = answers
            if isinstance(answer, Failure):
                raise error_of(answer)

        stream.hang_up()
        ask = self._client.request(
            (handle.proc,), lambda id: pack(EndStream(id, stream.token)), "ending a stream", finish, quiet=True
        )
        ask.get(warn_after_s=None)

    def _invitation(self, handle: BufferHandle, count: int) -> Invitation:
        def finish(answers: Sequence[Answer]) -> Invitation:
            (answer,) = answers
            if isinstance(answer, Failure):
                raise _refused(answer)
            addresses, port, certificate, tokens = load(answer.payload, answer.frames)
            return Invitation(tuple(addresses), port, certificate, tuple(tokens))

        ask = self._client.request(
            (handle.proc,), lambda id: pack(OpenStreams(id, count)), "opening streams", finish, quiet=True
        )
        return ask.get(warn_after_s=None)


def _refused(answer: Failure) -> BaseException:
    error = error_of(answer)
    return error if isinstance(error, OwnerGone) else PathUnavailable(str(error))


class _Piece(NamedTuple):
    """A block of memory here, and there, where its address counts from the start of the lent memory."""

    here: ProcessBlock
    there: ProcessBlock


def _request_piece(stream: Stream, handle: BufferHandle, piece: _Piece, is_write: bool) -> None:
    described = (0, handle.lent.cookie, *handle.lease, piece.there.address, *piece.there.layout[1:])
    message = WriteBuffer(*described, Payload()) if is_write else ReadBuffer(*described)
    stream.send_header(bytes(join([pack(message)])[0]))
    if is_write:
        stream.send_block(piece.here)


def _complete_piece(stream: Stream, piece: _Piece, is_write: bool) -> None:
    ((answer, _),) = split([stream.receive_header()])
    if isinstance(answer, Failed):
        raise error_of(answer.failure)
    if not is_write:
        stream.receive_block(piece.here)


class _RemainingPieces:
    """The remaining pieces of a transfer, shared by several threads.

    Attributes:
        error: why the transfer can't be done at all.
        why: the error of the last stream that broke.
    """

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._left = deque(pieces)
        self._busy = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.error: BaseException | None = None
        self.why = ""

    @property
    def is_done(self) -> bool:
        """Whether no piece is left to take."""
        return not self._left

    def enter(self) -> None:
        """Register a thread that is about to take pieces."""
        with self._lock:
            self._busy += 1

    def leave(self) -> None:
        """Unregister a thread, which does not touch the memory any more."""
        with self._lock:
            self._busy -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until no thread touches the memory."""
        with self._lock:
            self._changed.wait_for(lambda: not self._busy)

    def take(self) -> _Piece | None:
        """Take a piece; return None if none is left."""
        with self._lock:
            return self._left.popleft() if self._left else None

    def put_back(self, pieces: Sequence[_Piece], why: str) -> None:
        """Return pieces that were not transferred."""
        with self._lock:
            if self.error is None:
                self._left.extend(pieces)
            self.why = why

    def fail(self, error: BaseException) -> None:
        """Give up the transfer."""
        with self._lock:
            self.error = self.error or error
            self._left.clear()


class _Owner:
    """Idle streams to a process, and the invitation to open more; guarded by the lock of the data path."""

    def __init__(self) -> None:
        self.idle: list[Stream] = []
        self.invitation: Invitation | None = None
        self._tokens: list[bytes] = []
        self._invited_until = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether this has neither streams nor a valid invitation."""
        return not self.idle and time.monotonic() > self._invited_until

    def invite(self, invitation: Invitation, until: float) -> None:
        self.invitation = invitation
        self._tokens = list(invitation.tokens)
        self._invited_until = until

    def token(self) -> bytes | None:
        return self._tokens.pop() if self._tokens and time.monotonic() < self._invited_until else None

    def take_idle(self) -> Stream | None:
        while self.idle:
            stream = self.idle.pop()
            if stream.is_fresh():
                return stream
            stream.close()
        return None

    def close(self, until: float = float("inf")) -> None:
        """Close the streams that were last used at ``until`` or earlier."""
        for stream in [stream for stream in self.idle if stream.used_at <= until]:
            self.idle.remove(stream)
            stream.close()
