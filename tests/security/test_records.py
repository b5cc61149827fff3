"""A record from another person runs no code when it is shown, compared or exported, and can't fill the memory."""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from monarch_kernel.cli import main
from monarch_kernel.errors import RecordError
from monarch_kernel.features.record.checking import MAX_RANKS, MAX_STATE_NBYTES, Unfit, state_of, value_of
from monarch_kernel.features.record.exporting import notebook_of, script_of
from monarch_kernel.features.record.files import read_module
from monarch_kernel.features.record.reading import RecordReader, ranks_of
from monarch_kernel.features.record.tables import FILE
from monarch_kernel.train.record.opened import open as open_record
from tests.features.record.runs import write_run
from tests.security.test_text_from_ranks import HOSTILE, executes

TEXT = "".join(HOSTILE.values()) + "<b>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "run").close()
    return tmp_path / "run"


def change(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / FILE)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


HOSTILE_RUN = [
    ("cell", "mesh = ?, ranks = '0-1', code = ? || code, outcome = ?, error = ?, output = ?, unreplayable = ?"),
    ("loop", "mesh = ?"),
    ("name", "name = ? || name"),
    ("knob", "name = ? || name"),
    ("event", "kind = ?, mesh = ?, text = ?"),
    ("run", "value = ?"),
]


@pytest.fixture
def hostile(folder: Path) -> Path:
    """A record with controls of terminals in each text."""
    with closing(sqlite3.connect(folder / FILE)) as connection, connection:
        connection.execute("INSERT INTO event VALUES (NULL, 1.0, 'death', 't', 1, 1, 2, 'died')")
        for table, values in HOSTILE_RUN:
            connection.execute(f"UPDATE {table} SET {values}", [TEXT] * values.count("?"))
    return folder


def test_no_control_of_a_record_reaches_the_terminal(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "other", batch_of=1).close()
    assert main(["record", "show", str(hostile)]) == 0
    assert main(["record", "diff", str(hostile), str(tmp_path / "other")]) == 1
    assert main(["record", "replay", str(hostile), "--mesh", "u"]) == 1
    assert main(["record", "show", str(hostile), "--json"]) == 0
    shown = capsys.readouterr()
    assert "<b>" in shown.out
    assert not executes(shown.out)
    assert not executes(shown.err)
    with RecordReader(hostile) as record:
        for name in ("cells", "loops", "knobs", "metrics", "events"):
            assert not executes(repr(getattr(record, name)))


def test_a_script_has_no_text_of_the_record_as_code_but_that_of_its_cells(folder: Path) -> None:
    mesh = 't"""\nimport os\n\\'
    with closing(sqlite3.connect(folder / FILE)) as connection, connection:
        connection.execute("UPDATE cell SET mesh = ?, outcome = 'ok'", (mesh,))
    with RecordReader(folder) as record:
        script = script_of(record, 'a"""b.py', mesh)
        compile(script, "train.py", "exec")
        assert script.count("\nimport os\n") == 1  # that of the script itself
        json.loads(notebook_of(record))


ENDLESS = "CREATE VIEW metric AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"


@pytest.mark.parametrize(
    "statements",
    [
        (
            "DROP TABLE metric",
            ENDLESS,
        ),
        ("CREATE TRIGGER t AFTER UPDATE ON cell BEGIN DELETE FROM run; END",),
        ("CREATE INDEX i ON cell (code)",),
        ("CREATE TABLE more (x)",),
        ("DROP TABLE knob", "CREATE TABLE knob (loop, step, name, value AS (zeroblob(1000000000)), is_default)"),
        ("CREATE VIRTUAL TABLE words USING fts5(x)",),
    ],
    ids=["view", "trigger", "index", "table", "computed column", "virtual table"],
)
def test_a_file_with_other_parts_is_refused(folder: Path, statements: tuple[str, ...]) -> None:
    change(folder, *statements)
    with pytest.raises(RecordError, match="has a part that no record has"):
        RecordReader(folder)


