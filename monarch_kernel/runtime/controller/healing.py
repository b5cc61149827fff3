"""Replaces lost processes: starts new ones, spawns the former actors there, and reports when all of that is done.

Theory of operation
===================

A *proc* is the number of a place, which handles hold. The process in it is an *incarnation*, with its own record and name
on the wire (``R7``, then ``R7+1``). So no message for one incarnation reaches another (`runtime.controller.processes`).

The process that spawned an actor keeps the message (`runtime.rpc.respawn_log`), the controller and ranks alike. It sends
the message to the new process before anything else, with the places where the actor still lives (`Spawn.living`, for
``__restore__``), and drops it when the actor is stopped. No request is sent twice: the death of the former process has
answered its pending requests.

`runtime.controller.restart_policy` decides when ranks are replaced automatically (`RestartDue`). Then the death is no failure
to the owners of what was in the process (`ProcessStatus.is_replaced`). A controller that attaches learns from `HostHello` which
incarnations there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from monarch_kernel.errors import Failure
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Ping
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.runtime.rpc.answers import Answer

__all__ = ["Healer", "Healing"]


@dataclass
class Healing:
    """The replacement of some processes.

    Attributes:
        over: Called when the new processes are up and have made their actors, or have failed to.
        replaced: The numbers of the processes.
        failures: For each failure, the description of the spawn (empty for the process itself), the process, and the failure.
        parts: Requests that have not resolved.
        error: Why no host could be launched in place of one that has ended meanwhile.
    """

    over: Callable[[], None] = lambda: None
    replaced: tuple[int, ...] = ()
    failures: list[tuple[str, int, Failure]] = field(default_factory=list)
    parts: set[int] = field(default_factory=set)
    error: Exception | None = None

    def forget(self, procs: Collection[int]) -> None:
        """Forget the failures of processes that are replaced once more."""
        self.failures = [failure for failure in self.failures if failure[1] not in procs]


class Healer:
    """Starts processes through the state, and makes them spawn the former actors; on the I/O thread.

    Args:
        state: The state of the controller.
        new_request: Makes a request that passes its answers to a function; returns its number.
        respawned: Called for each actor that is made again, with its number and the process.
    """

    def __init__(
        self,
        state: State,
        new_request: Callable[[Callable[[Sequence[Answer]], None]], int],
        respawned: Callable[[int, int], None],
    ) -> None:
        self._state = state
        self._new_request = new_request
        self._respawned = respawned

    def heal(self, procs: Sequence[int], healing: Healing, hosts: Mapping[int, int], now: float) -> list[Effect]:
        """Start a process in place of each that is lost; also wait for those that are not up yet.

        Args:
            procs: The numbers of the processes.
            healing: Collects the outcome.
            hosts: Maps each host agent that has ended to the one that replaces it.
            now: The time.
        """
        state = self._state
        lost = tuple(proc for proc in procs if state.processes.is_lost(proc))
        healing.replaced += tuple(proc for proc in lost if proc not in healing.replaced)
        effects = state.processes.heal(lost, now, hosts)
        for record, having in list(state.requests.respawn_log.of(lost)):
            for proc in having:
                self._respawned(record.actor, proc)
            effects += state.spawn_again(self._part(healing, having, record.description), record, having, now)
        coming = tuple(proc for proc in procs if not state.ranks[proc].up)
        part = self._part(healing, coming, "")
        return effects + state.request(part, coming, pack(Ping(part)), "", now, quiet=True)

    def _part(self, healing: Healing, procs: Sequence[int], description: str) -> int:
        """Make a request to some of these processes; returns its number."""

        def over(answers: Sequence[Answer]) -> None:
            healing.parts.discard(part)
            by_proc = zip(procs, answers, strict=True)
            healing.failures += [(description, proc, answer) for proc, answer in by_proc if isinstance(answer, Failure)]
            if not healing.parts:
                healing.over()

        part = self._new_request(over)
        healing.parts.add(part)
        return part
