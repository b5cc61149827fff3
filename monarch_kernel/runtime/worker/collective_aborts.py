"""Collectives of a rank that have not ended: what the rank reports about them, and when it aborts them."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from monarch_kernel.net.wire.codec import Frame, Packed, dump, pack
from monarch_kernel.net.wire.messages import GetStacks, RankSpec, Release, Result
from monarch_kernel.runtime.diagnostics.loop_positions import LoopEnds
from monarch_kernel.runtime.diagnostics.stacks import Activity, Collective, Doing, describe_thread, with_callers
from monarch_kernel.runtime.rpc.handles import PROCESS
from monarch_kernel.runtime.worker.awaited_calls import AwaitedCalls
from monarch_kernel.runtime.worker.executor import Executor

__all__ = ["ABORT_GRACE_S", "COLLECTIVE_GRACE_S", "TORCH_ERRORS", "CollectiveAborts", "Group"]

_log = logging.getLogger(__name__)

COLLECTIVE_GRACE_S = 0.3
ABORT_GRACE_S = 0.1
RELEASE_AFTER_S = 1.0
_LEAVE_EVERY_S = 0.05
_THREAD_NAME = re.compile(r"(.*?)-\d+(?:_\d+)?(?: \((.*)\))?")
"""Matches a name that Python gives: ``Thread-3 (load)``, ``ThreadPoolExecutor-0_1``. Ranks count their threads differently."""
TORCH_ERRORS = frozenset({"RuntimeError", "DistBackendError", "DistNetworkError"})
"""Names of the exceptions that a collective raises when it is aborted, or when a peer is gone."""


class Messages(Protocol):
    """The messages between two ranks, as far as this module and a rank's answers need them."""

    def since(self, at: float) -> bool:
        """Return whether this thread has started to send or receive a message since a time of `time.perf_counter`."""
        ...

    def take(self) -> int:
        """Return what `Result` says about the messages since the last call."""
        ...


class Group(Protocol):
    """The part of the rank's default process group that interrupts use.

    Attributes:
        has_aborted: whether there were groups that it has aborted, and not formed again yet.
    """

    has_aborted: bool

    @property
    def messages(self) -> Messages:
        """The messages between two ranks that this rank has started to send or receive."""
        ...

    def waits_s(self, thread: int) -> float:
        """Return for how long a thread (its `threading.get_ident`) has been in a call of torch.distributed; 0 if in none."""
        ...

    def end_key_wait(self, thread: int) -> bool:
        """Make a thread raise an error if it waits for keys of a store of the user's; return whether it does."""
        ...

    def pending_s(self, others: Collection[int] = ()) -> float:
        """Return the age of the oldest pending collective that none of these threads has started; 0 if there is none."""
        ...

    def pending(self, brief: bool = False) -> tuple[tuple[Collective, ...], dict[str, int]]:
        """Return the pending collectives, and the number of the last collective that was started in each process group.

        Args:
            brief: whether groups may be left out in which more were started since the last call.
        """
        ...

    def abort(self, dead: int | None = None) -> None:
        """Make pending collectives raise, or only those with a dead rank; the group is unusable from then on."""
        ...

    def collectives(self) -> int:
        """Return the number of collectives started so far; -1 without a group, -2 if it is unusable."""
        ...

    def groups(self) -> int:
        """Return the number of process groups made so far; -1 without a group."""
        ...

    def size(self) -> int:
        """Return the number of ranks in the default group; 0 without a group."""
        ...


class AbortsOwner(Protocol):
    """The part of a rank that this module uses."""

    spec: RankSpec
    group: Group | None
    awaited_calls: AwaitedCalls
    loop_ends: LoopEnds

    def executors(self) -> list[Executor]:
        """Return all executors: that of the main thread, and those of the actors."""
        ...

    def activities(self) -> tuple[Activity, ...]:
        """Return what the executors do now."""
        ...

    def send_answer_now(self, id: int, packed: Packed) -> None:
        """Send an answer to the process that made the request; for the I/O thread."""
        ...


