"""Old steps of a record are packed into blocks, and read as they were."""

from __future__ import annotations

import math
import os
import random
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.features.record.packing import (
    Summary,
    pack_digests,
    pack_metrics,
    unpack_digests,
    unpack_metrics,
)
from monarch_kernel.features.record.reading import RecordReader
from monarch_kernel.features.record.recorder import Recorder
from monarch_kernel.features.record.tables import FILE
from tests.features.record.runs import batch, log, loop_of

numbers = st.floats(allow_nan=False)
ends = st.one_of(st.just((None, None)), st.tuples(numbers, numbers))
summaries = st.builds(
    lambda step, mean, of, ranks, size: Summary(step, mean, *of, ranks, size),
    st.integers(0, 2**40),
    st.one_of(st.none(), numbers),
    ends,
    st.integers(1, 2**31),
    st.integers(1, 2**31),
)


@given(st.lists(summaries, max_size=20))
def test_metrics_are_unpacked_as_they_were(rows: list[Summary]) -> None:
    assert unpack_metrics(pack_metrics(rows)) == rows


@given(st.lists(st.tuples(st.integers(0, 2**40), st.binary(max_size=40)), max_size=20))
def test_digests_are_unpacked_as_they_were(rows: list[tuple[int, bytes]]) -> None:
    assert unpack_digests(pack_digests(rows)) == rows


@pytest.mark.parametrize("at", [0, 5, -1])
def test_a_damaged_block_is_an_error(at: int) -> None:
    for data, unpack in (
        (pack_metrics([Summary(1, 0.5, None, None, 2, 1)]), unpack_metrics),
        (pack_digests([(1, b"x" * 8)]), unpack_digests),
    ):
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        with pytest.raises(ValueError, match="is damaged"):
            unpack(bytes(damaged))  # type: ignore[operator]


def values_of(step: int) -> list[float]:
    return [math.sin(step), math.cos(step)]


def test_old_steps_are_in_blocks_and_read_in_their_order(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    loop = loop_of()
    recorder.loop_started(loop)
    digests = {step: [os.urandom(8), os.urandom(8)] for step in range(3000)}
    for step in range(3000):
        log(recorder, loop, step, values_of(step))
        batch(recorder, loop, step, digests[step])
        if step % 700 == 0:
            assert recorder.flush()
            record = RecordReader(recorder.folder)
            assert [each.step for each in record.metrics] == list(range(step + 1))  # also while it is written
    recorder.close()
    connection = sqlite3.connect(tmp_path / "run" / FILE)
    ((n_metrics,),) = connection.execute("SELECT count(*) FROM metric")
    ((n_blocks,),) = connection.execute("SELECT count(*) FROM block")
    connection.close()
    assert n_metrics < 1024
    assert n_blocks >= 2 * 3
    record = RecordReader(tmp_path / "run")
    assert [(each.step, each.min, each.max, each.ranks) for each in record.metrics] == [
        (step, min(values_of(step)), max(values_of(step)), 2) for step in range(3000)
    ]
    assert [each.digests for each in record.batches] == [tuple(digests[step]) for step in range(3000)]
    assert not record.damage


def test_a_rank_that_reports_late_changes_a_step_in_a_block(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    loop = loop_of()
    recorder.loop_started(loop)
    for step in range(2000):
        log(recorder, loop, step, [1.0])
    assert recorder.flush()
    for step in range(2000):  # rank 1 comes now
        log(recorder, loop, step, [1.0, 3.0])
    recorder.close()
    record = RecordReader(tmp_path / "run")
    assert [(each.step, each.mean, each.ranks) for each in record.metrics] == [(step, 2.0, 2) for step in range(2000)]


@pytest.mark.parametrize("first", [0, 300, 512, 1500, 1999])
def test_a_loop_that_goes_back_into_a_block_replaces_its_steps(first: int, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    before = loop_of()
    recorder.loop_started(before)
    for step in range(2000):
        log(recorder, before, step, [1.0, 1.0])
        batch(recorder, before, step, [b"a" * 8] * 2)
    assert recorder.flush()
    after = loop_of(78, follows=before.key, first=first)
    recorder.loop_started(after)
    for step in range(first, 1800):
        log(recorder, after, step, [2.0, 2.0])
        batch(recorder, after, step, [b"b" * 8] * 2)
    recorder.close()
    record = RecordReader(tmp_path / "run")
    assert [(each.step, each.mean) for each in record.metrics] == [
        (step, 1.0 if step < first else 2.0) for step in range(max(first, 1800))
    ]
    assert [each.digests[0][:1] for each in record.batches] == [
        b"a" if step < first else b"b" for step in range(max(first, 1800))
    ]


def test_a_block_that_is_damaged_leaves_the_others(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    loop = loop_of()
    recorder.loop_started(loop)
    for step in range(2500):
        log(recorder, loop, step, [random.random()] * 2)
    recorder.close()
    connection = sqlite3.connect(tmp_path / "run" / FILE)
    connection.execute("UPDATE block SET data = x'00' WHERE id = 1")
    connection.commit()
    connection.close()
    record = RecordReader(tmp_path / "run")
    steps = [each.step for each in record.metrics]
    assert steps == list(range(512, 2500))
    assert any("a block of metrics is damaged" in each for each in record.damage)


def test_a_record_of_the_first_version_is_read(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    loop = loop_of()
    recorder.loop_started(loop)
    log(recorder, loop, 0, [1.0, 2.0])
    batch(recorder, loop, 0, [b"a" * 8] * 2)
    recorder.close()
    connection = sqlite3.connect(tmp_path / "run" / FILE)
    connection.executescript("DROP TABLE block; PRAGMA user_version = 1")
    connection.close()
    record = RecordReader(tmp_path / "run")
    assert [each.mean for each in record.metrics] == [1.5]
    assert [each.step for each in record.batches] == [0]
    assert not record.damage
