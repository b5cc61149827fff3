"""Command line: `python -m benchmarks.tensors` prints the figures of all libraries side by side."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.measures import select_measures
from benchmarks.report import render, to_json
from benchmarks.runner import Settings, run_all
from benchmarks.tensors.catalogue import BARS, LIBRARIES, MEASURES, NOTES


def names(text: str) -> list[str]:
    """Split an option at its commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def main() -> None:
    """Measure, print the report, write the JSON file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensors", description="Measure distributed tensors.")
    parser.add_argument(
        "--libraries", type=names, default=list(LIBRARIES), help=f"of {', '.join(LIBRARIES)}; default: all"
    )
    parser.add_argument("--only", type=names, default=[], help="measures (matmul) or rows (matmul/4); default: all")
    parser.add_argument("--repeat", type=int, default=Settings.repeat, help="repetitions; default: %(default)s")
    parser.add_argument("--json", type=Path, default=Path("build/bench/tensors.json"), help="file for the data")
    options = parser.parse_args()
    if unknown := [name for name in options.libraries if name not in LIBRARIES]:
        parser.error(f"no library is called {', '.join(unknown)}; there are: {', '.join(LIBRARIES)}")
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    try:
        measures = select_measures(options.only, MEASURES)
    except ValueError as error:
        parser.error(str(error))
    settings = Settings(repeat=options.repeat, module="benchmarks.tensors.{peer}")
    machine = describe_machine(options.libraries, LIBRARIES)
    samples = run_all(
        options.libraries, measures, settings, lambda line: print(line, file=sys.stderr, flush=True), LIBRARIES
    )
    print(render(machine, options.libraries, measures, samples, BARS, NOTES))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    data = to_json(machine, asdict(settings), measures, samples, BARS)
    options.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    print(f"\nAll figures: {options.json}")


if __name__ == "__main__":
    main()
