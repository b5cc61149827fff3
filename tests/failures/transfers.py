"""Random transfers, while random kills hit their owners and carriers.

Run it with `python -m tests.failures.campaign --transfers 10000`.

Each transfer must find, or leave, every byte as expected, also between and around the elements. Otherwise it must be refused
because the memory was dropped or its owner was killed. At the end, processes that were not harmed may hold nothing more.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import psutil

from monarch_kernel.actor import ProcMesh, this_host, this_proc
from tests.failures.exchange import Doom, Exchange, Place
from tests.failures.harm import Injuries
from tests.failures.machines import APART, Machines, can_be_apart, family, hosts_on
from tests.failures.report import Report
from tests.failures.traffic import CALL_S
from tests.support.waiting import wait_until

__all__ = ["TransferCampaign"]

RANKS = 3
KNOWN_S = 20.0
HEAL_S = 60.0
SETTLED_S = 10.0


class TransferCampaign:
    """Transfers between two meshes and the program, with kills; ranks of one mesh do not see those of the other.

    Args:
        directory: directory for the files of agents.
        seed: seed of all random choices.
        say: called with a line for each kill.
    """

    def __init__(
        self,
        directory: Path,
        seed: int,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._say = say
        self.report = Report()
        self._machines = Machines(directory, within=APART if can_be_apart() else ())
        far = hosts_on(self._machines, 1)
        self.meshes: list[ProcMesh] = [this_host().spawn_procs({"gpus": RANKS}), far.spawn_procs({"gpus": RANKS})]
        for mesh in self.meshes:
            mesh.initialized.get(CALL_S)
        self._injuries = Injuries()
        self._exchange = Exchange([*self.meshes, this_proc()], self._injuries, seed)

    def run(self, transfers: int) -> Report:
        """Make at least this many transfers."""
        report, exchange = self.report, self._exchange
        before = self._tallies()
        started_at = time.monotonic()
        exchange.begin()
        try:
            while exchange.transfers < transfers:
                with suppress(Empty):
                    self._kill(exchange.dooms.get(timeout=0.05))
        finally:
            exchange.end()
        seconds = time.monotonic() - started_at
        report.transfers = exchange.counts
        report.figures += [f"{exchange.nbytes / 1e9:.1f} GB carried in {seconds:.0f} s"]
        report.values, report.errors = exchange.outcomes.values, exchange.outcomes.errors
        report.wrong += exchange.outcomes.wrong
        report.left += self._left(before)
        return report

    def close(self) -> None:
        """End what the session does not end."""
        self._machines.close(5.0)

    def _kill(self, doom: Doom) -> None:
        """Kill a rank while it works, and replace it."""
        place, report = doom.place, self.report
        number = sum(report.kinds.values()) + 1
        lives = place.mesh.incarnations()
        pid = self._pid(place)
        time.sleep(doom.delay_s)
        started_at = time.monotonic()
        self._injuries.harmed([place.number])
        place.kills += 1
        os.kill(pid, signal.SIGKILL)
        self._say(f"{number}: place {place.number} is killed after {self._exchange.transfers} transfers")
        report.kinds["a rank is killed"] += 1
        wait_until(lambda: place.rank in place.mesh.deaths(), "the news of the death", KNOWN_S)
        place.deaths += 1
        report.known_s.append(time.monotonic() - started_at)
        started_at = time.monotonic()
        place.mesh.heal().get(HEAL_S)
        report.healed_s.append(time.monotonic() - started_at)
        after = place.mesh.incarnations()
        replaced = [rank for rank in place.mesh.ranks if after[rank] != lives[rank]]
        report.lost += len(replaced)
        report.innocent += [f"{number}: rank {rank}" for rank in replaced if rank != place.rank]
        self._injuries.healed()

    def _pid(self, place: Place) -> int:
        """Give the pid of a rank in this process's namespace; the rank may see another one."""
        pid = place.mesh.view().ranks[place.rank].pid
        if place.mesh is self.meshes[0]:
            return pid
        (found,) = (each.pid for each in family(self._machines.pid(0)) if _pid_inside(each) == pid)
        return found

    def _tallies(self) -> dict[int, dict[str, int]]:
        """Let all places exchange memory, then count what each spared one holds."""
        for place in self._exchange.places:
            for party in place.parties:
                for other in self._exchange.places:
                    buffer = other.parties[0].lend.call_one("met", _MET, _HELD).get(CALL_S)
                    party.carry.call_one([(buffer, _MET, _HELD, False)], "in turn").get(CALL_S)
                    party.drop.call_one(buffer).get(CALL_S)
        found = [(place, place.parties[0].tally.call_one().get(CALL_S)) for place in self._exchange.places]
        return {place.number: tally for place, tally in found if place.is_spared}

    def _left(self, before: dict[int, dict[str, int]]) -> list[str]:
        """List what spared processes hold beyond what they held before."""
        for place in self._exchange.places:
            if place.rank == 1:  # a process that connects to others again notices which of its earlier peers have ended
                self._kill(Doom(place, 0.0))
        deadline = time.monotonic() + SETTLED_S
        while True:
            left = []
            for number, now in self._tallies().items():
                more = Counter(now) - Counter(before[number])
                left += [f"in place {number}: {count} {what} more" for what, count in sorted(more.items())]
            if not left or time.monotonic() > deadline:
                return left


# Strided, so that the reader asks the owner for it; and so large that ZeroMQ starts a thread for it, once in a process.
_MET: Any = ("array", "uint8", (1 << 17,), (7,), 0, 7 << 17)
_HELD = [(0, 0, 1 << 17)]


def _pid_inside(process: psutil.Process) -> int:
    """Give the pid of a process in its innermost namespace; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    (found,) = (line.split()[-1] for line in lines if line.startswith("NSpid:"))
    return int(found)
