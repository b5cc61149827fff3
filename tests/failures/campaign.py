"""Random faults under a stream of calls and cells, or of transfers.

`python -m tests.failures.campaign` makes 200. After each fault, or two at the same time, the campaign heals the mesh, which
must be whole again: harmed ranks are replaced, and no others. At the end, all requests must have correct answers, each one
once, and nothing may be left behind.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import psutil
import pytest

from monarch_kernel import actor
from monarch_kernel.actor import ProcMesh, SupervisionError, shutdown_context
from tests.failures import parties as parties_module
from tests.failures import things as things_module
from tests.failures import traffic as traffic_module
from tests.failures.harm import UNTIL_LOST, Fault, Injuries, Surgeon
from tests.failures.machines import family
from tests.failures.report import Report
from tests.failures.supply import LocalSupply, RaySupply, Supply
from tests.failures.traffic import CALL_S, Traffic, answer
from tests.failures.transfers import TransferCampaign
from tests.support.leftovers import Snapshot, check_nothing_left
from tests.support.processes import is_alive
from tests.support.scratch import SCRATCH

__all__ = ["LOST_AFTER_S", "Campaign", "by_value"]

LOST_AFTER_S = 1.5
"""With 1 s, a host is sometimes lost by mistake when other programs keep the processors busy."""

BY_VALUE = (traffic_module, parties_module, things_module)
"""Modules that ranks cannot import."""

HOSTS, GPUS = 4, 2
SUPPLIES: dict[str, Callable[..., Supply]] = {"local": LocalSupply, "ray": RaySupply}
KNOWN_S = 20.0
HEAL_S = 90.0
END_S = 20.0


class Campaign:
    """Makes faults, one after the other, and checks the outcome.

    Args:
        supply: source of the hosts.
        seed: seed of all random choices.
        lost_after_s: silence after which a host is lost, as the hosts were requested with.
        say: called with a line for each step.
    """

    def __init__(
        self,
        supply: Supply,
        seed: int,
        lost_after_s: float = LOST_AFTER_S,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._say = say
        self._dice = random.Random(seed)
        self._injuries = Injuries()
        self.report = Report()
        self.mesh: ProcMesh = supply.hosts.spawn_procs({"gpus": GPUS}, device="cpu")
        self._supply = supply
        self._surgeon = Surgeon(self.mesh, supply, lost_after_s, self._dice)
        self._traffic = Traffic(self.mesh, self._injuries.excuse, seed)

    def run(self, faults: int) -> Report:
        """Make this many faults, under traffic."""
        report = self.report
        self._traffic.begin()
        try:
            while sum(report.kinds.values()) < faults:
                self.step(self._surgeon.some())
        finally:
            self._traffic.end()
        self._traffic.check()
        outcomes = self._traffic.outcomes
        report.values, report.errors = outcomes.values, outcomes.errors
        report.wrong += outcomes.wrong
        return report

    def step(self, faults: list[Fault]) -> None:
        """Make faults at the same time, then heal the mesh."""
        report, dice = self.report, self._dice
        lost = sorted(set().union(*(fault.lost for fault in faults)))
        number = sum(report.kinds.values()) + 1
        self._say(f"{number}: {' and '.join(f'{fault.kind} (host {fault.place})' for fault in faults)}")
        report.kinds.update(fault.kind for fault in faults)
        before = self.mesh.incarnations()
        doomed = self._doomed(faults)
        self._injuries.harmed(lost)
        started_at = time.monotonic()
        for fault in faults:
            fault.begin()
        for fault in sorted(faults, key=lambda fault: fault.for_s):
            if fault.for_s < UNTIL_LOST:
                time.sleep(max(0.0, started_at + fault.for_s - time.monotonic()))
                fault.end()
        known = self._until(lambda: set(self.mesh.deaths()) >= set(lost), KNOWN_S)
        if not known:
            report.wrong.append(f"{number}: of {lost}, only {sorted(self.mesh.deaths())} were reported as lost")
        report.known_s.append(time.monotonic() - started_at)
        is_late = dice.random() < 0.5  # they come back after others have taken their places
        if not is_late:
            for fault in faults:
                fault.end()
        started_at = time.monotonic()
        self._heal(number)
        for fault in faults:
            fault.end()
        self._check_whole(number)
        report.healed_s.append(time.monotonic() - started_at)
        after = self.mesh.incarnations()
        replaced = [rank for rank in self.mesh.ranks if after[rank] != before[rank]]
        report.lost += len(replaced)
        report.innocent += [f"{number}: rank {rank}" for rank in replaced if rank not in lost]
        report.wrong += [f"{number}: rank {rank} was not replaced" for rank in lost if rank not in replaced]
        self._traffic.check_outputs()
        self._injuries.healed()
        if not self._until(lambda: not any(map(is_alive, doomed)), END_S):
            report.left += [f"{number}: {_described(process)}" for process in doomed if is_alive(process)]

    def _doomed(self, faults: list[Fault]) -> list[psutil.Process]:
        """List the processes that must end: all of a lost host, or a rank and its children."""
        found: list[psutil.Process] = []
        rows = self.mesh.view().ranks
        for fault in faults:
            if len(fault.lost) == GPUS:
                found += family(self._supply.agent(fault.place).pid)
            else:
                found += [process for rank in fault.lost for process in family(rows[rank].pid)]
        return found

    def _heal(self, number: int) -> None:
        deadline = time.monotonic() + HEAL_S
        while True:
            try:
                self.mesh.heal().get(HEAL_S)
                return
            except SupervisionError as error:  # another rank died meanwhile
                if time.monotonic() > deadline:
                    raise AssertionError(f"{number}: the mesh can't be healed") from error
                self._say(f"{number}: healing again after {error}")

    def _check_whole(self, number: int) -> None:
        try:
            found = self._traffic.workers.take.call("checks", number).get(CALL_S).values()
        except SupervisionError as error:
            self.report.wrong.append(f"{number}: the mesh is not whole after heal(): {error}")
            self._heal(number)
            return
        with self._traffic.outcomes.lock:
            for rank, each in enumerate(found):
                self._traffic.outcomes.took("checks", rank, number, each)
        assert [value for _, value in found] == [answer(rank, number) for rank in self.mesh.ranks]

    @staticmethod
    def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


@contextmanager
def by_value() -> Iterator[None]:
    """Send the classes of the traffic by value, and ignore unhandled failures."""
    for module in BY_VALUE:
        cloudpickle.register_pickle_by_value(module)
    hook, actor.unhandled_fault_hook = actor.unhandled_fault_hook, lambda failure: None
    try:
        yield
    finally:
        actor.unhandled_fault_hook = hook
        for module in BY_VALUE:
            cloudpickle.unregister_pickle_by_value(module)


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"{process.pid}"


def _with_faults(directory: Path, options: argparse.Namespace, say: Callable[[str], object]) -> Report:
    supply = SUPPLIES[options.on](directory, HOSTS, lost_after_s=options.lost_after)
    try:
        return Campaign(supply, options.seed, options.lost_after, say).run(options.unhandled)
    finally:
        shutdown_context().get()
        supply.close()


def _with_transfers(directory: Path, options: argparse.Namespace, say: Callable[[str], object]) -> Report:
    campaign = TransferCampaign(directory, options.seed, say=say)
    try:
        return campaign.run(options.transfers)
    finally:
        shutdown_context().get()
        campaign.close()


def main() -> None:
    """Read the command line, run the campaign, and print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.failures.campaign", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument(
        "--transfers", type=int, help="make this many transfers of memory instead, and kill ranks during them"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--on", choices=SUPPLIES, default="local", help="source of the hosts; ray is a cluster of five nodes"
    )
    parser.add_argument(
        "--lost-after", type=float, default=LOST_AFTER_S, help="seconds of silence after which a host is lost"
    )
    parser.add_argument("--quiet", action="store_true", help="print no line for each fault")
    options = parser.parse_args()
    before = Snapshot()
    report = Report()
    started_at = time.monotonic()
    say = (
        (lambda line: None)
        if options.quiet
        else lambda line: print(f"{time.monotonic() - started_at:6.1f} s  {line}", flush=True)
    )
    with by_value(), tempfile.TemporaryDirectory() as directory:
        try:
            if options.transfers:
                report = _with_transfers(Path(directory), options, say)
            else:
                report = _with_faults(Path(directory), options, say)
        finally:
            try:
                check_nothing_left(before)
            except pytest.fail.Exception as left:
                report.left += str(left).splitlines()[1:]
            shutil.rmtree(SCRATCH, ignore_errors=True)
    print(report.text())
    print(f"seed {options.seed}, {time.monotonic() - started_at:.0f} s")
    sys.exit(not report.is_good)


if __name__ == "__main__":
    main()
