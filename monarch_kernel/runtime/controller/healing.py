"""New processes in the places of others: what is started, what they are sent first, and when all of that is over.

Theory of operation
===================

A *proc* is the number of a place, which handles hold. The process in it is an *incarnation*, with its own record and name
on the wire (``R7``, then ``R7+1``). So no message for one incarnation reaches another (`runtime.controller.processes`).

The process that spawned an actor keeps the message (`runtime.rpc.respawn_log`), the controller and ranks alike. It sends
the message to the new process before anything else, with the places where the actor still lives (`Spawn.living`, for
``__restore__``), and drops it when the actor is stopped. No request is sent twice: the death of the former process has
answered its pending requests.

`runtime.controller.restarts` decides when ranks are replaced automatically (`Due`). Then the death is no failure to the
owners of what was in the process (`PeerNews.is_replaced`). A controller that attaches learns from `HostHello` which
incarnations there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """What becomes of the processes that take the places of others.

    Attributes:
        over: called when they are up and have made their actors, or have failed to.
        replaced: the places.
        failures: what failed, empty for the process itself, in which place, and how.
        parts: requests that are not over.
    """

    over: Callable[[], None] = lambda: None
    replaced: tuple[int, ...] = ()
    failures: list[tuple[str, int, Failure]] = field(default_factory=list)
    parts: set[int] = field(default_factory=set)


class Healer:
    """Has the state start processes, and asks them for what was there before; with the baton held.

    Args:
        state: the controller's.
        new_request: gives the number of a new request, of which a function is given the answers.
        respawned: is told of an actor that is made again, and in which place.
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
        """Start a process in the place of each that is lost; those that are not up yet are waited for, too.

        Args:
            procs: the places.
            healing: takes what becomes of them.
            hosts: for each host agent that has ended the one that has come in its place.
            now: the time.
        """
        state = self._state
        lost = tuple(proc for proc in procs if state.processes.is_lost(proc))
        healing.replaced += lost
        effects = state.processes.heal(lost, now, hosts)
        for record, having in list(state.requests.respawn_log.of(lost)):
            for proc in having:
                self._respawned(record.actor, proc)
            effects += state.spawn_again(self._part(healing, having, record.note), record, having, now)
        coming = tuple(proc for proc in procs if not state.ranks[proc].up)
        part = self._part(healing, coming, "")
        return effects + state.request(part, coming, pack(Ping(part)), "", now, quiet=True)

    def _part(self, healing: Healing, procs: Sequence[int], note: str) -> int:
        """The number of a request to some of these processes."""

        def over(answers: Sequence[Answer]) -> None:
            healing.parts.discard(part)
            told = zip(procs, answers, strict=True)
            healing.failures += [(note, proc, answer) for proc, answer in told if isinstance(answer, Failure)]
            if not healing.parts:
                healing.over()

        part = self._new_request(over)
        healing.parts.add(part)
        return part
