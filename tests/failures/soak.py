"""A soak: a notebook with a mesh of four ranks that is used and harmed for an hour, and the count of what is lost or leaks.

`python -m tests.failures.soak` makes rounds until the time is over. In random order, each kind as often as the others:

- ``cells``: cells with known values.
- ``interrupts``: random cells are interrupted at random moments (`InterruptCampaign`).
- ``kills``: ranks are killed, or ended by SIGTERM or SIGHUP, under traffic, and the mesh is healed.
- ``pools``: pools, processes that are terminated, and workers of loaders, in all ranks.
- ``meshes``: a second mesh is brought up, used and ended.
- ``floods of output`` and ``floods of results``: ranks print and return far more than is shown or kept.
- ``killed kernels``: another kernel is killed by SIGKILL while its mesh works; nothing of it may stay.
- ``full /dev/shm``: a kernel in a mount namespace whose ``/dev/shm`` is small and full.
- ``few descriptors``: a kernel that may open few files, whose ranks open all that they may.
- ``faults``: random faults of hosts and ranks under a stream of calls (`Campaign`), with ``--faults``.

A kind that the machine does not allow, such as the mount, is named in the report. An hour has at least 1,000 cells.

Each round must end, and the cell after it must be right. After each round, the processes of the notebook are counted, with
their descriptors, threads, memory files and memory. What grows for good is a leak.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from monarch_kernel.actor import shutdown_context
from tests.failures.campaign import LOST_AFTER_S, Campaign, by_value
from tests.failures.hang_campaign import GIVE_UP_S, HEAD, InterruptCampaign
from tests.failures.hangs import N
from tests.failures.holdings import KINDS, Held, grown, held_by, per_round, roles_of
from tests.failures.supply import LocalSupply
from tests.notebook.kernel.conftest import Notebook, sessions_left
from tests.support.leftovers import Snapshot, check_nothing_left
from tests.support.processes import is_alive
from tests.support.scratch import SCRATCH

__all__ = ["Soak", "SoakReport", "can_fill_shared_memory"]

CELLS_OF_A_ROUND = 25
INTERRUPTS_OF_A_ROUND = 3
FAULTS_OF_A_ROUND = 4
ROUND_S = 60.0
"""Far longer than any step of a round takes."""

SETTLES_S = 6.0
"""Longer than threads stay that end on their own: those of destroyed groups and those that measure durations."""

MEMORY_PER_ROUND = 32 << 10
"""Bytes that a process may grow from round to round, in the median of the last half of the rounds."""

ROUNDS_FOR_MEMORY = 100
"""Rounds in that half, before growth of memory differs from noise: the memory of a rank grows until it has formed its process
group again for about 15 times, since the threads of gloo use other arenas of the allocator each time."""

CELLS_OF_AN_HOUR = 1_000
"""The least number of cells in a soak of an hour or more."""

ENDINGS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
"""The signals of which one ends ranks in a round of kills."""

OUTPUT_SHOWN = 1 << 20
"""More output of one cell than any notebook should get, in characters."""

DESCRIPTORS = 160
FULL = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=1m soak /dev/shm && head -c 1m /dev/zero >/dev/shm/full; [ -s /dev/shm/full ] && exec "$@"',
    "sh",
)
FEW = ("sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh")

LASTING = (
    "while True: dist.all_reduce(x)",
    "while True: dist.all_gather_object([None] * 4, x)",
    "i = 0\nwhile True: print(i, rank); i += 1; dist.barrier()",
    "while True: torch.randn(300, 300).softmax(0)",
    "for step in live.loop(): live.log(loss=1.0 / (step + 1)); dist.all_reduce(x)",
)
"""Cells that end only when a rank dies, or when they are interrupted."""

FORGETS = """%%remote t
import contextlib, ctypes, gc, sys
import torch.distributed as dist
for group in [each for each in dist.distributed_c10d._world.pg_map if each is not dist.group.WORLD]:
    with contextlib.suppress(Exception): dist.destroy_process_group(group)  # an interrupt may have hit torch while it made one
