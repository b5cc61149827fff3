"""Counts the collectives of a rank: their kind, process group, bytes, and the time that Python has waited for them.

This module wraps the methods of ``ProcessGroup``, and ``Work.wait``, through which all Python code goes, including
``torch.distributed`` itself. The wrappers also compare the calls of ranks (`call_check`). `operators` reports the collectives
that C++ code starts.

Torch has a completion hook for NCCL only, and its flight recorder has no durations for gloo. So the duration of a collective
is measured if Python waits for it: from the call to the end of the wait, where the wait had to wait. Of those that C++ starts,
some are measured (`sampled_durations`). On a GPU, where Python does not wait, durations are unknown.

The flight recorder has no entries for gloo's sends, receives and ``monitored_barrier``, so the meter notes these calls, and the
waits for them, while they block a thread (`CollectiveMeter.blocked`).

A collective that fails, as after an interrupt or a refusal on another rank, has moved nothing that can be used, and is taken
out of the counts again: where Python waits for it, when the wait fails; of those that C++ has started, when they are aborted.

Torch also numbers the collectives of a group. If a group has more than were counted, the report includes their number.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar
from weakref import ref

from monarch_kernel.base.text import plural
from monarch_kernel.features.profiling.arrivals import ARRIVALS
from monarch_kernel.features.traffic.bandwidth import Moved
from monarch_kernel.net.memory.counters import CollectiveKind, Meters, Transferred
from monarch_kernel.runtime.diagnostics.stacks import Collective
from monarch_kernel.train.process_group.call_check import CallCheck
from monarch_kernel.train.process_group.message_counts import MessageCounts
from monarch_kernel.train.process_group.operators import METHODS, Noted, Operator, Operators, Seen, number_in
from monarch_kernel.train.process_group.sampled_durations import SampledDurations

__all__ = ["BlockedCall", "CollectiveMeter"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MAX_STARTED = 1024
_MAX_PENDING = 256
"""Collectives of C++ of one kind that may be aborted at once."""

_COUNT_EVERY_S = 0.1
"""How often collectives of C++ are counted: many at once cost less, because each finds code and data in the caches."""

_WAIT_TIMED_OUT = "Operation timed out"
"""In torch's error where only the wait has ended. Some collectives of gloo are not completed when they have failed."""

_WITH_PEER = ("send", "recv")
_NOT_COLLECTIVE = ("send", "recv", "monitored_barrier")
_NOT_RECORDED = ("send", "recv", "recv_anysource", "monitored_barrier")
"""Methods whose calls the flight recorder of torch does not have for gloo."""


class BlockedCall(NamedTuple):
    """A call that the flight recorder does not have, and for which a thread waits.

    Attributes:
        operation: such as ``send``.
        group: torch's name of the group; empty for the default one.
        label: the name of the group for users.
        peer: rank in the group that a send or receive is for; None for others.
        shapes: shapes of the tensors.
        tag: the tag of a send or receive.
        members: the ranks in the mesh that take part, where the group does not exist yet.
    """

    operation: str
    group: str
    label: str
    peer: int | None = None
    shapes: tuple[Sequence[int], ...] = ()
    tag: int = 0
    members: tuple[int, ...] = ()


class _Started(NamedTuple):
    """A collective that Python has started and may wait for."""

    kind: CollectiveKind
    call: BlockedCall | None
    at: float
    timed_nbytes: int  # 0 if the end of the wait is not the end of the collective
    moved: Moved
    members: tuple[int, ...] = ()
    rank: int = -1  # this rank's number in the group, of a receive from any rank


