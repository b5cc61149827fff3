"""Finds actors that wait for each other in a cycle: no I/O, no threads, no clock.

Theory of operation
===================

Edge chasing, for requests that need all answers (Chandy, Misra and Haas, "Distributed Deadlock Detection", 1983, the AND
model). No process has the whole picture, and none needs it. An endpoint that waits for a request and can do nothing else
meanwhile is a *wait*. A wait that lasts sends a probe after its request, to every process that has not answered it. There the
request *stands* somewhere: an actor runs it, or it is queued behind an endpoint that the actor runs. If that endpoint waits,
too, the probe goes on to where the request that it waits for stands; if not, the probe ends there. A probe that arrives at the
wait that sent it has been around a cycle, and its path names every endpoint on the cycle.

Why there are no false alarms: a process passes a probe on only while the request is unanswered here, and the endpoint that
must end first waits. So when a probe has come around, each link of its path held when it passed. A link ends only by an
answer, which needs the next link to end before, and so on around to the wait that has just found itself still waiting: none
can have ended.

Why no deadlock is missed: a probe travels behind its request, on the same link. Of the waits on a cycle, one is the last to
send its probes, and by then all others wait. (If a probe is lost in a race, the next round of probes finds the cycle.)

A request that is answered through a port is owed by the holder of the port, and no process knows which that is: while its
endpoint runs, the request stands nowhere. Requests queued behind that endpoint do wait for it.

A wait with a timeout ends by itself, so it is part of no cycle and not known here.

A probe that runs into a cycle that it did not start from would go around forever. So a wait passes each probe on only once.

A caller that gets the error may wait for the same request again, because another endpoint on the cycle may give way. Such a
wait is known here at once, but sends its first probe a period later. Otherwise it would be the first to find the cycle each
time, and the other endpoints would never learn of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from monarch_kernel.net.wire.messages import Probe

__all__ = ["Cycle", "Deadlocks", "PassOn", "Standing", "describe_circle"]

_MAX_SEEN = 1 << 10
_MAX_STEPS = 16


class Standing(NamedTuple):
    """Where a request stands in the process that received it.

    Attributes:
        what: The endpoint that is called, and where.
        behind: The endpoint that has to end first; empty if the request runs.
        waits: The numbers of the waits of the endpoint that runs now; empty if it does not wait.
    """

    what: str
    behind: str
    waits: Sequence[int]


class PassOn(NamedTuple):
    """Effect: send a probe to the processes that have not answered."""

    procs: Sequence[int]
    probe: Probe


class Cycle(NamedTuple):
    """Effect: a wait can never end; ``path`` names the endpoints on the cycle, from the one that waits back to its actor."""

    wait: int
    path: tuple[tuple[str, str], ...]


class _Wait:
    """An endpoint that waits for a request; ``seen`` maps the wait that a probe came from to the last round passed on."""

    __slots__ = ("request", "round", "seen")

    def __init__(self, request: int) -> None:
        self.request = request
        self.round = 0
        self.seen: dict[int, int] = {}


class Deadlocks:
    """The waits of one process that have lasted for a while.

    Args:
        owing: Returns the processes that have not answered a request of this one.
    """

    def __init__(self, owing: Callable[[int], Sequence[int]]) -> None:
        self._owing = owing
        self._waits: dict[int, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def probe(self, wait: int, request: int, where: str) -> list[PassOn]:
        """Send probes for a wait that lasts; call this again from time to time.

        Args:
            wait: Its number, unique among all processes.
            request: The request that it waits for.
            where: The endpoint that waits, and where.
        """
        self.waits(wait, request)
        known = self._waits[wait]
        known.round += 1
        return self._pass_on(known, wait, known.round, ((where, ""),))

    def waits(self, wait: int, request: int) -> None:
        """Pass probes of others on at this wait."""
        known = self._waits.setdefault(wait, _Wait(request))
        known.request = request  # a wait for several requests takes them one after the other

    def ended(self, wait: int) -> None:
        """Forget a wait that is over."""
        self._waits.pop(wait, None)

    def handle(self, probe: Probe, standing: Standing | None) -> list[PassOn | Cycle]:
        """Handle a probe for a request; ``standing`` is None if the request does not stand here, or no longer."""
        if standing is None:
            return []
        path = (*probe.path, (standing.what, standing.behind))
        if probe.wait in standing.waits and probe.wait in self._waits:
            return [Cycle(probe.wait, path)]
        effects: list[PassOn | Cycle] = []
        for number in standing.waits:
            wait = self._waits.get(number)
            if wait is None or wait.seen.get(probe.wait, 0) >= probe.round:
                continue
            if len(wait.seen) >= _MAX_SEEN:
                wait.seen.clear()
            wait.seen[probe.wait] = probe.round
            effects += self._pass_on(wait, probe.wait, probe.round, path)
        return effects

    def _pass_on(self, wait: _Wait, origin: int, round: int, path: tuple[tuple[str, str], ...]) -> list[PassOn]:
        procs = self._owing(wait.request)
        return [PassOn(procs, Probe(origin, round, wait.request, path))] if procs else []


def describe_circle(path: Sequence[tuple[str, str]]) -> str:
    """Describe a cycle: ``a.f -> b.g -> a.h (behind a.f)``; leaves out the middle of a long one."""
    steps = [what if not behind else f"{what} (behind {behind})" for what, behind in path]
    if len(steps) > _MAX_STEPS:
        half = _MAX_STEPS // 2
        steps[half:-half] = [f"({len(steps) - 2 * half} more)"]
    return " -> ".join(steps)
