"""A record becomes Parquet and an RO-Crate, which archives can read without this package."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.errors import RecordError
from monarch_kernel.features.record.archiving import CRATE, TABLES, crate_of, write_parquet
from monarch_kernel.features.record.messages import DataFile, Noted
from monarch_kernel.features.record.reading import RecordReader
from monarch_kernel.features.record.recorder import Recorder
from tests.features.record.runs import loop_of, write_run


def entities(text: str) -> dict[str, dict[str, Any]]:
    crate = json.loads(text)
    assert crate["@context"] == "https://w3id.org/ro/crate/1.1/context"
    found = {entity["@id"]: entity for entity in crate["@graph"]}
    assert len(found) == len(crate["@graph"]), "an entity is there twice"
    return found


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [value["@id"]]
    return [id for each in value for id in references(each)] if isinstance(value, list) else []


def check_crate(text: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Check what RO-Crate 1.1 demands of a crate."""
    found = entities(text)
    descriptor, root = found[CRATE], found["./"]
    assert descriptor["@type"] == "CreativeWork"
    assert descriptor["about"] == {"@id": "./"}
    assert descriptor["conformsTo"] == {"@id": "https://w3id.org/ro/crate/1.1"}
    assert root["@type"] == "Dataset"
    for name in ("name", "description", "datePublished", "license"):
        assert root[name], f"the root lacks {name}"
    assert datetime.fromisoformat(root["datePublished"]).tzinfo is not None
    for id, entity in found.items():
        assert entity["@type"], id
        for name, value in entity.items():
            for reference in references(value) if name not in ("@id", "conformsTo") else ():
                assert reference in found, f"{name} of {id} refers to {reference}, which is not described"
        if entity["@type"] == "File":
            path = folder / id
            assert {"@id": id} in root["hasPart"]
            assert entity["contentSize"] == str(path.stat().st_size)
            assert entity["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert all(found[id]["@type"] == "File" for id in references(root["hasPart"]))
    action = found["#run"]
    assert action["instrument"], "nothing says what ran"
    assert datetime.fromisoformat(action["startTime"]) <= datetime.fromisoformat(action["endTime"])
    return found


def test_a_crate_has_what_the_specification_demands(tmp_path: Path) -> None:
    record = write_run(tmp_path / "run")
    (tmp_path / "run" / "train.py").write_text("pass\n")
    write_run(tmp_path / "run" / "replays" / "1").close()
    found = check_crate(crate_of(record), tmp_path / "run")
    assert {id for id, entity in found.items() if entity["@type"] == "File"} == {
        "record.sqlite",
        "train.py",
        "replays/1/record.sqlite",
    }
    assert "t with 2 ranks" in found["./"]["description"]
    assert found["#run"]["actionStatus"] == "http://schema.org/CompletedActionStatus"
    (value,) = (entity for entity in found.values() if entity["@type"] == "PropertyValue")
    assert (value["name"], value["value"]) == ("loss", 1.5 / 6)
    assert found["#torch"]["softwareVersion"] == record.run["package:torch"]
    assert "No licence is stated" in found["#licence"]["name"]


def test_a_crate_names_its_licence_and_the_data_that_was_read(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a run")
    loop = loop_of()
    recorder.loop_started(loop)
    recorder.noted(0, Noted(*loop.key, (), data_files=(DataFile("/data/x.bin", 12, 1.0, "ab" * 16),)))
    recorder.close()
    address = "https://spdx.org/licenses/CC-BY-4.0"
    found = check_crate(crate_of(RecordReader(tmp_path / "a run"), address), tmp_path / "a run")
    assert found["./"]["license"] == {"@id": address}
    assert found[address]["name"] == "CC-BY-4.0"
    assert found["#run"]["object"] == [{"@id": "#data-0"}]
    assert "12 bytes" in found["#data-0"]["description"]


def test_a_crate_of_a_record_without_an_end_has_none(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    assert recorder.flush()
    found = entities(crate_of(RecordReader(tmp_path / "run")))
    recorder.close()
    assert "endTime" not in found["#run"]


def test_an_unknown_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no table 'loss'; tables: cells, loops"):
        write_parquet(write_run(tmp_path / "run"), tmp_path / "x.parquet", "loss")


def test_each_table_becomes_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    record = write_run(tmp_path / "run")
    for table in TABLES:
        path = tmp_path / f"{table}.parquet"
        write_parquet(record, path, table)
        read = parquet.read_table(path)
        rows = getattr(record, table)
        assert read.num_rows == len(rows), table
        assert tuple(read.column_names) == rows.columns
    metrics = parquet.read_table(tmp_path / "metrics.parquet")
    assert metrics.to_pylist() == record.metrics.to_dicts()
    assert metrics.schema.metadata[b"table"] == b"metrics"
    assert parquet.read_table(tmp_path / "batches.parquet").column("digests")[0].as_py() == [
        b"a".hex() * 8,
        b"b".hex() * 8,
    ]
    assert parquet.read_table(tmp_path / "knobs.parquet").column("value").to_pylist() == ["0.1", "0.5"]
    with pytest.raises(RecordError, match="can't write"):
        write_parquet(record, tmp_path / "missing" / "x.parquet", "metrics")


def test_the_library_of_ro_crate_reads_a_crate(tmp_path: Path) -> None:
    crates = pytest.importorskip("rocrate.rocrate")
    record = write_run(tmp_path / "run")
    (tmp_path / "run" / CRATE).write_text(crate_of(record))
    crate = crates.ROCrate(tmp_path / "run")
    assert crate.name == "Record of the run run"
    assert [entity.id for entity in crate.data_entities] == ["record.sqlite"]
    assert crate.get("#run")["instrument"]
