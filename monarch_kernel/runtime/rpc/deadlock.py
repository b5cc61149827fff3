"""Finds actors that wait for each other in a circle: no I/O, no threads, no clock.

Theory of operation
===================

Edge chasing, for requests that need all answers (Chandy, Misra and Haas, "Distributed Deadlock Detection", 1983, the AND
model). Nobody has the whole picture, and nobody needs it. An endpoint that waits for a request while it can do nothing else is
a *wait*. A wait that lasts sends a probe after its request, to every process that owes it an answer. There the request *stands*
somewhere: an actor runs it, or it is queued behind one that the actor runs. If that endpoint waits, too, the probe goes on, to
where the request stands that it waits for; if not, the probe ends there. A probe that comes to the wait which sent it has been
around a circle, and its path names all that is on it.

Why there are no false alarms: a process passes a probe on only while the request is unanswered here, and what must end first
waits. So when a probe has come around, each link of its path held when it passed. A link ends only by an answer, which needs
the next link to end before, and so on around to the wait that has just found itself still waiting: none can have ended.

Why none is missed: a probe travels behind its request, on the same link. Of the waits on a circle one is the last to send its
probes, and by then all others wait. (What loses its last chance in a race is found by the next round of probes.)

A request that is answered through a port is owed by whoever has the port, and who that is nobody knows: while its endpoint
runs it stands nowhere. What is queued behind that endpoint does wait for it.

A wait that ends by itself, since it was given a timeout, is part of no circle: it is not known here.

A probe that runs into a circle which it has not come from would go around for ever: a wait passes each probe on once.

Whoever is told may wait for the same again, for the others on the circle may give way. Such a wait is known here at once, and
sends its first probe a period later: else it would be the first to find the circle each time, and the others never learn of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from monarch_kernel.net.wire.messages import Probe

__all__ = ["Circle", "Deadlocks", "PassOn", "Standing", "describe_circle"]

_MAX_SEEN = 1 << 10
_MAX_STEPS = 16


class Standing(NamedTuple):
    """Where a request stands in the process that was asked.

    Attributes:
        what: the endpoint that is wanted, and where.
        behind: the endpoint that has to end first; empty if the request runs.
        waits: what the endpoint waits for that runs now, by the numbers of the waits; empty if it goes on.
    """

    what: str
    behind: str
    waits: Sequence[int]


class PassOn(NamedTuple):
    """Effect: send a probe to the processes that owe an answer."""

    procs: Sequence[int]
    probe: Probe


class Circle(NamedTuple):
    """Effect: a wait can never end; ``path`` names what is on the circle, from the endpoint that waits back to its actor."""

    wait: int
    path: tuple[tuple[str, str], ...]


class _Wait:
    """An endpoint that waits for a request; ``seen`` are the probes that it has passed on: wait they came from -> round."""

    __slots__ = ("request", "round", "seen")

    def __init__(self, request: int) -> None:
        self.request = request
        self.round = 0
        self.seen: dict[int, int] = {}


class Deadlocks:
    """What one process knows: its waits that have lasted for a while.

    Args:
        owing: gives the processes that have yet to answer a request of this one.
    """

    def __init__(self, owing: Callable[[int], Sequence[int]]) -> None:
        self._owing = owing
        self._waits: dict[int, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def probe(self, wait: int, request: int, where: str) -> list[PassOn]:
        """A wait lasts: send probes; to be called again from time to time.

        Args:
            wait: its number, which no other has, in whatever process.
            request: what it waits for.
            where: the endpoint that waits, and where.
        """
        self.waits(wait, request)
        known = self._waits[wait]
        known.round += 1
        return self._pass_on(known, wait, known.round, ((where, ""),))

    def waits(self, wait: int, request: int) -> None:
        """A wait is to pass on the probes of others."""
        known = self._waits.setdefault(wait, _Wait(request))
        known.request = request  # of several, one after the other

    def ended(self, wait: int) -> None:
        """A wait is over."""
        self._waits.pop(wait, None)

    def heard(self, probe: Probe, standing: Standing | None) -> list[PassOn | Circle]:
        """A probe has come for a request that stands here; None if it does not, or not any more."""
        if standing is None:
            return []
        path = (*probe.path, (standing.what, standing.behind))
        if probe.wait in standing.waits and probe.wait in self._waits:
            return [Circle(probe.wait, path)]
        effects: list[PassOn | Circle] = []
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
    """A circle in words: ``a.f -> b.g -> a.h (behind a.f)``; the middle of a long one is left out."""
    steps = [what if not behind else f"{what} (behind {behind})" for what, behind in path]
    if len(steps) > _MAX_STEPS:
        half = _MAX_STEPS // 2
        steps[half:-half] = [f"({len(steps) - 2 * half} more)"]
    return " -> ".join(steps)
