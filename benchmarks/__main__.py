"""Command line of the benchmarks: `python -m benchmarks` prints our figures beside those of the peers."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import PEERS, describe_machine
from benchmarks.measures import select_measures
from benchmarks.report import render, to_json
from benchmarks.runner import Settings, run_all

QUICK = Settings(repeat=1, calls=100, outstanding=2_000)


def names(text: str) -> list[str]:
    """Split an option at its commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def main() -> None:
    """Measure, print the report, write the JSON file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure us beside our peers.")
    parser.add_argument("--quick", action="store_true", help="one repetition of fewer calls; figures are rough")
    parser.add_argument("--peers", type=names, default=list(PEERS), help=f"of {', '.join(PEERS)}; default: all")
    parser.add_argument("--only", type=names, default=[], help="measures (call) or rows (call/4); default: all")
    parser.add_argument("--repeat", type=int, help=f"repetitions; default: {Settings.repeat}, quick {QUICK.repeat}")
    parser.add_argument("--json", type=Path, default=Path("build/bench/results.json"), help="file for the data")
    options = parser.parse_args()
    unknown = [peer for peer in options.peers if peer not in PEERS]
    if unknown:
        parser.error(f"no peer is called {', '.join(unknown)}; there are: {', '.join(PEERS)}")
    try:
        measures = select_measures(options.only)
    except ValueError as error:
        parser.error(str(error))
    base = QUICK if options.quick else Settings()
    settings = Settings(
        repeat=base.repeat if options.repeat is None else options.repeat,
        calls=base.calls,
        outstanding=base.outstanding,
        deadline_s=base.deadline_s,
    )
    if settings.repeat < 1:
        parser.error("--repeat must be at least 1")

    machine = describe_machine(options.peers)
    samples = run_all(options.peers, measures, settings, lambda line: print(line, file=sys.stderr, flush=True))
    print(render(machine, options.peers, measures, samples))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    data = to_json(machine, asdict(settings), measures, samples)
    options.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    print(f"\nAll figures: {options.json}")


if __name__ == "__main__":
    main()
