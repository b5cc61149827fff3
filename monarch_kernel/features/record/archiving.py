"""Writes tables of a record as Parquet, and a description of its folder as an RO-Crate, so that archives can read it."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from monarch_kernel.base.text import plural
from monarch_kernel.errors import RecordError
from monarch_kernel.features.record.reading import RecordReader
from monarch_kernel.features.record.tables import FILE

__all__ = ["CRATE", "TABLES", "crate_of", "write_parquet"]

CRATE = "ro-crate-metadata.json"
"""The name that the specification of RO-Crate demands."""

TABLES = ("cells", "loops", "knobs", "metrics", "events", "batches", "checks", "data_files")
"""The tables that can be written as Parquet."""

_PROFILE = "https://w3id.org/ro/crate/1.1"
_KINDS = {
    ".sqlite": "application/vnd.sqlite3",
    ".parquet": "application/vnd.apache.parquet",
    ".py": "text/x-python",
    ".ipynb": "application/x-ipynb+json",
}
_STATES = {"ok": "CompletedActionStatus", "failed": "FailedActionStatus", "interrupted": "FailedActionStatus"}

Entity = dict[str, Any]


def write_parquet(record: RecordReader, path: Path, table: str) -> None:
    """Write a table of a record. Digests are texts of hexadecimal digits, one for each rank; values of knobs are JSON.

    Raises:
        RecordError: there is no such table, pyarrow is not installed, or the file can't be written.
    """
    if table not in TABLES:
        raise RecordError(f"a record has no table {table!r}; tables: {', '.join(TABLES)}")
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise RecordError(f"pyarrow writes Parquet: pip install 'monarch_kernel[parquet]' ({error})") from None
    rows = getattr(record, table)
    columns: dict[str, Any] = {}
    for at, name in enumerate(rows.columns):
        values = [row[at] for row in rows]
        if table == "knobs" and name == "value":
            values = [json.dumps(value) for value in values]
        elif name == "digests":
            values = [[digest.hex() for digest in digests] for digests in values]
        columns[name] = arrow.array(values, type=_arrow_type(arrow, rows.kind, name))
    facts = {"record": record.folder.name, "table": table, **record.run}
    # Files of packages and diffs are in the record; here is what a reader of one table needs.
    facts = {
        key: value for key, value in facts.items() if key in ("record", "table", "started", "python", "git_commit")
    }
    try:
        parquet.write_table(arrow.table(columns).replace_schema_metadata(facts), path)
    except OSError as error:
        raise RecordError(f"can't write {path}: {error}") from None


def _arrow_type(arrow: Any, kind: Any, name: str) -> Any:
    """The type of a column, also of one without values."""
    if name == "digests":
        return arrow.list_(arrow.string())
    if name == "value":
        return arrow.string()
    annotation = kind.__annotations__[name]
    annotation = getattr(annotation, "__forward_arg__", str(annotation))
    if annotation.startswith("int"):
        return arrow.int64()
    if annotation.startswith("float"):
        return arrow.float64()
    return arrow.bool_() if annotation == "bool" else arrow.string()


def crate_of(record: RecordReader, license: str = "") -> str:
    """Return the metadata file of an RO-Crate of the folder of a record, as JSON-LD.

    Args:
        record: the record.
        license: the address of the licence, such as ``https://spdx.org/licenses/CC-BY-4.0``; empty if none is stated.
    """
    run, folder = record.run, record.folder
    parts, inputs = list(_parts(record)), list(_inputs(record))
    tools = list(_tools(run))
    started = float(run["started"]) if "started" in run else None
    ended = float(run["ended"]) if "ended" in run else None
    licence: Entity = (
        {"@id": license, "@type": "CreativeWork", "name": license.rstrip("/").rpartition("/")[2] or license}
        if license
        else {
            "@id": "#licence",
            "@type": "CreativeWork",
            "name": "No licence is stated",
            "description": "No licence was stated when this description was written.",
        }
    )
    values = list(_values(record))
    root: Entity = {
        "@id": "./",
        "@type": "Dataset",
        "name": f"Record of the run {folder.name}",
        "description": _description(record),
        "datePublished": _iso(ended or started or 0.0),
        "license": {"@id": licence["@id"]},
        "hasPart": [{"@id": part["@id"]} for part in parts],
        "mentions": [{"@id": "#run"}],
        "variableMeasured": [{"@id": value["@id"]} for value in values],
    }
    outcomes = [cell.outcome for cell in record.cells if cell.mesh]
    action: Entity = {
        "@id": "#run",
        "@type": "CreateAction",
        "name": f"The run {folder.name}",
        "instrument": [{"@id": tool["@id"]} for tool in tools],
        "object": [{"@id": each["@id"]} for each in inputs],
        "result": [{"@id": FILE}],
        "actionStatus": f"http://schema.org/{_STATES.get(outcomes[-1] if outcomes else 'ok', 'ActiveActionStatus')}",
    }
    action |= {"startTime": _iso(started)} if started is not None else {}
    action |= {"endTime": _iso(ended)} if ended is not None else {}
    if not inputs:
        del action["object"]
    descriptor: Entity = {
        "@id": CRATE,
        "@type": "CreativeWork",
        "conformsTo": {"@id": _PROFILE},
        "about": {"@id": "./"},
    }
    graph = [descriptor, root, licence, action, *tools, *values, *parts, *inputs]
    return f"{json.dumps({'@context': f'{_PROFILE}/context', '@graph': graph}, indent=2, ensure_ascii=False)}\n"


def _description(record: RecordReader) -> str:
    meshes = ", ".join(f"{name} with {plural(ranks, 'rank')}" for name, ranks in record.meshes().items())
    steps = sum(loop.reached for loop in record.loops)
    commit = record.run.get("git_commit", "")
    turns, events = sum(not knob.is_default for knob in record.knobs), len(record.events)
    counts = [
        f"cells of an interactive run{f' on {meshes}' if meshes else ''}: {len(record.cells):,}",
        f"loops: {len(record.loops):,}, with {plural(steps, 'step')}",
        f"changes of knobs: {turns:,}",
        f"events: {events:,}",
    ]
    return (
        f"{'; '.join(counts)}{f'; git commit {commit}' if commit else ''}. {FILE} holds all of it; python -m monarch_kernel "
        "record shows, compares and repeats it."
    )


def _parts(record: RecordReader) -> Iterator[Entity]:
    """The files in the folder, with those of replays."""
    folder = record.folder
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != CRATE and not path.name.startswith((".", f"{FILE}-")):
            yield _file(path, path.name, "The record of the run" if path.name == FILE else "Written from the record")
    for path in sorted(folder.glob(f"replays/*/{FILE}")):
        yield _file(path, path.relative_to(folder).as_posix(), "The record of a replay of the run")


def _inputs(record: RecordReader) -> Iterator[Entity]:
    """The data files that the run has read, which are elsewhere."""
    for number, source in enumerate({each.path: each for each in record.data_files}.values()):
        yield {
            "@id": f"#data-{number}",
            "@type": "CreativeWork",
            "name": Path(source.path).name,
            "description": f"A data file that is not in this crate: {source.nbytes:,} bytes, BLAKE2b of its first and last "
            f"MiB {source.hash}",
            "dateModified": _iso(source.changed_at),
        }


def _file(path: Path, id: str, description: str) -> Entity:
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            hashed.update(block)
    return {
        "@id": quote(id),
        "@type": "File",
        "name": path.name,
        "description": description,
        "contentSize": str(path.stat().st_size),
        "encodingFormat": _KINDS.get(path.suffix, "application/octet-stream"),
        "sha256": hashed.hexdigest(),
    }


def _tools(run: dict[str, str]) -> Iterator[Entity]:
    for name, key in (("monarch_kernel", "package:monarch_kernel"), ("torch", "package:torch"), ("Python", "python")):
        if key in run:
            yield {"@id": f"#{name}", "@type": "SoftwareApplication", "name": name, "softwareVersion": run[key]}


def _values(record: RecordReader) -> Iterator[Entity]:
    """The last value of each metric of each loop."""
    last = {(metric.loop, metric.name): metric for metric in record.metrics}
    for number, ((loop, name), metric) in enumerate(last.items()):
        if metric.mean == metric.mean:
            text = f"{name} of loop {loop} in step {metric.step}, the mean of {plural(metric.ranks, 'rank')}"
            yield {
                "@id": f"#value-{number}",
                "@type": "PropertyValue",
                "name": name,
                "value": metric.mean,
                "description": text,
            }


def _iso(at: float | None) -> str:
    return datetime.fromtimestamp(at or 0.0, timezone.utc).isoformat(timespec="seconds")
