"""Compares what two commits cost, in turns on the same machine: ratios with their spread.

    python -m benchmarks.compare BASE             # this working tree against a commit
    python -m benchmarks.compare BASE --new COMMIT --rounds 9

Each round runs both, one after the other, each first in every other round (`benchmarks.one_round`). A ratio compares
two neighbours in time, so load that comes and goes cancels out. The table has the median of the ratios, with the smallest and
the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import describe_machine

__all__ = ["Row", "compare", "table"]

CHECKOUT = Path(__file__).resolve().parent.parent
ROUND = CHECKOUT / "benchmarks" / "one_round.py"
DEADLINE_S = 300.0

Figures = dict[str, dict[str, float]]
"""What one round has found: by work and by kind of cost."""

Row = tuple[str, str, float, float, float, float, float]
"""Work, kind of cost, medians of both, and the median, the smallest and the largest of the ratios."""


def run_round(tree: Path, ranks: int, times: int) -> Figures:
    """Run one round beside the package in a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROUND), "--ranks", str(ranks), "--times", str(times)]
    run = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, check=True, timeout=DEADLINE_S)
    found: Figures = json.loads(run.stdout.splitlines()[-1])
    return found


def compare(base: Sequence[Figures], new: Sequence[Figures]) -> list[Row]:
    """Compare rounds: the first of one with the first of the other, and so on."""
    rows: list[Row] = []
    for work, costs in base[0].items():
        for kind in costs:
            pairs = [(a[work][kind], b[work][kind]) for a, b in zip(base, new, strict=True)]
            ratios = [(b / a if a else float(bool(b))) for a, b in pairs]
            was, now = (statistics.median(side) for side in zip(*pairs, strict=True))
            rows.append((work, kind, was, now, statistics.median(ratios), min(ratios), max(ratios)))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Format rows as Markdown."""
    lines = ["| work | cost | base | new | new / base |", "|---|---|---:|---:|---:|"]
    for work, kind, was, now, ratio, least, most in rows:
        lines.append(f"| {work} | {kind} | {was:,.1f} | {now:,.1f} | {ratio:.2f} ({least:.2f}-{most:.2f}) |")
    return "\n".join(lines)


def main() -> None:
    """Compare, print the table, and write the figures of all rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--new", default="", help="the other commit; by default the working tree as it is")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--times", type=int, default=300, help="of each kind of work, in each round")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "build" / "bench" / "compare.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trees = [_extracted(args.base, Path(folder, "base"))]
        trees.append(_extracted(args.new, Path(folder, "new")) if args.new else CHECKOUT)
        rounds: list[tuple[Figures, Figures]] = []
        for turn in range(args.rounds):
            found = {i: run_round(trees[i], args.ranks, args.times) for i in ((0, 1) if turn % 2 == 0 else (1, 0))}
            rounds.append((found[0], found[1]))
            print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"base": args.base, "new": args.new or "working tree", "rounds": rounds}))
    machine = describe_machine([])
    print(f"machine: {machine.processor}, {machine.cores} cores, load {machine.load:.1f} before the last rounds")
    print(
        f"{args.base} against {args.new or machine.commit}: {args.ranks} ranks, {args.rounds} rounds of {args.times}\n"
    )
    print(table(compare([base for base, _ in rounds], [new for _, new in rounds])))


def _extracted(commit: str, folder: Path) -> Path:
    """Put the files of a commit into a folder."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=CHECKOUT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


if __name__ == "__main__":
    main()
