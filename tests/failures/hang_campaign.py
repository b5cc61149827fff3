"""Random hangs, and interrupts at random moments, in a notebook with one mesh of four ranks.

`python -m tests.failures.hang_campaign` makes 200 hangs: the cell must say unasked which ranks wait in what, and where the
missing ones are; an interrupt must free all ranks, and say the same; and the next cell must have the right values. With
``--interrupts`` it interrupts 200 random cells at random moments instead.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.failures.hang_texts import Verdict, judge
from tests.failures.hangs import KINDS, Hang, N, draw
from tests.notebook.kernel.conftest import Cell, Notebook

__all__ = ["UP", "HangCampaign", "InterruptCampaign", "Report"]

SAYS_WITHIN_S = 8.0
FREE_WITHIN_S = 2.0
GIVE_UP_S = 10.0
NEXT_S = 30.0
UP = f"%mesh up t -n {N} --device cpu"
IMPORTS = """%%remote t
import torch, torch.distributed as dist, torch.distributed.tensor
from torch.distributed.fsdp import fully_shard
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
"""
NEXT = """%%remote t
import torch, torch.distributed as dist
x = torch.ones(1) * (rank + 1); dist.all_reduce(x)
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
y = torch.ones(1) * (rank + 1); dist.all_reduce(y, group=pairs[rank // 2])
dist.destroy_process_group(pairs[rank // 2])
print(int(x.item()), int(y.item()), rank)
"""
VALUES = {rank: [f"10 {3 if rank < 2 else 7} {rank}"] for rank in range(N)}


@dataclass
class Report:
    """What came of a campaign.

    Attributes:
        total: number of hangs or interrupts.
        right: those that were named completely, and without a mistake; for interrupts, those after which all was right.
        incomplete: the others without a false statement, each with its seed.
        wrong: those with a false statement.
        not_freed: those after which ranks did not stop in time.
        next_wrong: those after which the next cell had wrong values, or did not end.
        freed_s: seconds from the interrupt until the cell ended.
    """

    total: int = 0
    right: int = 0
    incomplete: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    not_freed: list[str] = field(default_factory=list)
    next_wrong: list[str] = field(default_factory=list)
    freed_s: list[float] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong, all ranks were freed, and at least 97.5 % were named completely."""
        return self.right >= 0.975 * self.total and not (self.wrong or self.not_freed or self.next_wrong)

    def text(self) -> str:
        """Format the report as a table, followed by what failed."""
        rows = (
            ("right", self.right),
            ("named incompletely", len(self.incomplete)),
            ("named wrong", len(self.wrong)),
            ("not freed", len(self.not_freed)),
            ("next cell wrong", len(self.next_wrong)),
            ("in all", self.total),
        )
        lines = [f"{what:<20}{count:>6}" for what, count in rows]
        if self.freed_s:
            times = sorted(self.freed_s)
            lines.append(f"freed after {times[len(times) // 2]:.2f} s (median), {times[-1]:.2f} s (longest)")
        for title in ("incomplete", "wrong", "not_freed", "next_wrong"):
            lines += [f"{title.replace('_', ' ')}: {each}" for each in getattr(self, title)]
        return "\n".join(lines)


class _OnNotebook:
    """What both campaigns do with a notebook.

    Args:
        notebook: a kernel that has no mesh ``t``, or one of four ranks.
        say: called with a line for each step.
        free_within_s: ranks that stop later than this after an interrupt count as not freed.
    """

    def __init__(
        self,
        notebook: Notebook,
        say: Callable[[str], object] = lambda line: None,
        free_within_s: float = FREE_WITHIN_S,
    ) -> None:
        self.notebook = notebook
        self._free_within_s = free_within_s
        self.report = Report()
        self._say = say
        if not notebook.value("'t' in globals()"):
            notebook.ok(UP)
        self._warm_up()

    def _warm_up(self) -> None:
        self.notebook.ok("import torch, torch.distributed", 120)  # for cells that run in the kernel
        self.notebook.ok(IMPORTS, 120)
        self.next("warm-up")

    def next(self, title: str) -> bool:
        """Run the next cell; return whether it has the right values."""
        cell = self.notebook.send(NEXT)
        ended = cell.has_ended(NEXT_S)
        if ended and cell.ok and cell.lines() == VALUES:
            return True
        self.report.next_wrong.append(f"{title}: {'' if ended else 'it does not end; '}{cell.text[-1500:]}")
        self._repair(cell)
        return False

    def _repair(self, cell: Cell) -> None:
        """Replace all ranks."""
        self._stop(cell)
        self.notebook.run("%mesh down t", 60)
        self.notebook.ok(UP, 60)
        self.notebook.ok(IMPORTS, 120)

    def _interrupt(self, cell: Cell, title: str) -> tuple[bool, float]:
        """Interrupt a cell once; return whether that freed the ranks in time, and after how many seconds it has ended."""
        started = time.monotonic()
        self.notebook.interrupt()
        ended = cell.has_ended(GIVE_UP_S)
        took_s = time.monotonic() - started
        self.report.freed_s.append(took_s)
        is_freed = ended and took_s <= self._free_within_s and "did not stop" not in cell.evalue
        if not is_freed:
            self.report.not_freed.append(f"{title}: after {took_s:.1f} s: {cell.evalue}")
            if not ended:
                self._stop(cell)
        return is_freed, took_s

    def _stop(self, cell: Cell) -> float:
        """Interrupt a cell until it ends; return how long that took, in seconds."""
        started = time.monotonic()
        while not cell.has_ended(GIVE_UP_S):
            self.notebook.interrupt()
            if time.monotonic() > started + 6 * GIVE_UP_S:
                raise RuntimeError(f"the cell can't be stopped: {cell.so_far}")
        return time.monotonic() - started


class HangCampaign(_OnNotebook):
    """Makes hangs, one after the other."""

    def step(self, hang: Hang) -> None:
        """Make a hang, and check what the product says and does."""
        report, notebook = self.report, self.notebook
        report.total += 1
        cell = notebook.send(hang.code)
        deadline = time.monotonic() + SAYS_WITHIN_S
        unasked = judge(hang, "")
        while time.monotonic() < deadline and not cell.reply:
            notebook.pump(0.05)
            if not (unasked := judge(hang, cell.stderr)).lacks:
                break
        if cell.reply:
            self._say(f"{hang.title}: it has ended by itself\n{hang.code}\n{cell.text}")
            report.wrong.append(f"{hang.title}: it has ended by itself: {cell.text[-1500:]}")
            return
        is_freed, took_s = self._interrupt(cell, hang.title)
        asked = judge(hang, cell.evalue)
        is_right = self._file(hang, unasked, asked, cell)
        is_next_right = self.next(hang.title)
        outcome = "right" if is_right else "NOT RIGHT"
        self._say(
            f"{hang.title}: {outcome}{'' if is_freed else ', NOT FREED'}, ended after {took_s:.2f} s"
            f"{'' if is_next_right else ', NEXT CELL WRONG'}"
        )
        if not (is_right and is_freed and is_next_right):
            self._say(f"{hang.code}\n{cell.text}")
        notebook.forget()

    def _file(self, hang: Hang, unasked: Verdict, asked: Verdict, cell: Cell) -> bool:
        wrong, lacks = unasked.wrong + asked.wrong, unasked.lacks + [f"(interrupt) {each}" for each in asked.lacks]
        text = "; ".join(wrong or lacks)
        if wrong:
            self.report.wrong.append(f"{hang.title}: {text}")
        elif lacks:
            self.report.incomplete.append(f"{hang.title}: lacks {text}")
        else:
            self.report.right += 1
        return not (wrong or lacks)


CELLS = (
    "for i in range(2000): dist.all_reduce(x)",
    "for i in range(500): dist.all_gather_object([None] * 4, i)",
    "for i in range(50): g = dist.new_group([0, 1, 2, 3]); dist.barrier(group=g)",
    "for i in range(20): m = dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('a', 'b')); dist.barrier()",
    "for i in range(20): dist.destroy_process_group(); dist.init_process_group('gloo'); dist.all_reduce(x)",
    "if rank: dist.all_reduce(x)",
    "if rank == 2: dist.recv(x, 1, tag=3)",
    "for i in range(2000): dist.send(x, (rank + 1) % 4) if rank % 2 else dist.recv(x, (rank - 1) % 4)",
    "for i in range(300): [w.wait() for w in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, (rank + 1) % 4), "
    "dist.P2POp(dist.irecv, x, (rank - 1) % 4)])]",
    "for i in range(2000): dist.send(x, (rank + 1) % 4) if rank % 2 else dist.recv(x)",
    "if rank: dist.recv(x)",
    "for i in range(300): dist.monitored_barrier()",
    "time.sleep(rank); dist.barrier()",
    "while True: pass",
    "store = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False); store.wait(['none'])",
    "dist.TCPStore('127.0.0.1', 1, None, False)",
    "m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))\n"
    "for i in range(1000): m(torch.randn(2, 4)).sum().backward()",
    "m = fully_shard(torch.nn.Linear(4, 4), mesh=dist.init_device_mesh('cpu', (4,)))\n"
    "for i in range(1000): m(torch.randn(2, 4)).sum().backward()",
    "for i in range(100000): print(i, rank)",
    "for step in live.loop(3000): live.log(loss=1.0 / (step + 1)); dist.all_reduce(x)",
    "import subprocess; subprocess.run(['sleep', '60'])",
    "a = torch.randn(300, 300)\nwhile True: a = (a @ a).softmax(0)",
    "import threading; meet = threading.Thread(target=lambda: dist.barrier()); rank and (meet.start(), meet.join())",
    "works = [dist.all_reduce(x, async_op=True) for _ in range(500)]\nfor each in works: each.wait()",
    "from torch.distributed.pipelining import PipelineStage, Schedule1F1B\n"
    "stage = PipelineStage(torch.nn.Linear(4, 4), rank, 4, torch.device('cpu'))\n"
    "schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss); batch = torch.ones(4, 4)\n"
    "for i in range(500): schedule.step(*(batch,) if rank == 0 else (), **dict(target=batch) if rank == 3 else {})",
    "x + 1",
    "raise ValueError(rank) if rank == 1 else dist.barrier()",
)
"""Cells that last, or hang, or just end."""

_OF_LIBRARIES = re.compile(r"/(ipykernel|IPython|monarch_kernel)/\w")
"""Matches a frame that is not the user's, and not torch's."""

HEAD = "%%remote t{part}\nimport time, torch, torch.distributed as dist; x = torch.ones(4)\n"
MOST_S = 0.5


class InterruptCampaign(_OnNotebook):
    """Interrupts random cells at random moments."""

    def step(self, seed: int) -> None:
        """Interrupt a cell, and check that the next one is right."""
        report, notebook = self.report, self.notebook
        dice = random.Random(seed)
        body = dice.choice(CELLS)
        part = dice.choice(("", "", "", "[0:2]", "[1]"))
        after_s = dice.uniform(0, MOST_S)
        title = f"seed {seed}: after {after_s * 1000:.0f} ms on t{part}: {body.splitlines()[0][:70]}"
        report.total += 1
        cell = notebook.send(HEAD.format(part=part) + body).wait_for(lambda cell: cell.has_started)
        moment = time.monotonic() + after_s
        while (left_s := moment - time.monotonic()) > 0:
            notebook.pump(min(left_s, 0.02))
        is_freed, took_s = self._interrupt(cell, title)
        if of_libraries := _OF_LIBRARIES.search(cell.text):
            report.wrong.append(f"{title}: it shows a frame of {of_libraries[1]}: {cell.text[-1500:]}")
        is_right = self.next(title)
        report.right += is_freed and is_right and not of_libraries
        self._say(f"{title}: {'' if is_freed else 'NOT FREED, '}{'' if is_right else 'NEXT WRONG, '}{took_s:.2f} s")
        if not (is_freed and is_right):
            self._say(cell.text[-3000:])
        notebook.forget()


def main() -> None:
    """Read the command line, run the campaign, and print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.failures.hang_campaign", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--number", type=int, default=200, help="number of hangs, or of interrupts")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", choices=KINDS, default="", help="make hangs of this kind only")
    parser.add_argument("--interrupts", action="store_true", help="interrupt random cells at random moments")
    parser.add_argument("--quiet", action="store_true", help="print no line for each step")
    options = parser.parse_args()
    started_at = time.monotonic()

    def say(line: str) -> None:
        if not options.quiet:
            print(f"{time.monotonic() - started_at:6.1f} s  {line}", flush=True)

    notebook = Notebook()
    campaign: HangCampaign | InterruptCampaign | None = None
    try:
        seeds = range(options.seed, options.seed + options.number)
        if options.interrupts:
            interrupts = campaign = InterruptCampaign(notebook, say)
            for seed in seeds:
                interrupts.step(seed)
        else:
            hangs = campaign = HangCampaign(notebook, say)
            for seed in seeds:
                hangs.step(draw(seed, options.kind))
    finally:
        if campaign is not None:
            print(campaign.report.text(), flush=True)
        notebook.close()
    print(f"seeds {seeds[0]} to {seeds[-1]}, {time.monotonic() - started_at:.0f} s")
    sys.exit(not campaign.report.is_good)


if __name__ == "__main__":
    main()