class CollectiveMeter:
    """Counts the collectives in the process groups of this process, once it is installed.

    Args:
        meters: receive the counts.
        label: returns the label of a group for users, given torch's name and description of it.
        check: compares each call with those of other ranks first. Both share one wrapper of each method, because a wrapper
            costs some microseconds where a collective takes a hundred.

    Attributes:
        operators: describes the collectives, and notes those that C++ starts.
        messages: counts the messages between two ranks.
    """

    def __init__(self, meters: Meters, label: Callable[[str, str], str], check: CallCheck) -> None:
        self._meters = meters
        self.messages = MessageCounts()
        self._check = check
        self._label = label
        self._seen: dict[str, int] = {}
        self._by_cpp: dict[CollectiveKind, deque[Moved]] = {}  # the last ones
        self._started: dict[int, tuple[Callable[[], Any], _Started]] = {}  # by address; dead ones are dropped
        self.operators = Operators(label, self._due, check.message_of_cpp)
        self._counting_lock = threading.Lock()
        meters.before_changes = self._count_from_now_on
        self._thread = self.operators.thread
        self._durations = SampledDurations(meters)
        self._work_in: Callable[[Any], Any] = lambda result: None
        self._blocked: dict[int, tuple[float, BlockedCall]] = {}  # thread -> since when, and in which call

    def install(self, dist: Any) -> None:
        """Wrap the methods through which collectives of Python go, and prepare for those of C++."""
        self._work_in = partial(_work_in, dist.Work)
        self._durations.install(dist.Work.wait)
        self.operators.install(dist)
        for name, method in METHODS.items():
            original = getattr(dist.ProcessGroup, name, None)
            if original is not None:
                setattr(dist.ProcessGroup, name, self._counting(original, name, method))
        dist.Work.wait = self._waiting(dist.Work.wait)

    def blocked(self) -> dict[int, tuple[float, BlockedCall]]:
        """Return the calls that block a thread now and that the flight recorder does not have.

        Returns:
            thread -> when it began to wait, by the clock `time.monotonic`, and the call.
        """
        return self._blocked.copy()

    def run(self, call: BlockedCall, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call a function, and note meanwhile that this thread may wait in a call."""
        thread = threading.get_ident()
        self._blocked[thread] = time.monotonic(), call
        try:
            return function(*args, **kwargs)
        finally:
            self._blocked.pop(thread, None)

    def collectives_in(self, group: Any) -> int:
        """The number of collectives started in a group. It does not count messages between two ranks, as torch's does."""
        self._count()
        return number_in(group) - self.messages.numbers(group.group_name)

    def count_unread(self, dist: Any) -> int:
        """The number of collectives in existing groups that torch has counted and this meter has missed."""
        self._count()
        unread = 0
        for group in list(dist.distributed_c10d._world.pg_map):
            unread += max(0, number_in(group) - self._seen.get(group.group_name, 0))
        return unread

    def aborted(self, read: Callable[[], tuple[Sequence[Collective], object]], dead: int | None) -> None:
        """Take collectives that C++ has started out of the counts, because they are aborted now.

        Args:
            read: returns the pending collectives, as `RankGroup.pending`.
            dead: the rank whose groups are aborted; None for all groups.
        """
        self._count()
        if not self._by_cpp:
            return
        try:
            found = read()[0]
        except Exception:  # torch does not promise the interface of its recorder, and the abort matters more
            _log.exception("collectives that are aborted stay in the counts")
            return
        pending = Counter((each.group, each.operation) for each in found if dead is None or dead in each.members)
        for of, started in list(self._started.values()):
            if (work := of()) is not None and not work.is_completed():
                pending[started.kind.group, started.kind.operation] -= 1
        by_cpp, self._by_cpp = self._by_cpp, {}  # a second abort finds the same ones pending
        for kind, last in by_cpp.items():
            for _ in range(min(len(last), pending[kind.group, kind.operation])):
                nbytes, _, nbytes_in, nbytes_out = last.pop()
                self._meters.collect(kind, -nbytes, -nbytes_in, -nbytes_out, operations=-1)

    def _due(self, noted: Noted, result: Any) -> None:
        """Count what C++ has started up to this collective, and measure how long this one lasts.

        Args:
            noted: what its call has told.
            result: what its operator or method has returned.
        """
        self.operators.due_at = noted.started + _COUNT_EVERY_S
        if noted.is_on_cpu and self._durations.is_due(noted.started):
            seen = self.operators.describe(noted)
            self._durations.offer(seen.kind, seen.moved.size, seen.started, partial(self._work_in, result))
        self._count()

    def _count(self) -> None:
        """Count what C++ has started, in order."""
        noted = self.operators.noted
        with self._counting_lock:
            while noted:
                seen = self.operators.describe(noted.popleft())
                nbytes, _, nbytes_in, nbytes_out = seen.moved
                self._seen[seen.group] = self._seen.get(seen.group, 0) + 1  # torch counts send and recv, too
                self._meters.collect(seen.kind, nbytes, nbytes_in, nbytes_out)
                self._by_cpp.setdefault(seen.kind, deque(maxlen=_MAX_PENDING)).append(seen.moved)
                if seen.kind.operation in _NOT_COLLECTIVE:
                    self.messages.numbered(seen.group, 1)
                else:
                    self._note_arrival(seen)

    def _count_from_now_on(self) -> None:
        """Count what was started, for a report. The next collective counts at once: there may be no other report."""
        self.operators.due_at = 0.0  # first
        self._count()

    def _numbered(self, group: Any, operation: str, before: int) -> int:
        """Note by how much a call that is no collective has raised the group's number, which was ``before``.

        gloo sends several messages in a monitored_barrier. Other threads may send messages meanwhile.
        """
        self._count()  # in the order in which they were started
        numbers = number_in(group) - before
        if operation in _WITH_PEER:
            numbers = min(numbers, 1)
        self.messages.numbered(group.group_name, numbers)
        return numbers

    def _note_arrival(self, seen: Seen) -> None:
        """Note when this rank has started a collective. The number that it has on all ranks is torch's without messages."""
        if len(seen.members) > 1:
            ARRIVALS.note(seen.group, seen.members, seen.number - self.messages.numbers(seen.group), seen.started)

    def _counting(self, original: Callable[..., Any], method_name: str, operator: Operator) -> Callable[..., Any]:
        check, thread, operation, messages = self._check, self._thread, operator.operation, self.messages
        is_recorded = method_name not in _NOT_RECORDED

        @wraps(original)
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            before = 0
            call: BlockedCall | None = None  # that the flight recorder does not have
            if not is_recorded:
                messages.begins(started)
                about = _of_message(method_name, args)
                _check_peer(group, about[0])
                name = group.group_name
                call = BlockedCall(operation, name, self._label(name, group.group_desc), *about)
                before = number_in(group)
            number = check.start(group, method_name, args, kwargs, started)
            thread.is_inside = True
            try:
                if call is None:
                    work = original(group, *args, **kwargs)
                else:
                    work = self.run(call, original, group, *args, **kwargs)
            except BaseException as error:
                check.failed(group, number, error, 0 if call is None else self._numbered(group, operation, before))
                raise
            finally:
                thread.is_inside = False
            if call is not None and call.peer is not None:
                count = messages.sent if operation == "send" else messages.received
                count(call.group, group.rank(), call.peer, call.tag)
            numbers = 1 if call is None else self._numbered(group, operation, before)
            if number < 0:
                check.uncompared(group, number, numbers)
            try:
                seen = self.operators.describe(self.operators.note(operator, group, (*args, *kwargs.values()), started))
            except Exception:  # a count must not fail a collective that works
                _log.debug("%s can't be counted", operation, exc_info=True)
                return work
            self._started_by_call(seen, numbers, work, call, group.rank() if method_name == "recv_anysource" else -1)
            return work

        return method

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        check = self._check

        @wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            known = self._started.pop(id(work), None)
            if known is None or work is not known[0]():
                try:
                    return original(work, *args, **kwargs)
                except RuntimeError as error:
                    check.explain(error)
                    raise
            kind, call, at, timed_nbytes, moved, members, rank = known[1]
            is_timed = timed_nbytes > 0 and not work.is_completed()
            started = time.perf_counter()
            try:
                if call is None:
                    result = original(work, *args, **kwargs)
                else:
                    result = self.run(call, original, work, *args, **kwargs)
            except BaseException as error:
                if _WAIT_TIMED_OUT in str(error) and not work.is_completed():
                    self._started[id(work)] = known
                elif isinstance(error, RuntimeError) or isinstance(error.__context__, RuntimeError):
                    nbytes, _, nbytes_in, nbytes_out = moved
                    self._meters.collect(kind, -nbytes, -nbytes_in, -nbytes_out, operations=-1)
                self._meters.collect(kind, operations=0, seconds=time.perf_counter() - started)
                check.explain(error)
                raise
            now = time.perf_counter()
            if call is not None and rank >= 0:
                self.messages.received(call.group, rank, work._source_rank(), call.tag)
            if call is not None and self._meters.on_transfer is not None:
                self._tell(self._meters.on_transfer, kind, call, now - at, members, moved.nbytes)
            if is_timed:
                self._meters.collect(
                    kind, operations=0, seconds=now - started, timed_nbytes=timed_nbytes, timed_s=now - at
                )
            else:
                self._meters.collect(kind, operations=0, seconds=now - started)
            return result

        return wait

    def _started_by_call(self, seen: Seen, numbers: int, work: Any, call: BlockedCall | None, rank: int) -> None:
        """Count what a call of Python has started, with the time that it took, and as what torch counts it."""
        self._count()  # in the order in which they were started
        started, kind, moved, name, is_on_cpu, *_ = seen
        nbytes, size, nbytes_in, nbytes_out = moved
        self._seen[name] = self._seen.get(name, 0) + numbers
        if work is not None:
            if len(self._started) >= _MAX_STARTED:
                self._forget()
            timed_nbytes = size if is_on_cpu else 0
            self._started[id(work)] = ref(work), _Started(kind, call, started, timed_nbytes, moved, seen.members, rank)
        self._meters.collect(kind, nbytes, nbytes_in, nbytes_out, seconds=time.perf_counter() - started)
        if call is None:
            self._note_arrival(seen)

    @staticmethod
    def _tell(
        tell: Callable[[Transferred], object],
        kind: CollectiveKind,
        call: BlockedCall,
        seconds: float,
        members: tuple[int, ...],
        nbytes: int,
    ) -> None:
        """Tell a profile of a message to or from a known rank."""
        if call.peer is None or call.peer >= len(members):
            return
        ends = (-1, members[call.peer]) if kind.operation == "send" else (members[call.peer], -1)
        tell(Transferred(time.time(), seconds, nbytes, kind.path, *ends, is_message=True))

    def _forget(self) -> None:
        self._started = {key: known for key, known in self._started.items() if known[0]() is not None}


def _work_in(kind: Any, result: Any) -> Any:
    """What a method of a process group has returned, or an operator, which returns it as an object of TorchScript."""
    last = result[-1] if isinstance(result, (list, tuple)) else result
    return last if isinstance(last, kind) else kind.unbox(last)


def _check_peer(group: Any, peer: int | None) -> None:
    """Refuse a message to or from a rank that the group does not have, on which gloo ends the process.

    Raises:
        ValueError: the group has no such rank.
    """
    size = group.size()
    if peer is not None and not 0 <= peer < size:
        raise ValueError(f"rank {peer} does not exist: the process group has {plural(size, 'rank')}, 0 to {size - 1}")


def _of_message(method: str, args: tuple[Any, ...]) -> tuple[int | None, tuple[Sequence[int], ...], int]:
    """Return the peer, the shapes of the tensors, and the tag of a send or receive."""
    if not args or not isinstance(args[0], list):
        return None, (), 0
    shapes = tuple([each.shape for each in args[0] if hasattr(each, "shape")])
    peer, *tag = args[1:] if method in _WITH_PEER and len(args) > 1 else (None, *args[1:])
    return peer, shapes, tag[0] if tag and isinstance(tag[0], int) else 0
