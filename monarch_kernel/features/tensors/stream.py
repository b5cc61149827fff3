"""The stream of operations of a session: collects records in batches, and sends these to the ranks in order.

Theory of operation
===================

Any thread of the program adds records, with the stream's lock held. At most one batch is *open*. Its first record opens it, and
then the thread submits it to the I/O thread, which sends it when its turn comes. Until then further records join the batch. A
batch is *sealed*, and takes no more records, when

- the I/O thread sends it,
- it is full, or a record is for other ranks,
- the program submits anything else for ranks (`Runtime.before_requests`): later records must come after that.

So everything reaches the ranks in the order in which a thread submitted it: a batch has its place from before its first record
until after its last one.

*Ids to free* are taken into a batch when it is sealed. At that moment all operations that use these tensors are in this batch
or in earlier ones. If no operation follows, the next tick opens a batch for them: the garbage collector, which drops tensors at
any point of any thread, only appends to a queue.

*Locks.* The I/O thread takes the stream's lock while it holds the I/O lock. A thread that holds the stream's lock never waits
for the I/O lock. The garbage collector may run a finalizer of other code in the midst of `add`, and that finalizer may submit
something, which may send the open batch on this thread. `is_busy` is set then, and the batch is submitted once more. The same
holds for `seal`.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from monarch_kernel.base.events import TensorsView
from monarch_kernel.errors import Failure, MeshDownError
from monarch_kernel.features.tensors.backlog import Backlog
from monarch_kernel.features.tensors.controller import TensorExtension
from monarch_kernel.features.tensors.messages import DescribeTensors, PutTensor, ReportOps, RunOps
from monarch_kernel.features.tensors.records import DROP, FORGET, FREE
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.net.wire.codec import Frame, Packed, pack
from monarch_kernel.net.wire.messages import Message, Payload
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["MAX_BEHIND", "MAX_OPS", "OpStream", "Target", "stream_of"]

MAX_OPS = 64
"""Number of operations in a batch."""

MAX_BEHIND = 4096
"""Number of operations that ranks may be behind before the program waits for them."""

_SEEN_S = 3.0
"""For so long after a view has shown the operations, ranks are asked how many they have done."""


class Target:
    """Ranks that hold the same distributed tensors.

    Args:
        number: Its number in the session.
        procs: The processes.

    Attributes:
        frees: Ids of tensors that Python has dropped.
        held: The tensors that no sealed batch frees: id -> number of its layout, and of the operation that made it.
        bases: Those of them that are views: id -> id and number of the layout of the tensor whose memory it has.
        issued: The number of operations that were issued for it.
        acked: The number of operations that all its ranks have done.
        lost: The processes that have ended, and how.
        backlog: What was sent and has not arrived.
    """

    def __init__(self, number: int, procs: Sequence[int]) -> None:
        self.number = number
        self.procs = tuple(procs)
        self.frees: deque[int] = deque()
        self.held: dict[int, tuple[int, int]] = {}
        self.bases: dict[int, tuple[int, int]] = {}
        self.issued = 0
        self.acked = 0
        self.asked: set[int] = set()  # the processes that were asked for a report, and have not reported since
        self.lost: dict[int, Failure] = {}
        self.backlog = Backlog()
        self._done = dict.fromkeys(self.procs, 0)
        self._waiters: list[Waiter] = []

    def done(self, proc: int, count: int) -> None:
        """Note what a rank has done; on the I/O thread."""
        self._done[proc] = count
        self.asked.discard(proc)
        self.acked = min(self._done.values())
        self._wake()

    def lose(self, proc: int, death: Failure) -> None:
        """Note that a rank has ended; on the I/O thread."""
        self.lost[proc] = death
        self._wake()

    def has_room(self) -> bool:
        """Whether its ranks are not too far behind, or will never catch up."""
        return self.issued - self.acked < MAX_BEHIND or bool(self.lost)

    def notify(self, waiter: Waiter) -> None:
        """Set a waiter when there is room; on the I/O thread."""
        self._waiters.append(waiter)
        self._wake()

    def _wake(self) -> None:
        if self._waiters and self.has_room():
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.set()


class Batch:
    """Records for the ranks of a target.

    Attributes:
        words: Records (`records`).
        floats: Numbers that are arguments.
        count: The number of operations.
        is_submitted: Whether the I/O thread will send it.
    """

    __slots__ = ("_extension", "_is_sealed", "_is_sent", "_stream", "count", "definitions", "first", "floats",
                 "is_submitted", "target", "words")  # fmt: skip

    def __init__(self, stream: OpStream, target: Target, extension: TensorExtension) -> None:
        self.target = target
        self.first = stream.next_op
        self.words = array("q")
        self.floats = array("d")
        self.count = 0
        self.definitions: list[Packed] = []
        self.is_submitted = self._is_sealed = self._is_sent = False
        self._stream = stream
        self._extension = extension

    def seal(self) -> None:
        """Add the ids to free, and take nothing more; with the stream's lock held."""
        frees = self.target.frees
        ids = [frees.popleft() for _ in range(len(frees))]
        if ids:
            self.words.extend((FREE, len(ids), *ids))
            for id in ids:
                self.target.held.pop(id, None)
                self.target.bases.pop(id, None)
        self._is_sealed = True  # last: the I/O thread sends a sealed batch without the lock

    def send(self, now: float) -> list[Effect]:
        """Send it to the ranks; on the I/O thread."""
        stream = self._stream
        if not self._is_sealed:
            with stream.lock:
                if stream.is_busy:  # this thread is adding a record, or ids to free
                    stream.runtime.enter(self.send)
                    return []
                if stream.batch is self:
                    stream.seal()
        if self._is_sent:
            return []
        self._is_sent = True
        batch = list(self.definitions)
        if self.words:
            follows = stream.follows(self.target)
            batch.append(
                pack(RunOps(self.words.tobytes(), self.floats.tobytes(), self.first, self.target.number, follows)),
            )
        core = self._extension.core
        living = [proc for proc in self.target.procs if proc not in self.target.lost]
        return [effect for proc in living for packed in batch for effect in core.to_rank(proc, packed)]


