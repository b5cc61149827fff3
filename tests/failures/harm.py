"""Faults of ranks, agents, connections and nodes, and the ranks that each fault loses."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from monarch_kernel.actor import ProcMesh
from tests.failures.supply import Supply
from tests.support.processes import command_of, is_alive
from tests.support.waiting import wait_until

__all__ = ["Fault", "Injuries", "Surgeon"]

UNTIL_LOST = float("inf")
# Pairs of faults where the first would end the second, or where no process would be left on the host to clean up after both.
_CLASHES = (
    {"an agent is stopped for a moment", "an agent is stopped for long"},
    {"a connection is cut for a moment", "a connection is cut for long"},
    {"a zygote is killed", "an agent is killed"},
    {"a zygote is killed", "an agent is stopped for long"},
)


@dataclass(frozen=True)
class Fault:
    """A fault of a host, or of one of its ranks.

    Attributes:
        kind: the fault, in words.
        place: number of the host.
        lost: ranks that the fault loses.
        begin: makes the fault.
        end: undoes the fault where possible; calling it again does no harm.
        for_s: seconds until `end`; `UNTIL_LOST` waits until the controller has lost the ranks.
    """

    kind: str
    place: int
    lost: frozenset[int]
    begin: Callable[[], object]
    end: Callable[[], object] = lambda: None
    for_s: float = 0.0


class Injuries:
    """When each rank was harmed, which may excuse a missing answer."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._healed_at: dict[int, float] = {}
        self._lock = threading.Lock()

    def harmed(self, ranks: Iterable[int]) -> None:
        with self._lock:
            self._open |= set(ranks)

    def healed(self) -> None:
        """Mark all ranks as healed."""
        with self._lock:
            self._healed_at |= dict.fromkeys(self._open, time.monotonic())
            self._open.clear()

    def excuse(self, rank: int, since: float) -> bool:
        """Whether a rank was harmed, and not yet healed, at any time since then."""
        with self._lock:
            return rank in self._open or self._healed_at.get(rank, 0.0) >= since


@dataclass
class Surgeon:
    """Makes faults.

    Attributes:
        mesh: the mesh to harm, with the axes ``hosts`` and ``gpus``.
        supply: source of its hosts.
        lost_after_s: silence after which a host is lost.
        dice: source of the random choices.
    """

    mesh: ProcMesh
    supply: Supply
    lost_after_s: float
    dice: random.Random
    kinds: dict[str, Callable[[int], Fault]] = field(init=False)

    def __post_init__(self) -> None:
        self.kinds = {
            "a rank is killed": self._kill_rank,
            "a rank is stopped": self._stop_rank,
            "an agent is killed": self._kill_agent,
            "an agent is stopped for a moment": self._stop_agent_shortly,
            "an agent is stopped for long": self._stop_agent,
            "a zygote is killed": self._kill_zygote,
        }
        if self.supply.has_links:
            self.kinds |= {
                "a connection breaks": self._reset,
                "a connection is cut for a moment": self._cut_shortly,
                "a connection is cut for long": self._cut,
            }
        if self.supply.has_nodes:
            self.kinds |= {"a node of the engine dies": self._kill_node}

    def some(self, kinds: Iterable[str] = ()) -> list[Fault]:
        """Choose one fault, or two at the same time, perhaps on the same host."""
        chosen = list(kinds) or [self.dice.choice(list(self.kinds)) for _ in range(self.dice.choice((1, 1, 2)))]
        places = [self.dice.randrange(self.mesh.extent["hosts"]) for _ in chosen]
        if any(set(chosen) <= group and len(chosen) > 1 for group in _CLASHES) and len(set(places)) == 1:
            places[0] = (places[1] + 1) % self.mesh.extent["hosts"]
        return [self.kinds[kind](place) for kind, place in zip(chosen, places)]

    # -- one method for each kind

    def _ranks(self, place: int) -> list[int]:
        gpus = self.mesh.extent["gpus"]
        return list(range(place * gpus, (place + 1) * gpus))

    def _a_rank(self, place: int) -> tuple[int, psutil.Process]:
        rank = self.dice.choice(self._ranks(place))
        return rank, psutil.Process(self.mesh.view().ranks[rank].pid)

    def _shortly_s(self) -> float:
        return self.lost_after_s * self.dice.uniform(0.05, 0.4)

    def _kill_rank(self, place: int) -> Fault:
        rank, process = self._a_rank(place)
        return Fault("a rank is killed", place, frozenset({rank}), _signaller(process, signal.SIGKILL))

    def _stop_rank(self, place: int) -> Fault:
        _, process = self._a_rank(place)
        for_s = self.lost_after_s * self.dice.uniform(0.1, 1.5)
        return self._stopped("a rank is stopped", place, process, (), for_s)

    def _kill_agent(self, place: int) -> Fault:
        agent = self.supply.agent(place)

        def kill() -> None:
            """Kill it when it has a zygote, which ends what ranks have started: a fault may have killed the last one."""
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                wait_until(lambda: self._zygotes(agent), "a zygote of the agent")
                agent.kill()

        return Fault("an agent is killed", place, frozenset(self._ranks(place)), kill)

    def _stop_agent_shortly(self, place: int) -> Fault:
        agent = self.supply.agent(place)
        return self._stopped("an agent is stopped for a moment", place, agent, (), self._shortly_s())

    def _stop_agent(self, place: int) -> Fault:
        agent = self.supply.agent(place)
        return self._stopped("an agent is stopped for long", place, agent, self._ranks(place), UNTIL_LOST)

    def _kill_zygote(self, place: int) -> Fault:
        kill = [_signaller(zygote, signal.SIGKILL) for zygote in self._zygotes(self.supply.agent(place))]
        return Fault("a zygote is killed", place, frozenset(), lambda: [each() for each in kill])

    def _zygotes(self, agent: psutil.Process) -> list[psutil.Process]:
        ranks = {row.pid for row in self.mesh.view().ranks}
        children = [child for child in agent.children() if child.pid not in ranks and is_alive(child)]
        return [child for child in children if command_of(child)[-2:-1] == ["zygote"]]

    def _reset(self, place: int) -> Fault:
        return Fault("a connection breaks", place, frozenset(), self.supply.link(place).reset)

    def _cut_shortly(self, place: int) -> Fault:
        link = self.supply.link(place)
        return Fault("a connection is cut for a moment", place, frozenset(), link.cut, link.restore, self._shortly_s())

    def _cut(self, place: int) -> Fault:
        link = self.supply.link(place)
        lost = frozenset(self._ranks(place))
        return Fault("a connection is cut for long", place, lost, link.cut, link.restore, UNTIL_LOST)

    def _kill_node(self, place: int) -> Fault:
        lost = frozenset(self._ranks(place))
        return Fault("a node of the engine dies", place, lost, lambda: self.supply.kill_node(place))

    def _stopped(self, kind: str, place: int, process: psutil.Process, lost: Iterable[int], for_s: float) -> Fault:
        stop, go_on = _signaller(process, signal.SIGSTOP), _signaller(process, signal.SIGCONT)
        return Fault(kind, place, frozenset(lost), stop, go_on, for_s)


def _signaller(process: psutil.Process, signum: signal.Signals) -> Callable[[], None]:
    """Give a function that signals a process, as long as its pid still belongs to it."""

    def send() -> None:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.send_signal(signum)

    return send
