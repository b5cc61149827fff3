"""The comparison of two records names what differs first, with its cause."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.features.record.differences import compare
from monarch_kernel.features.record.reading import RecordReader
from tests.features.record.runs import TRAIN, write_run


def first(tmp_path: Path, **changes: Any) -> str:
    found = compare(write_run(tmp_path / "old", **changes.pop("old", {})), write_run(tmp_path / "new", **changes))
    return str(found.first)


def test_equal_runs_have_no_difference(tmp_path: Path) -> None:
    found = compare(write_run(tmp_path / "old"), write_run(tmp_path / "new", name="u"))
    assert found.first is None
    assert found.are_equal
    assert dict(found.compared) == {"cells": 2, "batches": 6, "metrics": 6, "generators": 0, "parameters": 1}
    assert str(found).startswith("compared: 2 cells, 6 batches, 6 metrics, 1 set of parameters; no difference")


def test_a_changed_batch_is_named_before_its_effect(tmp_path: Path) -> None:
    assert first(tmp_path, batch_of=3, loss_from=3) == "cell [2], step 3: batch differs on rank 1 (loader)"


def test_an_effect_before_the_batch_is_named_first(tmp_path: Path) -> None:
    assert first(tmp_path, batch_of=4, loss_from=2).startswith("cell [2], step 2: loss differs: 0.5 -> ")


def test_a_changed_package_is_named(tmp_path: Path) -> None:
    old = {"torch": "2.13.0"}
    assert first(tmp_path, old=old, torch="2.14.1", loss_from=0) == "packages differ: torch 2.13.0 -> 2.14.1"


def test_a_changed_cell_is_named_with_its_lines(tmp_path: Path) -> None:
    code = TRAIN.replace("0.1", "0.2")
    text = first(tmp_path, code=code, loss_from=0)
    assert text.startswith("cell [2] differs: -    live.log(loss=train(step, live.knob('lr', 0.1)))")
    assert "+    live.log(loss=train(step, live.knob('lr', 0.2)))" in text


def test_a_knob_at_another_step_is_named(tmp_path: Path) -> None:
    assert first(tmp_path, turns=((4, 0.5),), loss_from=3) == "cell [2], step 2: lr is 0.5 -> not set"


def test_parameters_at_the_end_are_compared(tmp_path: Path) -> None:
    assert first(tmp_path, parameters=b"q" * 8) == "cell [2], step 6: parameters differ on ranks [0-1]"


def test_digests_of_an_earlier_version_are_not_compared(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old")
    old.close()
    connection = sqlite3.connect(old.path)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    found = compare(RecordReader(tmp_path / "old"), write_run(tmp_path / "new", batch_of=3, parameters=b"q" * 8))
    assert found.are_equal
    assert found.first is None
    assert (found.compared["batches"], found.compared["parameters"]) == (0, 0)
    assert found.compared["metrics"] > 0
    assert "digests of batches and parameters are not compared" in str(found.all)


def test_only_steps_before_a_limit_are_compared(tmp_path: Path) -> None:
    old, new = write_run(tmp_path / "old"), write_run(tmp_path / "new", loss_from=3)
    assert compare(old, new, until_step=3).are_equal
    assert not compare(old, new, until_step=4).are_equal


@pytest.mark.parametrize("turns", [(), ((2, 0.5), (4, 0.2))])
def test_each_kind_is_named_once_for_a_loop(tmp_path: Path, turns: tuple[tuple[int, float], ...]) -> None:
    old, new = write_run(tmp_path / "old"), write_run(tmp_path / "new", turns=turns, loss_from=0)
    kinds = [each.kind for each in compare(old, new)]
    assert sorted(kinds) == ["knob", "metric"]
    assert not compare(old, new).are_equal


@pytest.mark.parametrize(("outcome", "end"), [("interrupted", 4), ("", 5)])
def test_a_replay_of_a_loop_that_was_cut_off_is_compared_up_to_there(outcome: str, end: int, tmp_path: Path) -> None:
    old = write_run(tmp_path / "a", outcome=outcome, reached=4)
    again = write_run(tmp_path / "b", loss_from=end)
    found = compare(old, again, mesh="t")
    assert found.are_equal, found
    assert found.compared["metrics"] == end
    assert not compare(old, again).are_equal  # two runs differ in what one has done after that
    assert not compare(old, write_run(tmp_path / "c", loss_from=end - 1), mesh="t").are_equal


def test_a_replay_is_not_compared_with_steps_that_only_some_ranks_have_done(tmp_path: Path) -> None:
    old = write_run(tmp_path / "a", outcome="interrupted", reached=5, behind=3)
    again = write_run(tmp_path / "b", reached=5)
    found = compare(old, again, mesh="t")
    assert found.are_equal, found
    assert (found.compared["metrics"], found.compared["batches"]) == (3, 3)


def test_a_loop_that_only_one_record_has_is_a_difference(tmp_path: Path) -> None:
    assert first(tmp_path, loops=2) == "cell [2] has 1 loop -> 2 loops"