class OpStream:
    """The operations of one session, in order.

    Args:
        runtime: The controller of the session.

    Attributes:
        lock: Held while records are added.
        is_busy: Whether the thread that holds the lock is adding a record, or ids to free.
        batch: The open batch.
        next_op: The number of the next operation.
        next_id: The id of the next tensor.
        view: Returns the tensors on processes, for display.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.lock = threading.RLock()
        self.is_busy = False
        self.batch: Batch | None = None
        self.next_op = 0
        self.next_id = 0
        self.view: Callable[[Sequence[int]], TensorsView | None] = lambda procs: None
        self._next_entry = 0
        self._seen_at = -math.inf
        self._sent: tuple[Target | None, int] = (None, 0)  # the target of the last batch, and what was sent before it
        self._targets: list[Target] = []
        self._extension = runtime.extension(TensorExtension)
        self._extension.listener = self
        runtime.before_requests.append(self.before_request)

    def new_target(self, procs: Sequence[int]) -> Target:
        """Make a target for tensors on these processes."""
        with self.lock:
            target = Target(len(self._targets), procs)
            self._targets.append(target)
        deaths = self.runtime.deaths(procs)
        target.lost.update(deaths)
        return target

    # -- adding records, with the lock held

    def open(self, target: Target) -> Batch:
        """Open a batch for a target, unless one is open.

        Raises:
            MeshDownError: The session was shut down.
        """
        batch = self.batch
        if batch is not None and batch.target is target:
            return batch
        if self.runtime.closed:
            raise MeshDownError("the session was shut down, and its tensors with it; start again with %mesh up")
        self.seal()
        self.batch = batch = Batch(self, target, self._extension)
        return batch

    def seal(self) -> None:
        """Seal the open batch."""
        batch = self.batch
        if batch is None:
            return
        was_busy, self.is_busy = self.is_busy, True
        try:
            batch.seal()
        finally:
            self.is_busy = was_busy
            self.batch = None
            self.submit(batch)

    def submit(self, batch: Batch) -> None:
        """Make the I/O thread send a batch, unless it will do so already; also without the lock."""
        if not batch.is_submitted:
            self.runtime.enter(batch.send)
            batch.is_submitted = True

    def note_views(self, target: Target, first: int, count: int, base: int) -> None:
        """Note that new tensors, with ids from ``first`` on, have the memory of another one, which may be on more ranks."""
        found = target.bases.get(base)
        if found is None:
            home = target if base in target.held else next((each for each in self._targets if base in each.held), None)
            if home is None:
                return
            found = home.bases.get(base) or (base, home.held[base][0])
        for id in range(first, first + count):
            target.bases[id] = found

    # -- for any thread

    def is_held_elsewhere(self, id: int, target: Target) -> bool:
        """Whether the program has a tensor on other ranks than those of a target, or also on others."""
        return any(id in each.held for each in self._targets if each is not target and not each.lost)

    def before_request(self) -> None:
        """Seal the open batch: what this thread submits next comes after it."""
        if self.batch is not None:
            with self.lock:
                if not self.is_busy:  # else it is submitted by a finalizer, in the midst of a record
                    self.seal()

    def put(self, target: Target, payload: Payload, frames: tuple[Frame, ...]) -> int:
        """Send a value to the ranks of a target; return its id."""
        id = self.new_id()
        self.runtime.tell(target.procs, pack(PutTensor(payload, id, target.number), frames))
        with self.lock:
            target.issued += 1
        nbytes = len(payload.data) + sum(memoryview(frame).nbytes for frame in frames)
        target.backlog.add(nbytes, partial(self._when_reached, target))
        return id

    def _when_reached(self, target: Target) -> Future[Any]:
        """Return a future that resolves when all ranks of a target have done what was sent so far."""
        request: Callable[[int], Packed] = lambda id: pack(DescribeTensors(id, ()))  # noqa: E731
        return self.runtime.request(target.procs, request, "sending tensors", lambda answers: None, quiet=True)

    def new_id(self) -> int:
        """Make the id of a new tensor."""
        with self.lock:
            self.next_id += 1
            return self.next_id - 1

    def new_entry(self) -> int:
        """Make the number of a new entry."""
        with self.lock:
            self._next_entry += 1
            return self._next_entry - 1

    def define(self, target: Target, definition: Message, frames: tuple[Frame, ...] = ()) -> None:
        """Define an entry, or a function, before the next record of a target."""
        with self._adding(target) as batch:
            batch.definitions.append(pack(definition, frames))

    def drop_entry(self, target: Target, entry: int) -> None:
        """Make the ranks of a target drop an entry, after all records so far."""
        with self._adding(target) as batch:
            batch.words.extend((DROP, entry))

    def forget_entries(self, target: Target) -> None:
        """Make the ranks of a target drop all entries that they know."""
        with self._adding(target) as batch:
            batch.words.append(FORGET)
            self.seal()

    @contextmanager
    def _adding(self, target: Target) -> Iterator[Batch]:
        with self.lock:
            self.is_busy = True
            try:
                batch = self.open(target)
                yield batch
            finally:
                self.is_busy = False
        self.submit(batch)

    def free_dropped(self) -> None:
        """Make ranks drop all tensors that Python has dropped."""
        for target in self._targets:
            if target.frees:
                with self.lock:
                    if self.is_busy:
                        continue
                    batch = self.open(target)
                self.submit(batch)

    def await_room(self, target: Target) -> None:
        """Wait until the ranks of a target are not too far behind."""
        self.before_request()
        while not target.has_room() and not self.runtime.closed:
            waiter = Waiter()
            self.runtime.submit(partial(target.notify, waiter))
            self.runtime.wait(waiter, None)

    # -- on the I/O thread

    def follows(self, target: Target) -> bool:
        """Whether a batch that is sent now comes right after another one, for the same ranks.

        While ranks owe answers, none does: an actor may still change its arguments.
        """
        core = self._extension.core
        before, self._sent = self._sent, (None if core.n_open else target, core.n_sent)
        return before == self._sent and not core.n_open

    def ops_done(self, proc: int, target: int, count: int) -> None:
        if target < len(self._targets):
            self._targets[target].done(proc, count)

    def rank_lost(self, proc: int, death: Failure) -> None:
        for target in self._targets:
            if proc in target.procs:
                target.lose(proc, death)

    def neighbours_of(self, proc: int) -> set[int]:
        return {each for target in self._targets if proc in target.procs for each in target.procs} - {proc}

    def tick(self, now: float) -> list[Effect]:
        if self.runtime.closed:
            return []
        self.free_dropped()
        if now > self._seen_at + _SEEN_S:
            return []
        effects: list[Effect] = []
        for target in [each for each in self._targets if each.acked < each.issued and not each.asked and not each.lost]:
            target.asked.update(target.procs)
            packed = pack(ReportOps(target.number))
            effects += [effect for proc in target.procs for effect in self._extension.core.to_rank(proc, packed)]
        return effects

    # -- for any thread

    def shown(self, procs: Sequence[int], now: float) -> TensorsView | None:
        self._seen_at = now
        return self.view(procs)


def stream_of(runtime: Runtime) -> OpStream:
    """Return the stream of a session, which is made when it is first used."""
    listener = runtime.extension(TensorExtension).listener
    return listener if isinstance(listener, OpStream) else OpStream(runtime)
