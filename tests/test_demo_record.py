"""The notebook on records repeats a run with two knobs and a death, and names a line that was changed."""

from __future__ import annotations

import re

import pytest

from tests.support.notebooks import NOTEBOOKS, Run, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(read(NOTEBOOKS / "09_record.ipynb"), tmp_path_factory.mktemp("record"))
    assert run.code == 0, run.stdout + run.stderr
    return run


def test_the_run_is_repeated_with_equal_hashes(run: Run) -> None:
    text = run.shown_by("again = run.replay")
    assert "all results that were compared are equal" in text
    assert re.search(
        r"compared: 3 cells, 150 batches, 150 metrics, \d generators, [1-9] sets? of parameters; no difference", text
    )


def test_the_knobs_and_the_death_are_recorded(run: Run) -> None:
    text = run.shown_by("print(run.events)")
    assert re.search(r"^1  \d+  lr  0.003  False$", text, re.MULTILINE)
    assert re.search(r"^1  \d+  scale  0.5  False$", text, re.MULTILINE)
    assert re.search(r"  death  trainers  1  None  None  killed by SIGKILL", text)
    assert "  recovery  trainers  None  1  " in text


def test_the_changed_line_is_named_first(run: Run) -> None:
    text = run.shown_by("other = run.replay")
    assert re.search(
        r"^first difference: cell \[\d+\] differs: -model = .*Dropout\(0.1\).*Dropout\(0.05\)", text, re.MULTILINE
    )
    assert re.search(r"^  cell \[\d+\], step \d+: loss differs: ", text, re.MULTILINE)


def test_the_script_has_the_schedule(run: Run) -> None:
    assert re.search(r"KNOBS = \{1: \{'lr': \{\d+: 0.003\}, 'scale': \{\d+: 0.5\}\}\}", run.shown_by("run.script("))