class CollectiveAborts:
    """Aborts the process group where code waits for a collective that may never end; for the I/O thread.

    An interrupt takes effect at the next bytecode of the user's code. Until then the code may still enter a collective that
    the other ranks have left: at the end of an import, which is not interrupted, or in native code, such as the backward pass
    of a model. So this looks for a wait again and again until the interrupt has taken effect, and not only once.

    An interrupt may also be raised after a collective has started, and before the code waits for it. If the collective does not
    end, the ranks no longer agree on the number of the next one. Of messages no rank can say how many its peers have sent or
    expect, and what the next cell receives could be one that the interrupted code has sent. So an interrupt of code that has
    sent or received messages always ends the group.

    Args:
        rank: The rank.
        later: Calls a function with arguments on another thread, after some seconds.
        sleep: Waits for some seconds.
    """

    def __init__(
        self, rank: AbortsOwner, later: Callable[..., object], sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._rank = rank
        self._later = later
        self._sleep = sleep
        self._unknown = ""  # why the last `GetStacks` could not find the pending collectives

    def after_interrupt(self, executor: Executor, id: int, insist: bool) -> None:
        """Abort the group after a grace period if an executor still runs a request, and waits; always with ``insist``."""
        self._later(ABORT_GRACE_S if insist else COLLECTIVE_GRACE_S, self._look, executor, id, insist)

    def _look(self, executor: Executor, id: int, insist: bool) -> None:
        group = self._rank.group
        if executor.current != id or group is None:
            return
        if insist or self._pending_s([executor]) > 0:
            group.abort()
        elif not executor.was_raised(id):
            self._later(COLLECTIVE_GRACE_S, self._look_again, executor, id, False)

    def _look_again(self, executor: Executor, id: int, waited: bool) -> None:
        """Look again; code that may go on must wait at two looks (``waited``), because a collective may be on its way."""
        group = self._rank.group
        if executor.current != id or group is None:
            return
        waits = self._pending_s([executor]) > 0
        if executor.was_raised(id):  # since the last look
            self._later(COLLECTIVE_GRACE_S, self._look, executor, id, False)
        elif waits and waited:
            group.abort()
        else:
            self._later(COLLECTIVE_GRACE_S, self._look_again, executor, id, waits)

    def leave(self, executor: Executor) -> None:
        """Abort the group if a collective that an interrupted request has started does not end, or if it has used messages.

        For the executor's thread.
        """
        group = self._rank.group
        if group is None or group.collectives() < 0:  # there is none, or it is unusable anyway
            return
        if group.messages.since(executor.began_at):
            group.abort()
            return
        waited_s = 0.0
        while self._pending_s([executor]) > 0:
            if waited_s >= COLLECTIVE_GRACE_S:
                group.abort()
                return
            self._sleep(_LEAVE_EVERY_S)
            waited_s += _LEAVE_EVERY_S

    def get_stacks(self, message: GetStacks, _: Sequence[Frame]) -> None:
        """Answer with what this rank does now, on the thread that drives the socket, so that it needs no busy thread."""
        collectives: tuple[Collective, ...] = ()
        reached: dict[str, int] = {}
        unknown, groups = "", -1
        if self._rank.group is not None:
            try:
                collectives, reached = self._rank.group.pending(message.brief)
                groups = self._rank.group.groups()
            except Exception as error:  # torch does not promise the interface of its recorder
                unknown = f"{type(error).__name__}: {error}"
                if unknown != self._unknown:  # views send `GetStacks` once a second
                    _log.exception("could not read the pending collectives")
            self._unknown = unknown
        aborted = self._rank.group is not None and self._rank.group.has_aborted
        activities = self._rank.activities()
        activities = (*_of_threads(collectives, activities), *activities)
        collectives = with_callers(collectives, activities)
        loops = () if PROCESS.loops is None else PROCESS.loops.places()
        calls = self._rank.awaited_calls.describe()
        rank, ends = self._rank.spec.rank, self._rank.loop_ends.values()
        doing = Doing(activities, collectives, reached, unknown, aborted, rank, loops, calls, groups, ends)
        payload, frames = dump(doing, "what the rank does")
        self._rank.send_answer_now(message.id, pack(Result(message.id, payload), frames))

    def release(self, message: Release, _: Sequence[Frame]) -> None:
        """Leave the collectives of a request that a rank has failed, or that has lost a rank."""
        group, dead = self._rank.group, message.dead if message.mesh == self._rank.spec.mesh else -1
        loops = PROCESS.loops if dead >= 0 else None
        ends = loops is not None and loops.ends_with_a_death(message.id)
        at_work = [executor for executor in self._rank.executors() if executor.current == message.id]
        pending_s = self._pending_s(at_work) if at_work else 0.0
        if ends or pending_s > (RELEASE_AFTER_S if dead < 0 else 0.0):
            for executor in at_work:
                executor.released = message.id  # first: errors from now on are consequences of the release
        if loops is not None:
            loops.lose(message.id, f"{message.mesh}[{dead}]")
        if group is not None and at_work and dead >= 0:
            group.abort(dead)
        elif group is not None and pending_s > RELEASE_AFTER_S:
            ended = [group.end_key_wait(executor.thread_id) for executor in at_work]
            if not all(ended):  # a wait for keys needs no abort
                group.abort()

    def _pending_s(self, executors: Sequence[Executor]) -> float:
        """Return the age of the oldest collective that is pending or that these executors wait for; 0 if there is none.

        Those that other executors have started do not count: an abort would end innocent work. Also 0 if it is unknown.
        """
        group = self._rank.group
        if group is None:
            return 0.0
        waited_s = max((group.waits_s(executor.thread_id) for executor in executors), default=0.0)
        try:
            others = {each.thread_id for each in self._rank.executors() if each not in executors}
            return max(waited_s, group.pending_s(others))
        except Exception:  # torch does not promise the interface of its recorder
            _log.exception("could not determine whether a collective is pending")
            return waited_s


def _of_threads(collectives: Sequence[Collective], activities: Sequence[Activity]) -> list[Activity]:
    """Describe threads that wait in collectives and that the user's code has started: no executor runs them."""
    known = {each.thread for each in activities}
    waiting = dict.fromkeys(each.thread for each in collectives if each.thread not in known)
    if not waiting:
        return []
    names = {each.ident: each.name for each in threading.enumerate()}
    request = activities[0].request if activities else 0
    found = (
        activity
        for thread in waiting
        if thread in names
        for activity in describe_thread(thread, request, f"thread {_plain_name(names[thread])}")
    )
    return [each for each in found if each.user_frame is not None]


def _plain_name(name: str) -> str:
    found = _THREAD_NAME.fullmatch(name)
    return (found[2] or found[1]) if found is not None else name