def odd_rows() -> Iterator[str]:
    for value in ("'text'", "x'00'", "NULL", "1.5"):
        yield f"UPDATE cell SET started = {value}, number = {value}, ended = {value}"
        yield f"UPDATE cell SET code = {value}, ranks = {value}"
        yield f"UPDATE loop SET steps = {value}, reached = {value}, mesh = {value}"
        yield f"UPDATE metric SET mean = {value}, ranks = {value}"
        yield f"UPDATE data SET digests = {value}"
        yield f'UPDATE "check" SET digests = {value}'
        yield f"UPDATE run SET value = {value}"
        yield f"UPDATE request SET cell = {value}"
    for value in ("'['", f"'{'[' * 100_000}'", "'{}'", "x'00'", "NULL"):
        yield f"UPDATE knob SET value = {value}"


@pytest.mark.parametrize("statement", list(odd_rows()))
def test_values_of_other_types_are_left_out_or_refused(folder: Path, statement: str) -> None:
    change(folder, statement)
    with open_record(folder) as record, open_record(folder) as other:
        try:
            record.text()
            record.diff(other)
            notebook_of(record)
            script_of(record, "x.py", "t")
        except RecordError:
            pass
        json.dumps([record.knobs.to_dicts(), record.damage])


def test_what_is_left_out_is_named(folder: Path) -> None:
    change(folder, "UPDATE cell SET started = 'long ago' WHERE id = 1")
    with RecordReader(folder) as record:
        assert [cell.id for cell in record.cells] == [2]
        assert "1 row of cells with values that no record has" in record.text()


@pytest.mark.parametrize(
    "text", ["0-999999999999", f"0-{10**30}", "0,0-9999999", "-5", "x", "0-1-2", "1e9", ",".join(["0-999999"] * 3)]
)
def test_a_text_can_not_name_very_many_ranks(text: str) -> None:
    with pytest.raises(RecordError, match="names ranks of a cell as"):
        ranks_of(text)
    assert ranks_of("0-2,5") == [0, 1, 2, 5]
    assert len(ranks_of(f"0-{MAX_RANKS - 1}")) == MAX_RANKS


def test_a_small_state_does_not_become_a_large_one(folder: Path) -> None:
    bomb = zlib.compress(bytes(MAX_STATE_NBYTES + 1), 9)
    assert len(bomb) < 1 << 16
    with pytest.raises(Unfit, match="far too large"):
        state_of(bomb)
    assert state_of(zlib.compress(bytes(MAX_STATE_NBYTES))) == bytes(MAX_STATE_NBYTES)
    for damaged in (b"", b"no", zlib.compress(b"whole" * 100)[:-5], "text", None):
        with pytest.raises(Unfit):
            state_of(damaged)
    with closing(sqlite3.connect(folder / FILE)) as connection, connection:
        connection.execute("UPDATE state SET data = ?", (bomb,))
    with RecordReader(folder) as record:
        assert record.states(2) == {}
        assert "far too large" in record.damage[0]


@pytest.mark.parametrize("text", ["", "[", "[1]", "{}", "[" * 100_000, "1" * 5_000, None, b"1"])
def test_the_value_of_a_knob_is_a_number_a_text_or_nothing(text: object) -> None:
    with pytest.raises(Unfit):
        value_of(text)
    assert [value_of(each) for each in ("1", "0.5", '"x"', "true", "null")] == [1, 0.5, "x", True, None]


def test_a_module_that_a_rank_names_is_read_only_if_it_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "large.py").write_bytes(bytes((4 << 20) + 1))
    (tmp_path / "good.py").write_text("x = 1")
    for path in (tmp_path / "pipe.py", tmp_path / "large.py", tmp_path, "/dev/zero", tmp_path / "none.py", "a\0b"):
        assert read_module(str(path)) == b""
    assert read_module(str(tmp_path / "good.py")) == b"x = 1"
