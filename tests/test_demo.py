"""The quickstart notebook runs from top to bottom, and stops at a cell that fails on one rank."""

from __future__ import annotations

import itertools
import math
import re
import sysconfig
from collections import Counter
from pathlib import Path

import nbformat
import pytest

from tests.support.notebooks import NOTEBOOKS, Run, read, shrink, text_of

pytestmark = pytest.mark.timeout(400)

QUICKSTART = NOTEBOOKS / "01_quickstart.ipynb"
STEPS = 40  # instead of the notebook's 500: enough to see the loss fall
WINDOWS = 16  # instead of 64 for each rank, in each of four validations
NATS = re.compile(r"validation loss (?:before: |after: )?(\d\.\d+)")


def shows_line(text: str, source: str) -> bool:
    """Whether a line starts with the source, after a mark or a number; a repr of the source does not count."""
    return re.search(rf"^\W*(?:\d+\W+)?{re.escape(source)}", text, re.MULTILINE) is not None


def nats(text: str) -> float:
    match = NATS.search(text)
    assert match, text
    return float(match[1])


def pair_loss(train: bytes, held_out: bytes, smoothing: float) -> float:
    """Loss of a table of byte pairs in nats per byte, computed without torch."""
    pairs, firsts = Counter(itertools.pairwise(train)), Counter(train[:-1])
    total = sum(
        count * math.log((pairs[pair] + smoothing) / (firsts[pair[0]] + 256 * smoothing))
        for pair, count in Counter(itertools.pairwise(held_out)).items()
    )
    return -total / (len(held_out) - 1)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The result of the quickstart, run once with fewer steps and a smaller model."""
    notebook = read(QUICKSTART)
    shrink(notebook)
    (training,) = [cell for cell in notebook.cells if "steps = 500\n" in cell.source]
    training.source = training.source.replace("steps = 500\n", f"steps = {STEPS}\n")
    (validation,) = [cell for cell in notebook.cells if "validate(count=64)" in cell.source]
    validation.source = validation.source.replace("validate(count=64)", f"validate(count={WINDOWS})")
    return Run(notebook, tmp_path_factory.mktemp("demo"))


def test_every_cell_runs(demo: Run) -> None:
    assert demo.code == 0, demo.stdout + demo.stderr
    code = [cell for cell in demo.notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    failed = [cell for cell in code if any(output.output_type == "error" for output in cell.outputs)]
    assert [cell.metadata.get("tags") for cell in failed] == [["raises-exception"]]
    assert "all cells as expected" in demo.stdout


def test_equal_results_are_shown_once(demo: Run) -> None:
    assert re.findall(r"\[[\d,-]+\] 6\.0", demo.shown_by("--out totals")) == ["[0-3] 6.0"]
    greetings = demo.shown_by("I am rank")
    assert [f"[{rank}] I am rank {rank} of 4, on cpu" in greetings for rank in range(4)] == [True] * 4
    assert "6.0" in demo.shown_by("totals.item(gpus=0)")


def test_the_loss_falls(demo: Run) -> None:
    before = demo.shown_by('print(f"validation loss before')
    after = demo.shown_by('print(f"validation loss after')
    assert abs(nats(before) - math.log(256)) < 0.2
    assert nats(after) < nats(before) - 1.5
    # The loss is a mean over all ranks, so every rank must print the same.
    assert re.findall(r"(\[[\d,-]+\]) validation loss", before + after) == ["[0-3]", "[0-3]"]


def test_values_are_pulled_and_pushed(demo: Run) -> None:
    assert f"{STEPS} steps so far" in demo.shown_by('history = trainers["history"]')
    assert f"[0-3] lr 0.0001, {STEPS + 20} steps" in demo.shown_by("val_loss = validate()")


def test_the_rank_that_fails_is_named_with_its_line(demo: Run) -> None:
    shown = demo.shown_by("# the bug")
    assert "RemoteError" in shown
    assert "[2]" in shown
    assert shows_line(shown, "loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())")
    assert "Expected input batch_size (512) to match target batch_size (508)" in shown


def test_the_failure_loses_no_state(demo: Run) -> None:
    shown = demo.shown_by("warmup=1)")
    assert f"[0-3] {STEPS + 25} steps" in shown
    assert nats(shown) < nats(demo.shown_by('print(f"validation loss after')) + 0.1


def test_actors_answer_by_rank(demo: Run) -> None:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)[:3_000_000]
    cut = len(text) * 9 // 10
    train, held_out = text[:cut], text[cut:]
    share = len(train) // 4

    shown = demo.shown_by("evaluators.observe.call")
    assert f"[0-3] {share - 1}" in shown
    scores = [float(score) for score in re.findall(r"^\s*\[\d\] (\d\.\d+)", shown, re.MULTILINE)]
    expected = [pair_loss(train[rank * share : (rank + 1) * share], held_out, smoothing=0.1) for rank in range(4)]
    assert scores == pytest.approx(expected, abs=1e-3)
    assert f"byte pairs {scores[0]:.3f}, GPT" in demo.shown_by("call_one")


def test_the_page_shows_what_the_notebook_shows(demo: Run) -> None:
    assert "RemoteError" in demo.html
    assert "validation loss after" in demo.html


@pytest.mark.slow
def test_a_cell_that_fails_on_one_rank_ends_the_run(tmp_path: Path) -> None:
    notebook = read(QUICKSTART)
    (hello,) = [place for place, cell in enumerate(notebook.cells) if "I am rank" in cell.source]
    source = "%%remote trainers\nbatch = [1, 2]\nif rank == 1:\n    batch[7]  # too far\n"
    notebook.cells.insert(hello + 1, nbformat.v4.new_code_cell(source))  # type: ignore[no-untyped-call]

    run = Run(notebook, tmp_path)

    assert run.code == 1
    assert "\nCellExecutionError after" in run.stderr
    # nbclient shows the cell's source between such lines, and its traceback after them.
    traceback = re.split(r"^ *-{18}$", run.stderr, flags=re.MULTILINE)[-1]
    assert "[1]" in traceback
    assert shows_line(traceback, "batch[7]  # too far")
    assert "IndexError: list index out of range" in traceback
    assert "IndexError" in run.html
    assert text_of(run.notebook.cells[hello])
    later = [cell for cell in run.notebook.cells[hello + 2 :] if cell.cell_type == "code"]
    assert not [cell for cell in later if cell.outputs or cell.execution_count]
