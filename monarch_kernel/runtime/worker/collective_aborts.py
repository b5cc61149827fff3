"""Collectives of a rank that have not ended: what the rank reports about them, and when it aborts them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from monarch_kernel.net.wire.codec import Frame, Packed, dump, pack
from monarch_kernel.net.wire.messages import GetStacks, RankSpec, Release, Result
from monarch_kernel.runtime.diagnostics.stacks import Activity, Collective, Doing, with_callers
from monarch_kernel.runtime.rpc.handles import PROCESS
from monarch_kernel.runtime.worker.executor import Executor

__all__ = ["TORCH_ERRORS", "CollectiveAborts", "Group"]

_log = logging.getLogger(__name__)

RELEASE_AFTER_S = 1.0
TORCH_ERRORS = frozenset({"RuntimeError", "DistBackendError", "DistNetworkError"})
"""Names of the exceptions that a collective raises when it is aborted, or when a peer is gone."""


class Group(Protocol):
    """The part of the rank's default process group that interrupts use.

    Attributes:
        has_aborted: whether there were groups that it has aborted, and not formed again yet.
    """

    has_aborted: bool

    def waits_s(self, thread: int) -> float:
        """Return for how long a thread (its `threading.get_ident`) has been in a call of torch.distributed; 0 if in none."""
        ...

    def end_key_wait(self, thread: int) -> bool:
        """Make a thread raise an error if it waits for keys of a store of the user's; return whether it does."""
        ...

    def pending_s(self) -> float:
        """Return the age of the oldest pending collective in seconds; 0 if there is none."""
        ...

    def pending(self) -> tuple[tuple[Collective, ...], dict[str, int]]:
        """Return the pending collectives, and the number of the last collective that was started in each process group."""
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

    Args:
        rank: The rank.
    """

    def __init__(self, rank: AbortsOwner) -> None:
        self._rank = rank
        self._unknown = ""  # why the last `GetStacks` could not find the pending collectives

    def abort(self, executor: Executor, id: int, insist: bool) -> None:
        """Abort the group if an executor still runs a request, and waits in a collective, or always with ``insist``."""
        group = self._rank.group
        if executor.current != id or group is None:
            return
        if insist or self._pending_s([executor]) > 0:
            group.abort()

    def get_stacks(self, message: GetStacks, _: Sequence[Frame]) -> None:
        """Answer with what this rank does now, on the thread that drives the socket, so that it needs no busy thread."""
        collectives: tuple[Collective, ...] = ()
        reached: dict[str, int] = {}
        unknown = ""
        if self._rank.group is not None:
            try:
                collectives, reached = self._rank.group.pending()
            except Exception as error:  # torch does not promise the interface of its recorder
                unknown = f"{type(error).__name__}: {error}"
                if unknown != self._unknown:  # views send `GetStacks` once a second
                    _log.exception("could not read the pending collectives")
            self._unknown = unknown
        aborted = self._rank.group is not None and self._rank.group.has_aborted
        activities = self._rank.activities()
        collectives = with_callers(collectives, activities)
        loops = () if PROCESS.loops is None else PROCESS.loops.places()
        doing = Doing(activities, collectives, reached, unknown, aborted, self._rank.spec.rank, loops)
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

        Also 0 if it is unknown.
        """
        group = self._rank.group
        if group is None:
            return 0.0
        waited_s = max((group.waits_s(executor.thread_id) for executor in executors), default=0.0)
        try:
            return max(waited_s, group.pending_s())
        except Exception:  # torch does not promise the interface of its recorder
            _log.exception("could not determine whether a collective is pending")
            return waited_s
