"""The commands of ``python -m monarch_kernel record``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from monarch_kernel.actor.host_mesh import shutdown_context, this_host
from monarch_kernel.errors import RecordError
from monarch_kernel.features.record.archiving import CRATE
from monarch_kernel.train.record.opened import Record, open

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Run a command; returns the exit code: 0 if all is well or equal, 1 if something differs.

    Raises:
        RecordError: a record can't be read, written or replayed.
    """
    with open(options.run) as record:
        return _COMMANDS[options.action](record, options)


def _show(record: Record, options: argparse.Namespace) -> int:
    if options.json:
        tables: dict[str, Any] = {"run": record.run}
        for name in ("cells", "loops", "knobs", "metrics", "events"):
            tables[name] = getattr(record, name).to_dicts()
        print(json.dumps(tables, indent=2))
    else:
        print(record.text())
    for damage in record.damage if options.json else ():
        print(damage, file=sys.stderr)
    return 0


def _diff(record: Record, options: argparse.Namespace) -> int:
    found = record.diff(options.other)
    print(found)
    return 1 if found.first is not None else 0


def _export(record: Record, options: argparse.Namespace) -> int:
    target = Path(options.to)
    if target.suffix == ".py":
        print(f"wrote {record.script(target, options.mesh)}")
    elif target.suffix == ".ipynb":
        print(f"wrote {record.notebook(target)}")
    elif target.suffix == ".parquet":
        print(f"wrote {record.parquet(target, options.table)}")
    elif target.name == CRATE and target.absolute().parent in (
        record.folder,
        Path.cwd() if target == Path(CRATE) else None,
    ):
        print(f"wrote {record.crate(options.license)}")
    else:
        raise RecordError(
            f"export to {target}: the name must end in .py (for torchrun), .ipynb or .parquet; or be {CRATE}, which "
            "describes the folder of the record and is written into it"
        )
    return 0


def _send(record: Record, options: argparse.Namespace) -> int:
    given = {}
    for each in options.option:
        name, separator, value = each.partition("=")
        if not separator or not name:
            raise RecordError(f"send: write an option as NAME=VALUE, such as project=gpt, not {each!r}")
        given[name] = value
    print(f"sent to {options.to}: {record.send(options.to, **given)}")
    return 0


def _replay(record: Record, options: argparse.Namespace) -> int:
    name = options.mesh or record.only_mesh()
    sizes = record.meshes()
    if name not in sizes:
        raise RecordError(f"{record.folder}: no cell ran on {name}; meshes: {', '.join(sizes) or 'none'}")
    mesh = this_host().spawn_procs({"gpus": sizes[name]}, name=name, device=options.device)
    try:
        mesh.initialized.get()
        found = record.replay(mesh, options.until_step)
    finally:
        mesh.stop(grace_s=1.0).get()
        shutdown_context().get()
    print(found)
    print(f"the record of the replay: {found.folder}")
    return 0 if found.are_equal else 1


_COMMANDS = {"show": _show, "diff": _diff, "replay": _replay, "export": _export, "send": _send}