names = "group a g i m n store x pairs y step held works each meet stage schedule batch"
for name in names.split(): globals().pop(name, None)
sys.last_value = sys.last_traceback = sys.last_type = sys.last_exc = None
_ = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
_ = gc.collect()
_ = ctypes.CDLL(None).malloc_trim(0)
"""
"""Frees what the cells of a round have left in the namespaces of ranks, and the groups that they have made.

It makes the server of a store, because libuv keeps a pipe in each process that has had one. It gives freed memory back, which
glibc keeps in the arena of each thread: 9 of 12 MiB after 30 rounds of interrupts.
"""

COUNTS = """%%remote {mesh}
import torch, torch.distributed as dist
x = torch.ones(1); dist.all_reduce(x); int(x)
"""
RESULTS = "[t.run('import torch; torch.full((1_000_000,), float(rank))').get(60).values() for _ in range(5)]"
WORKERS = """%%remote t
import torch
class Squares(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.full((100_000,), float(i * i))
try:
    n = len(list(torch.utils.data.DataLoader(Squares(), num_workers=2, batch_size=8)))
except (RuntimeError, OSError) as error:
    print("refused:", "shm" in str(error) or "shared memory" in str(error) or "space" in str(error) or error)
else:
    print(n)
"""
POOLS = """%%remote t
import concurrent.futures as futures, multiprocessing as mp, time, torch
def square(x): return x * x
class Squares(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return i * i
for turn in range(3):
    with mp.Pool(2) as pool: assert pool.map(square, range(4)) == [0, 1, 4, 9]
    process = mp.Process(target=time.sleep, args=(600,)); process.start(); process.terminate(); process.join()
    assert process.exitcode == -15, process.exitcode
    with futures.ProcessPoolExecutor(2, mp_context=mp.get_context("fork")) as pool: assert list(pool.map(square, [3])) == [9]
    assert [int(each) for each in torch.utils.data.DataLoader(Squares(), num_workers=2, batch_size=1)] == [0, 1, 4, 9]
process = pool = None
"pools end"
"""
LARGE = "[float(each.sum()) for each in t.run('torch.full((4_000_000,), float(rank))').get(60).values()]"
THREADS = """%%remote t
import os, sys, threading, traceback
frames = sys._current_frames()
for thread in threading.enumerate():
    print(thread.name, thread.native_id, *traceback.format_stack(frames[thread.ident])[-3:], sep="\\n")
names = [open(f"/proc/self/task/{each}/comm").read().strip() + " " + each for each in os.listdir("/proc/self/task")]
print(*names, sep=", ")
files = ["/proc/self/fd/" + each for each in os.listdir("/proc/self/fd")]
print(*[os.readlink(each) for each in files if os.path.lexists(each)])
"""
"""Prints the threads of each rank, those of Python with their innermost frames, and the open descriptors."""

OPENS = """%%remote t
import os
held = []
try:
    while True: held.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    print("refused:", error.strerror)
finally:
    while held: os.close(held.pop())
"""


@dataclass
class SoakReport:
    """What a soak did, and what was wrong.

    Attributes:
        rounds: how often each kind of round was made.
        counts: how often each thing was done: cells, interrupts, kills ...
        wrong: wrong values, hangs, and errors without a reason.
        leaks: for each kind of thing that leaks: what has grown or was left.
        memory: role -> growth in bytes per round.
        left_out: kinds of rounds that this machine does not allow, and why.
        threads: what the threads of ranks do at the end, if there are more of them.
    """

    rounds: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    leaks: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in (*KINDS, "memory", "left")})
    memory: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    threads: str = ""

    @property
    def is_good(self) -> bool:
        """Whether nothing was wrong, and nothing leaks."""
        return not self.wrong and not any(self.leaks.values())

    def text(self) -> str:
        """Format the report as a table, followed by what was wrong."""
        rows = [(f"rounds of {kind}", str(count)) for kind, count in sorted(self.rounds.items())]
        rows += [(what, str(count)) for what, count in sorted(self.counts.items())]
        rows += [("wrong values, hangs, errors without a reason", str(len(self.wrong)))]
        rows += [
            (f"leaks of {kind}" if kind != "left" else "left at the end", str(len(n))) for kind, n in self.leaks.items()
        ]
        rows += [(f"memory per round, {role}", f"{nbytes / 1024:+.0f} KiB") for role, nbytes in self.memory.items()]
        width = max(len(what) for what, _ in rows)
        lines = [f"{what:<{width}}  {value:>10}" for what, value in rows]
        lines += [f"left out: {each}" for each in self.left_out]
        lines += [f"wrong: {each}" for each in self.wrong[:20]]
        lines += [f"leak of {kind}: {each}" for kind, found in self.leaks.items() for each in found[:20]]
        lines += [self.threads] * bool(self.threads)
        return "\n".join(lines)


class Soak:
    """Makes rounds in one notebook, and others beside it.

    Args:
        seed: seed of all random choices.
        say: called with a line for each round.
        with_faults: also make random faults of hosts, which takes some 20 s a round.
    """

    def __init__(
        self, seed: int, say: Callable[[str], object] = lambda line: None, *, with_faults: bool = False
    ) -> None:
        self.report = SoakReport()
        self._dice = random.Random(seed)
        self._say = say
        self._samples: list[Held] = []
        self._at_last: float = math.inf  # threads at rest after the last round
        self._is_warm = False
        self._rounds: dict[str, Callable[[], None]] = {
            "cells": self._cells,
            "interrupts": self._interrupts,
            "kills": self._kills,
            "pools": self._pools,
            "meshes": self._meshes,
            "floods of output": self._floods_of_output,
            "floods of results": self._floods_of_results,
            "killed kernels": self._killed_kernel,
            "few descriptors": self._few_descriptors,
        }
        if can_fill_shared_memory():
            self._rounds["full /dev/shm"] = self._full_shared_memory
        else:
            self.report.left_out.append("full /dev/shm: this process may not mount anything (unshare --mount)")
        if with_faults:
            self._rounds["faults"] = self._faults
        self._notebook = Notebook()
        try:
            self._campaign = InterruptCampaign(self._notebook, free_within_s=GIVE_UP_S)
        except BaseException:
            self._notebook.close()
            raise

    def run(self, for_s: float = 0.0, more: int = 0) -> SoakReport:
        """Make a round of each kind as a warm-up, then ``more`` of each kind in `HERE`, then others until ``for_s``."""
        report, until = self.report, time.monotonic() + for_s
        try:
            self._cycle(self._rounds)
            self._is_warm = True
            for _ in range(more):
                self._cycle(HERE)
            while time.monotonic() < until:
                self._cycle(self._rounds, until)
            if for_s >= 3600 and report.counts["cells"] < CELLS_OF_AN_HOUR:
                report.wrong.append(f"only {report.counts['cells']} cells in {for_s / 60:.0f} minutes")
        except Stuck as stuck:
            report.wrong.append(str(stuck))
        self._judge()
        return report

    def _cycle(self, kinds: Iterable[str], until: float = math.inf) -> None:
        """Make a round of each kind, in random order, until a time."""
        kinds = sorted(kinds)
        for kind in self._dice.sample(kinds, len(kinds)):
            if time.monotonic() < until:
                self._round(kind)

    def close(self) -> None:
        """End the notebook; it must leave nothing."""
        self._notebook.close()

    def _round(self, kind: str) -> None:
        report, wrong = self.report, len(self.report.wrong)
        started_at = time.monotonic()
        try:
            self._rounds[kind]()
            self._check_next(kind)
            held = self._held()
        except (AssertionError, pytest.fail.Exception) as error:
            raise Stuck(f"{kind}: {error}") from error
        report.rounds[kind] += 1
        if self._is_warm:
            held.after = f"round {sum(report.rounds.values())} ({kind})"
            self._samples.append(held)
        memory = ", ".join(f"{role} {nbytes >> 20} MiB" for role, nbytes in held.memory.items() if role in MEASURED)
        is_right = "right" if len(report.wrong) == wrong else f"WRONG: {report.wrong[-1]}"
        self._say(f"{kind}: {is_right}, {time.monotonic() - started_at:.1f} s; {memory}")

    # -- rounds

    def _cells(self) -> None:
        for _ in range(CELLS_OF_A_ROUND):
            number = self._dice.randrange(1000)
            code, text = self._dice.choice(
                (
                    (
                        f"%%remote t\nx = torch.full((8,), float({number})); dist.all_reduce(x); int(x[0])",
                        f"{number * N}",
                    ),
                    (f"%%remote t[1]\nrank + {number}", f"{number + 1}"),
                    (f"%remote t[0:2] print({number})", f"{number}"),
                    (f"print({number} + 1)", f"{number + 1}"),
                    (f"print(sum(t.run('rank + {number}').get(60).values()))", f"{4 * number + 6}"),
                )
            )
            cell = self._notebook.run(code, ROUND_S)
            self._expect(text in cell.text and cell.ok, f"a cell gave {cell.text[-500:]} for {code!r}")
        self.report.counts["cells"] += CELLS_OF_A_ROUND

    def _interrupts(self) -> None:
        found = self._campaign.report
        for _ in range(INTERRUPTS_OF_A_ROUND):
            self._campaign.step(self._dice.randrange(1 << 30))
        self.report.counts["interrupts"] += INTERRUPTS_OF_A_ROUND
        self.report.counts["cells"] += 2 * INTERRUPTS_OF_A_ROUND
        late = [each for each in found.not_freed if "did not stop" in each]  # the next cell has waited, and is right
        self.report.counts["interrupts that took effect late, and were reported as such"] += len(late)
        self.report.wrong += [f"not freed: {each}" for each in found.not_freed if each not in late]
        self.report.wrong += [f"the next cell is wrong: {each}" for each in found.next_wrong]
        found.not_freed.clear()
        found.next_wrong.clear()

    def _kills(self) -> None:
        """Rank 0 is left, so that the memory of one rank is measured all the time."""
        notebook, dice = self._notebook, self._dice
        victims = dice.sample(range(1, N), dice.choice((1, 1, 2)))
        code, ending = dice.choice(LASTING), dice.choice(ENDINGS)
        pids = notebook.pids()
        cell = notebook.send(HEAD.format(part="") + code)
        self._pump(dice.uniform(0.05, 0.6))
        for rank in victims:
            os.kill(pids[rank], ending)
        cell.wait_for(lambda cell: (cell.idle and cell.reply) or "Interrupt ends them" in cell.text, ROUND_S)
        if not cell.reply:  # the others do not wait for the dead
            notebook.interrupt()
        said = cell.wait(ROUND_S).text
        self._expect(
            not cell.ok and ending.name in said,
            f"the cell {code!r} does not say that {ending.name} ended {victims}: {said[-800:]}",
        )
        notebook.run("%mesh heal t", ROUND_S)
        after = notebook.pids()
        replaced = [rank for rank in range(N) if pids[rank] != after[rank]]
        self._expect(replaced == sorted(victims), f"of {sorted(victims)}, {replaced} were replaced")
        self.report.counts["ranks killed"] += len(victims)
        self.report.counts["cells"] += 1
        notebook.value(f"len({RESULTS})")  # the new ranks get as many idle blocks of memory as those before them had

    def _pools(self) -> None:
        cell = self._notebook.run(POOLS, ROUND_S)
        self._expect(cell.ok and "pools end" in cell.text, f"pools: {cell.text[-800:]}")
        self.report.counts["pools and loaders"] += 9 * N
        self.report.counts["cells"] += 1

    def _meshes(self) -> None:
        notebook, n = self._notebook, self._dice.randrange(1, 4)
        notebook.up(n, "u")
        cell = notebook.ok(COUNTS.format(mesh="u"))
        self._expect(f"{n}" in cell.text, f"a cell of a new mesh gave {cell.text[-500:]}")
        if self._dice.random() < 0.5:  # while it works
            lasting = notebook.send("%%remote u\nimport time\nwhile True: time.sleep(0.01)")
            self._pump(self._dice.uniform(0, 0.3))
            notebook.interrupt()
            if not lasting.has_ended(GIVE_UP_S):  # the interrupt came before the cell began
                notebook.interrupt()
                lasting.wait(ROUND_S)
        notebook.ok("%mesh down u")
        self.report.counts["meshes up and down"] += 1

    def _floods_of_output(self) -> None:
        lines = self._dice.choice((5_000, 20_000, 50_000))
        cell = self._notebook.run(f"%%remote t\nfor i in range({lines}): print(i, rank, 'x' * 100)", ROUND_S)
        shown = len(cell.text)
        self._expect(
            cell.ok and shown < OUTPUT_SHOWN, f"of {lines} lines a rank, {shown} characters were shown: {cell.evalue}"
        )
        self._expect(f"{lines - 1} " in cell.stdout, f"the last of {lines} lines is missing")
        self.report.counts["lines printed"] += lines * N

    def _floods_of_results(self) -> None:
        found = self._notebook.value(f"[[float(each.mean()) for each in turn] for turn in {RESULTS}]")
        self._expect(found == [[0.0, 1.0, 2.0, 3.0]] * 5, f"ranks returned {found}")
        self.report.counts["MiB returned"] += 5 * N * 4

    def _killed_kernel(self) -> None:
        with self._other() as notebook:
            notebook.up(2)
            code = self._dice.choice(LASTING)
            notebook.send(HEAD.format(part="") + code)
            self._pump(self._dice.uniform(0, 1.0), notebook)
            below = notebook.processes()
            os.kill(notebook.pid, signal.SIGKILL)
            self._await(
                lambda: not any(map(is_alive, below)), f"the processes of a killed kernel to end, with {code!r}"
            )
        self.report.counts["kernels killed"] += 1

    def _full_shared_memory(self) -> None:
        with self._other(FULL) as notebook:
            said = notebook.up(2).text
            self._expect("/dev/shm" in said, f"%mesh up does not say that /dev/shm is full: {said}")
            cell = notebook.run(WORKERS, ROUND_S)
            self._expect(
                "refused: True" in cell.stdout or (not cell.ok and "/dev/shm" in cell.text),
                f"workers without shared memory: {cell.text[-1500:]}",
            )
            found = notebook.value(LARGE)
            self._expect(found == [0.0, 4_000_000.0], f"large values with a full /dev/shm: {found}")

    def _few_descriptors(self) -> None:
        with self._other(FEW) as notebook:
            notebook.up(2)
            cell = notebook.run(OPENS, ROUND_S)
            self._expect(
                "refused: Too many open files" in cell.stdout, f"ranks without descriptors: {cell.text[-1500:]}"
            )
            cell = notebook.run(COUNTS.format(mesh="t"))
            self._expect(cell.ok and "2" in cell.text, f"after descriptors ran out: {cell.text[-1500:]}")

    def _faults(self) -> None:
        shutdown_context().get()
        with by_value(), tempfile.TemporaryDirectory(dir=SCRATCH) as directory:
            supply = LocalSupply(Path(directory), 3, lost_after_s=LOST_AFTER_S)
            try:
                found = Campaign(supply, self._dice.randrange(1 << 30)).run(FAULTS_OF_A_ROUND)
            finally:
                shutdown_context().get()
                supply.close()
        self.report.counts["faults of hosts and ranks"] += sum(found.kinds.values())
        self.report.counts["calls answered meanwhile"] += found.values
        self.report.wrong += [f"fault: {each}" for each in (*found.wrong, *found.innocent)]
        self.report.leaks["left"] += [f"by faults: {each}" for each in found.left]

    # -- between them

    @contextmanager
    def _other(self, through: Sequence[str] = ()) -> Iterator[Notebook]:
        """Another kernel, for one round; it may be dead at the end, and leaves nothing."""
        before = sessions_left()
        notebook = Notebook(through=through)
        try:
            yield notebook
        finally:
            notebook.close()
        self._await(lambda: sessions_left() <= before, "the directory of an ended kernel to go")

    def _check_next(self, kind: str) -> None:
        self.report.counts["cells"] += 1
        if not self._campaign.next(kind):
            self.report.wrong.append(f"the next cell is wrong: {self._campaign.report.next_wrong.pop()}")
        self._notebook.forget()

    def _held(self) -> Held:
        """Count what the processes hold at rest; others than the usual ones must end before."""
        notebook = self._notebook
        notebook.ok(FORGETS)
        notebook.aside("import ctypes, gc; gc.collect(); ctypes.CDLL(None).malloc_trim(0)")
        notebook.forget()
        ranks = notebook.pids()
        usual = 3 + len(ranks)
        deadline = time.monotonic() + GIVE_UP_S
        while len(roles := roles_of(notebook.pid, notebook.processes(), ranks)) > usual and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._at_rest(roles)

    def _at_rest(self, roles: dict[int, str]) -> Held:
        """What the processes hold when they have as few threads as after the last round, or more that stay.

        Destroyed groups keep theirs for a while. Ranks that replace others have fewer threads at first.
        """
        until = time.monotonic() + SETTLES_S
        while (held := held_by(roles)).n_threads > self._at_last and time.monotonic() < until:
            time.sleep(0.05)
        if self._is_warm:
            self._at_last = held.n_threads
        return held

    def _judge(self) -> None:
        report, samples = self.report, self._samples
        for growth in grown(samples):
            report.leaks[growth.kind].append(str(growth))
        if report.leaks["threads"]:
            report.threads = self._notebook.run(THREADS, ROUND_S).text
        for role in MEASURED:
            values = [sample.memory.get(role, 0) for sample in samples[len(samples) // 2 :]]
            report.memory[role] = rate = per_round(values)
            if len(values) >= ROUNDS_FOR_MEMORY and rate > MEMORY_PER_ROUND:
                report.leaks["memory"].append(
                    f"{role}: {rate / 1024:.0f} KiB a round, from {values[0]} to {values[-1]} bytes"
                )

    def _expect(self, holds: bool, else_wrong: str) -> None:
        if not holds:
            self.report.wrong.append(else_wrong)

    def _pump(self, for_s: float, notebook: Notebook | None = None) -> None:
        until = time.monotonic() + for_s
        while (left_s := until - time.monotonic()) > 0:
            (notebook or self._notebook).pump(min(left_s, 0.02))

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + ROUND_S
        while not condition():
            if time.monotonic() > deadline:
                self.report.wrong.append(f"after {ROUND_S:g} s still waiting for {what}")
                return
            time.sleep(0.02)


class Stuck(Exception):
    """A round did not end, or the notebook can't be used any more."""


HERE = ("cells", "interrupts", "kills", "pools", "meshes", "floods of output", "floods of results")
"""The kinds of rounds that need no other kernel, and take a second or two."""

MEASURED = ("kernel", "agent", "zygote", "rank 0")


def can_fill_shared_memory() -> bool:
    """Whether this process may mount a small ``/dev/shm`` for its children."""
    return bool(shutil.which("unshare")) and os.system(f"{' '.join(FULL[:2])} true 2>/dev/null") == 0


def main() -> None:
    """Read the command line, run the soak, and print the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.failures.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 20), help="default: a random one"
    )
    parser.add_argument(
        "--no-faults", action="store_true", help="leave out faults of hosts, which take most of the time"
    )
    parser.add_argument("--quiet", action="store_true", help="print no line for each round")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
    before, started_at = Snapshot(), time.monotonic()

    def say(line: str) -> None:
        if not options.quiet:
            print(f"{time.monotonic() - started_at:7.1f} s  {line}", flush=True)

    soak = Soak(options.seed, say, with_faults=not options.no_faults)
    try:
        soak.run(60 * options.minutes)
    finally:
        soak.close()
        try:
            check_nothing_left(before)
        except pytest.fail.Exception as left:
            soak.report.leaks["left"] += str(left).splitlines()[1:]
        shutil.rmtree(SCRATCH, ignore_errors=True)
    print(soak.report.text())
    print(f"seed {options.seed}, {time.monotonic() - started_at:.0f} s")
    sys.exit(not soak.report.is_good)


if __name__ == "__main__":
    main()
