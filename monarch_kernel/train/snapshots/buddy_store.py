"""Snapshots of training in the memory of ranks: taken between two steps, kept by a second rank, too, and put back.

Theory of operation
===================

`live.snapshot(model=model, ..., every=10)` says what belongs to the loop that follows. Before every tenth step, all ranks
before the same ones, the loop has it captured (`captured`): one copy within memory, for which the loop stands. What was
captured is kept here, and sent to a *buddy*, a rank on another host where there is one. On one host both map the same memory,
so a second copy takes none. A buddy answers when it has it, on the thread that drives its socket, whatever it computes; the
loop waits for that only when it comes to the next snapshot. Ranks of such a loop do not get farther apart than snapshots are
kept, even if they do not wait for each other (`features.live.pace`), so that there is a step of which all have one; where the
loop is to recover, those that are yet to begin it count, too.

To go back is the controller's affair (`rewind`): it asks all ranks what they keep, chooses the newest step of which each place
has a snapshot, and says so (`Rewind`) to the processes that are there. Nothing happens until their code comes to
`live.snapshot` again: that puts back what was captured, and the loop that follows goes on from that step. A process that is
new has the same from its buddy.

What ranks keep are the bytes that were captured. They are opened only where they are put back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_kernel.errors import Failure
from monarch_kernel.features.live.worker import working_request
from monarch_kernel.net.wire.codec import STORE, Frame, dump, keep, pack
from monarch_kernel.net.wire.messages import (
    Failed,
    FetchSnapshot,
    KeepSnapshot,
    ListSnapshots,
    Message,
    Payload,
    Result,
    Rewind,
)
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.handles import HOME
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

if TYPE_CHECKING:
    from monarch_kernel.train.snapshots.capture import Captured

__all__ = ["Key", "Series", "Snapshots", "put_back_here"]

Key = tuple[int, int, int]
"""Request and number of a `live.snapshot`, and the step before which it was taken; later ones compare as greater."""

_FETCH_S = 60.0

_COUNTED = 64
"""Requests of which it is known how many series they have begun; far more than run at once."""


class Series:
    """The snapshots of one loop.

    Args:
        home: of this process.
        request: in which it was asked for.
        number: counts those of that request.
        things: by name.
        every: so many steps.
        most: so many are kept.
        begun: what was put back, with the snapshot's key; None for a loop that begins with its first step.

    Attributes:
        request: as given.
        rewound: what was put back, if something was.
        first: the step with which the loop begins.
    """

    def __init__(
        self,
        home: Snapshots,
        request: int,
        number: int,
        things: Mapping[str, Any],
        every: int,
        most: int,
        begun: tuple[Rewind, Captured] | None,
    ) -> None:
        self.request = request
        self.rewound = None if begun is None else begun[0]
        self.first = 0 if begun is None else begun[0].key[2]
        self._things = things
        self._home = home
        self._number = number
        self._every = every
        self._most = most
        self._captured = None if begun is None else begun[1]
        self._sent: Future[Any] | None = None

    @property
    def apart(self) -> int:
        """How many steps ranks may be apart: then the last one has taken the oldest snapshot that the first one keeps."""
        return self._every * (self._most - 1)

    def begin(self) -> None:
        """The loop begins."""
        captured, self._captured = self._captured, None
        if captured is not None:
            from monarch_kernel.train.snapshots.capture import set_random_state

            set_random_state(captured)

    def before(self, step: int) -> None:
        """A step is about to begin."""
        if step % self._every == 0 or step == self.first:
            self._take(step)

    def _take(self, step: int) -> None:
        from monarch_kernel.train.snapshots.capture import capture

        if self._sent is not None:  # else more and more would be on its way to a rank that is slow
            self._sent.wait(None)
        captured = capture(self._things)
        self._sent = self._home.keep((self.request, self._number, step), captured, self._most)


class _Kept(NamedTuple):
    """What is kept: a payload and its frames."""

    payload: Payload
    frames: tuple[Frame, ...]


class Snapshots:
    """The rank's side: takes them, keeps those of another rank, and puts them back."""

    def __init__(self, rank: Rank) -> None:
        spec = rank.spec
        self._rank = rank
        self._proc = spec.proc
        first = spec.proc - spec.rank
        hosts = spec.world_size // spec.local_world_size
        apart = spec.local_world_size if hosts > 1 else 1  # on the next host, if there is one
        self._buddy = first + (spec.rank + apart) % spec.world_size
        self._place = spec.rank
        self._kept: dict[int, dict[Key, _Kept]] = {}  # by owner; of each the oldest first
        self._counts: dict[int, int] = {}  # how many series a request has begun, of the last ones
        self._rewind: Rewind | None = None
        self._here = threading.local()  # `coming`: the series of the next loop of the code that a thread runs
        self._last: dict[str, Callable[[], Any]] = {}  # things by name; not kept alive, where that is possible
        rank.extend({KeepSnapshot: self._hear_keep, FetchSnapshot: self._hear_fetch}, from_ranks=True)
        rank.extend({ListSnapshots: self._hear_list, Rewind: self._hear_rewind})

    # -- for the user's code

    def begin(self, things: Mapping[str, Any], every: int, most: int) -> int | None:
        """Say what belongs to the next loop, and put it back if that was asked for; gives the step of that, if so.

        Raises:
            TypeError: something can't be put back.
            ValueError: nothing is named, or what is named is not what it was.
            RuntimeError: the snapshot is not to be had any more, or a model is of a process group that is no more.
        """
        from monarch_kernel.train.snapshots.capture import check, put_back

        check(things)
        request = working_request()
        number = self._counts[request] = self._counts.pop(request, 0) + 1  # the last one is the last in order
        for oldest in list(self._counts)[:-_COUNTED]:
            self._counts.pop(oldest, None)
        rewind = self._rewind
        if self._rank.rewind is not None:
            rewind = self._rank.rewind if self._rank.rewind.key[1] == number else None
        begun: tuple[Rewind, Captured] | None = None
        if rewind is not None:
            captured = self._fetch(rewind)
            try:
                put_back(things, captured)
            except ValueError as error:
                self._rewind = None
                if rewind is self._rank.rewind:
                    raise
                raise ValueError(
                    f"{error}. The rollback to step {rewind.key[2]} is given up: without it this cell begins anew; "
                    "%mesh rollback asks for it again"
                ) from error
            self._rewind = None
            begun = rewind, captured
        if every == 1:
            most = max(most, 3)  # else no rank could begin a step before all have said that they are there
        self._here.coming = Series(self, request, number, dict(things), every, most, begun)
        self._last = {name: _reference(thing) for name, thing in things.items()}
        return None if begun is None else begun[0].key[2]

    def take_series(self) -> Series | None:
        """The series of a loop that begins now, if this request has asked for one."""
        coming: Series | None = self._here.__dict__.pop("coming", None)
        return None if coming is None or coming.request != working_request() else coming

    def put_back_now(self) -> None:
        """Put things back at once, if they are here, in the places of which `live.snapshot` was told last.

        Raises:
            ValueError: they are not what they were.
            RuntimeError: the snapshot is not to be had any more.
        """
        from monarch_kernel.train.snapshots.capture import put_back

        things = {name: thing() for name, thing in self._last.items()}
        if self._rewind is not None and things and all(thing is not None for thing in things.values()):
            put_back(things, self._fetch(self._rewind))

    # -- for series

    def keep(self, key: Key, captured: Captured, most: int) -> Future[Any] | None:
        """Keep it here, and with the buddy; gives the answer of that."""
        kept = _Kept(Payload(b"", 2), tuple(captured))
        self._rank.submit(lambda: self._file(self._proc, key, kept, most))
        if self._buddy == self._proc:
            return None

        def finish(answers: Sequence[Answer]) -> None:
            """One that has died keeps nothing, which is seen when all are asked what they keep."""

        return self._rank.peers.request(
            (self._buddy,),
            lambda id: pack(KeepSnapshot(id, self._proc, key, most, kept.payload), kept.frames),
            "",
            finish,
            quiet=True,
        )

    def _file(self, owner: int, key: Key, kept: _Kept, most: int) -> None:
        shelf = self._kept.setdefault(owner, {})
        shelf[key] = kept
        keys, rewind = set(shelf), self._rank.rewind
        if rewind is not None and key[1] < rewind.key[1]:  # a loop that comes later in the cell goes back to it
            keys.discard(rewind.key)
        for oldest in sorted(keys)[:-most]:
            del shelf[oldest]

    def _fetch(self, rewind: Rewind) -> Captured:
        """A snapshot of this place, kept here or by the buddy."""
        from monarch_kernel.train.snapshots.capture import Captured

        kept = self._kept.get(self._proc, {}).get(rewind.key)
        if kept is None:
            future = self._rank.peers.request(
                (rewind.holders[self._place],),
                lambda id: pack(FetchSnapshot(id, self._proc, rewind.key)),
                "",
                lambda answers: answers[0],
                quiet=True,
            )
            answer = future.get(_FETCH_S)
            if isinstance(answer, Failure):
                raise RuntimeError(f"the snapshot of step {rewind.key[2]} can't be had: {answer.message}")
            kept = _Kept(answer.payload, tuple(answer.frames))
        return Captured(*kept.frames)

    # -- on the thread that drives the socket

    def _answer(self, message: Message, payload: Payload, frames: tuple[Frame, ...] = ()) -> None:
        id: int = message.id  # type: ignore[attr-defined]
        self._rank.send_answer_now(id, pack(Result(id, payload), frames))

    def _hear_keep(self, message: KeepSnapshot, frames: Sequence[Frame]) -> None:
        self._file(message.owner, message.key, _Kept(message.payload, tuple(frames)), message.most)
        self._answer(message, Payload())

    def _hear_list(self, message: ListSnapshots, _: Sequence[Frame]) -> None:
        self._answer(message, *dump({owner: sorted(shelf) for owner, shelf in self._kept.items()}))

    def _hear_fetch(self, message: FetchSnapshot, _: Sequence[Frame]) -> None:
        kept = self._kept.get(message.owner, {}).get(message.key)
        if kept is None:
            gone = Failure("exception", "LookupError", "it was let go of meanwhile")
            self._rank.send_answer_now(message.id, pack(Failed(message.id, gone)))
            return
        self._answer(message, kept.payload, tuple(self._again(frame) for frame in kept.frames))

    def _hear_rewind(self, message: Rewind, _: Sequence[Frame]) -> None:
        self._rewind = message
        self._answer(message, Payload())

    @staticmethod
    def _again(frame: Frame) -> Frame:
        """A large frame that came from another process is put where a third can read it, too."""
        return keep([frame]) if len(frame) >= STORE.from_nbytes else frame


def _reference(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # such as lists
        return lambda: thing


def put_back_here() -> None:
    """`Snapshots.put_back_now`, for a request to all ranks."""
    HOME.loops.snapshots.put_back_now()


@register
def install(rank: Rank) -> None:
    """Let the loops of a rank have snapshots."""
    HOME.loops.snapshots = Snapshots(rank)
