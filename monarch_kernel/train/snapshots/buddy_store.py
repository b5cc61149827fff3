"""Takes snapshots of training state between steps, keeps each on its rank and on a second rank, and restores them.

Theory of operation
===================

`live.snapshot(model=model, ..., every=10)` registers the state of the loop that follows. Before every tenth step, the same
steps on all ranks, the loop captures this state (`capture`): one copy in memory, during which the loop stops. The rank keeps
the captured bytes, and sends them to a *buddy*, a rank on another host if there is one. On one host both ranks map the same
memory, so that the second copy takes no space. A buddy acknowledges a snapshot on the thread that drives its socket, whatever
it computes; the loop waits for the acknowledgement only at the next snapshot. Ranks of such a loop stay close enough together
that there is a step of which all of them keep a snapshot, even if they do not wait for each other (`features.live.pace`); if
the loop recovers, ranks that have not started it yet count, too.

The controller decides to go back (`rewind`): it asks all ranks for their snapshots, chooses the newest step of which there is a
snapshot for every rank, and sends `Rewind` to the existing processes. Nothing happens until their code reaches `live.snapshot`
again: that call restores the captured state, and the loop that follows resumes from that step. A new process gets its
snapshot from its buddy.

Ranks keep captured bytes, and unpickle them only to restore them, after they have verified checksums (`snapshot_checksums`). A
rank whose own copy is damaged restores that of its buddy.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_kernel.errors import Failure
from monarch_kernel.features.live.worker import working_request
from monarch_kernel.features.record.notes import note_event
from monarch_kernel.net.wire.codec import PAYLOAD_STORE, Frame, dump, keep, pack
from monarch_kernel.net.wire.messages import (
    Failed,
    FetchSnapshot,
    KeepSnapshot,
    ListSnapshots,
    Message,
    Payload,
    Result,
    Rewind,
    SealSnapshot,
)
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.handles import PROCESS
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank
from monarch_kernel.train.snapshots.snapshot_checksums import Sealer, wrong_places

if TYPE_CHECKING:
    from monarch_kernel.train.snapshots.capture import Captured

__all__ = ["Key", "Series", "Snapshots", "put_back_here"]

Key = tuple[int, int, int]
"""Request and number of a `live.snapshot` call, and the step before which it was taken; later snapshots compare as greater."""

_FETCH_S = 60.0

_SEALS = 16
"""Seals that are kept of a rank; more than snapshots."""

_COUNTED = 64
"""Requests whose series are counted; far more than run at once."""


class Series:
    """The snapshots of one loop.

    Args:
        home: the store of this process.
        request: the request that called `live.snapshot`.
        number: number of the series among those of the request.
        things: the objects, by name.
        every: interval in steps.
        most: number of snapshots to keep.
        restored: the snapshot that was restored, with its key; None for a loop that starts with its first step.

    Attributes:
        request: as given.
        rewound: the snapshot that was restored, if any.
        first: the first step of the loop.
    """

    def __init__(
        self,
        home: Snapshots,
        request: int,
        number: int,
        things: Mapping[str, Any],
        every: int,
        most: int,
        restored: tuple[Rewind, Captured] | None,
    ) -> None:
        self.request = request
        self.rewound = None if restored is None else restored[0]
        self.first = 0 if restored is None else restored[0].key[2]
        self._things = things
        self._home = home
        self._number = number
        self._every = every
        self._most = most
        self._captured = None if restored is None else restored[1]
        self._sent: Future[Any] | None = None
        self._taken: deque[int] = deque(maxlen=most)
        self._restored: set[int] = set()  # steps before which the state was that of an earlier snapshot

    @property
    def apart(self) -> int:
        """How many steps ranks may be apart, so that the slowest has taken the oldest snapshot that the fastest keeps."""
        return self._every * (self._most - 1)

    def begin(self) -> None:
        """The loop starts; restores the random state."""
        captured, self._captured = self._captured, None
        if captured is not None:
            from monarch_kernel.train.snapshots.capture import set_random_state

            set_random_state(captured)

    def before(self, step: int) -> None:
        """A step is about to start; takes a snapshot if one is due."""
        if step == self.first:
            self._note_first(step)
        if step % self._every == 0 or step == self.first:
            self._take(step)

    def _note_first(self, step: int) -> None:
        """Note for a record where the loop comes from, and of which steps there are snapshots: too many to note each."""
        if self._home.is_first:
            if self.rewound is not None:
                note_event("restored", f"the snapshot of step {step:,}: {', '.join(self._things)}")
            note_event(
                "snapshot",
                f"every {'step' if self._every == 1 else f'{self._every:,} steps'}, "
                f"the last {'one is' if self._most == 1 else f'{self._most:,} are'} kept: {', '.join(self._things)}",
            )

    def roll_back(self, before: int, step: int) -> int:
        """Restore the newest snapshot of a step before ``before``, as the state before ``step``; returns its step.

        All ranks choose the same one, because they take snapshots of the same steps. The random numbers are not restored, so
        that the next steps differ from those that went wrong.

        Raises:
            LookupError: there is no such snapshot, or it has been restored before.
            RuntimeError: it is damaged.
        """
        from monarch_kernel.train.snapshots.capture import put_back

        usable = [taken for taken in self._taken if taken < before]
        if not self._taken:
            raise LookupError("there is no snapshot yet")
        if not usable:
            more = f": live.snapshot(keep={2 * self._most}) keeps more" if self._taken[0] > self.first else ""
            raise LookupError(f"no snapshot is of an earlier step, the oldest is of step {self._taken[0]:,}{more}")
        to = usable[-1]
        if to in self._restored:
            raise LookupError(f"the state before step {to:,} has been restored already, and leads to the same")
        put_back(self._things, self._home.fetch((self.request, self._number, to)))
        self._taken = deque((taken for taken in self._taken if taken <= to), self._most)
        self._take(step)
        if self._home.is_first:
            note_event("restored", f"the snapshot of step {to:,}, as the state before step {step:,}")
        self._restored |= {to, step}
        return to

    def _take(self, step: int) -> None:
        from monarch_kernel.train.snapshots.capture import capture

        if self._sent is not None:  # else snapshots would pile up on their way to a slow rank
            self._sent.wait(None)
        captured = capture(self._things)
        self._taken.append(step)
        self._sent = self._home.keep((self.request, self._number, step), captured, self._most)


class _Kept(NamedTuple):
    """A stored snapshot: a payload and its frames."""

    payload: Payload
    frames: tuple[Frame, ...]


class Snapshots:
    """The rank's part: takes snapshots, keeps those of another rank, and restores them."""

    def __init__(self, rank: Rank) -> None:
        spec = rank.spec
        self._rank = rank
        self._proc = spec.proc
        first = spec.proc - spec.rank
        hosts = spec.world_size // spec.local_world_size
        apart = spec.local_world_size if hosts > 1 else 1  # the buddy is on the next host, if there is one
        self._buddy = first + (spec.rank + apart) % spec.world_size
        self._place = spec.rank
        self._kept: dict[int, dict[Key, _Kept]] = {}  # by owner; the oldest snapshot first
        self._counts: dict[int, int] = {}  # how many series a request has started; recent requests
        self._seals: dict[int, dict[Key, bytes]] = {}  # by owner; the last one is the newest
        self._sealer = Sealer(self._sealed)
        self._rewind: Rewind | None = None
        self._here = threading.local()  # `coming`: the series of the next loop in the code that a thread runs
        self._last: dict[str, Callable[[], Any]] = {}  # objects by name, as weak references where possible
        rank.extend(
            {
                KeepSnapshot: self._handle_keep,
                SealSnapshot: lambda message, _: self._keep_seal(message.owner, message.key, message.seal),
                FetchSnapshot: self._handle_fetch,
            },
            from_ranks=True,
        )
        rank.extend({ListSnapshots: self._handle_list, Rewind: self._handle_rewind})

    # -- for the user's code

    def begin(self, things: Mapping[str, Any], every: int, most: int) -> int | None:
        """Register the state of the next loop, and restore it if a rewind is pending; returns the step of the snapshot then.

        Raises:
            TypeError: an object can't be restored.
            ValueError: no object is named, or the objects differ from those of the snapshot.
            RuntimeError: the snapshot does not exist any more, or a model belongs to a process group that no longer exists.
        """
        from monarch_kernel.train.snapshots.capture import check, put_back

        check(things)
        request = working_request()
        number = self._counts[request] = self._counts.pop(request, 0) + 1  # moves the request to the end
        for oldest in list(self._counts)[:-_COUNTED]:
            self._counts.pop(oldest, None)
        rewind = self._rewind
        if self._rank.rewind is not None:
            rewind = self._rank.rewind if self._rank.rewind.key[1] == number else None
        restored: tuple[Rewind, Captured] | None = None
        if rewind is not None:
            captured = self._fetch(rewind)
            try:
                put_back(things, captured)
            except ValueError as error:
                self._rewind = None
                if rewind is self._rank.rewind:
                    raise
                raise ValueError(
                    f"{error}. The rollback to step {rewind.key[2]} is cancelled: run this cell again to start from the "
                    "beginning, or %mesh rollback to request the rollback again"
                ) from error
            self._rewind = None
            restored = rewind, captured
        if every == 1:
            most = max(most, 3)  # else no rank could start a step before all ranks have reported
        self._here.coming = Series(self, request, number, dict(things), every, most, restored)
        self._last = {name: _reference(thing) for name, thing in things.items()}
        return None if restored is None else restored[0].key[2]

    def take_series(self) -> Series | None:
        """The series of a loop that starts now, if this request has called `live.snapshot`."""
        coming: Series | None = self._here.__dict__.pop("coming", None)
        return None if coming is None or coming.request != working_request() else coming

    def put_back_now(self) -> None:
        """Restore the objects of the last `live.snapshot` call at once, if they still exist.

        Raises:
            ValueError: the objects differ from those of the snapshot.
            RuntimeError: the snapshot does not exist any more.
        """
        from monarch_kernel.train.snapshots.capture import put_back

        gc.collect()  # models of FSDP are in cycles: a former one would be taken for the one in use
        things = {name: thing() for name, thing in self._last.items()}
        if self._rewind is not None and things and all(thing is not None for thing in things.values()):
            put_back(things, self._fetch(self._rewind))

    # -- for series

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._place == 0

    def keep(self, key: Key, captured: Captured, most: int) -> Future[Any] | None:
        """Store a snapshot here and on the buddy; returns the future of the buddy's answer."""
        kept = _Kept(Payload(b"", 2), (captured.rest, captured.elements))
        self._rank.submit(lambda: self._file(self._proc, key, kept, most))
        if self._buddy == self._proc:
            self._sealer.submit(key, captured.rest, captured.elements, captured.places)
            return None

        def finish(answers: Sequence[Answer]) -> None:
            """Ignore a buddy that has died: `ListSnapshots` shows later that it keeps nothing."""

        sent = self._rank.peers.request(
            (self._buddy,),
            lambda id: pack(KeepSnapshot(id, self._proc, key, most, kept.payload), kept.frames),
            "",
            finish,
            quiet=True,
        )
        self._sealer.submit(key, captured.rest, captured.elements, captured.places)
        return sent

    def fetch(self, key: Key) -> Captured:
        """Get a snapshot that this rank has taken, from here or from the buddy.

        Raises:
            RuntimeError: it does not exist any more, or it is damaged.
        """
        return self._fetch(Rewind(0, key, (self._buddy,) * (self._place + 1)))

    def _sealed(self, key: Key, seal: bytes) -> None:
        """A snapshot of this rank has its checksums; called on the thread that computes them."""
        self._keep_seal(self._proc, key, seal)
        if self._buddy != self._proc:
            self._rank.peers.tell((self._buddy,), pack(SealSnapshot(self._proc, key, seal)))

    def _keep_seal(self, owner: int, key: Key, seal: bytes) -> None:
        seals = self._seals.setdefault(owner, {})
        seals[key] = seal
        for oldest in list(seals)[:-_SEALS]:
            del seals[oldest]

    def _file(self, owner: int, key: Key, kept: _Kept, most: int) -> None:
        shelf = self._kept.setdefault(owner, {})
        shelf[key] = kept
        keys, rewind = set(shelf), self._rank.rewind
        if rewind is not None and key[1] < rewind.key[1]:  # a later loop of the cell returns to it
            keys.discard(rewind.key)
        for oldest in sorted(keys)[:-most]:
            del shelf[oldest]

    def _fetch(self, rewind: Rewind) -> Captured:
        """Get a snapshot of this rank from here or from its buddy.

        Raises:
            RuntimeError: it does not exist any more, or it is damaged.
        """
        self._sealer.wait()
        kept = self._kept.get(self._proc, {}).get(rewind.key)
        if kept is None:
            return self._verified(rewind, self._ask_for(rewind, rewind.holders[self._place]))
        seal = self._seals.get(self._proc, {}).get(rewind.key, b"")
        own = (*kept.frames, seal)
        try:
            return self._verified(rewind, own)
        except RuntimeError:
            if self._buddy == self._proc:
                raise
            return self._verified(rewind, self._ask_for(rewind, self._buddy))

    def _ask_for(self, rewind: Rewind, holder: int) -> tuple[Frame, ...]:
        """Get the frames of a snapshot of this rank, and its seal, from another rank."""
        future = self._rank.peers.request(
            (holder,),
            lambda id: pack(FetchSnapshot(id, self._proc, rewind.key)),
            "",
            lambda answers: answers[0],
            quiet=True,
        )
        answer = future.get(_FETCH_S)
        if isinstance(answer, Failure):
            raise RuntimeError(f"the snapshot of step {rewind.key[2]} is not available: {answer.message}")
        return tuple(answer.frames)

    def _verified(self, rewind: Rewind, frames: tuple[Frame, ...]) -> Captured:
        """Verify a snapshot with its seal; an empty seal is of a rank that died before it was computed.

        Raises:
            RuntimeError: it is damaged.
        """
        from monarch_kernel.train.snapshots.capture import Captured, names_at

        rest, elements, seal = frames
        captured = Captured(rest, elements)
        wrong = wrong_places(rest, elements, bytes(seal)) if len(seal) else []
        if wrong == []:
            return captured
        names = names_at(captured, wrong) if wrong is not None else []
        raise RuntimeError(
            f"the snapshot of step {rewind.key[2]} of rank {self._place} is damaged, and was not used: the checksum of "
            f"{', '.join(names) or 'its description'} is wrong. Go back to an earlier one (%mesh rollback STEP), or load "
            "a checkpoint"
        )

    # -- on the thread that drives the socket

    def _answer(self, message: Message, payload: Payload, frames: tuple[Frame, ...] = ()) -> None:
        id: int = message.id  # type: ignore[attr-defined]
        self._rank.send_answer_now(id, pack(Result(id, payload), frames))

    def _handle_keep(self, message: KeepSnapshot, frames: Sequence[Frame]) -> None:
        self._file(message.owner, message.key, _Kept(message.payload, tuple(frames)), message.most)
        self._answer(message, Payload())

    def _handle_list(self, message: ListSnapshots, _: Sequence[Frame]) -> None:
        self._answer(message, *dump({owner: sorted(shelf) for owner, shelf in self._kept.items()}))

    def _handle_fetch(self, message: FetchSnapshot, _: Sequence[Frame]) -> None:
        kept = self._kept.get(message.owner, {}).get(message.key)
        if kept is None:
            gone = Failure("exception", "LookupError", "the buddy has dropped it in the meantime")
            self._rank.send_answer_now(message.id, pack(Failed(message.id, gone)))
            return
        seal = self._seals.get(message.owner, {}).get(message.key, b"")
        self._answer(message, Payload(b"", 3), (*(self._again(frame) for frame in kept.frames), seal))

    def _handle_rewind(self, message: Rewind, _: Sequence[Frame]) -> None:
        self._rewind = message
        self._answer(message, Payload())

    @staticmethod
    def _again(frame: Frame) -> Frame:
        """Move a large frame that came from another process to where a third process can read it, too."""
        return keep([frame]) if len(frame) >= PAYLOAD_STORE.from_nbytes else frame


def _reference(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # such as lists
        return lambda: thing


def put_back_here() -> None:
    """Call `Snapshots.put_back_now`, for a request to all ranks."""
    PROCESS.loops.snapshots.put_back_now()


@register
def install(rank: Rank) -> None:
    """Enable snapshots for the loops of a rank."""
    PROCESS.loops.snapshots = Snapshots(rank)
