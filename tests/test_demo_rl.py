"""The notebook on reinforcement learning: the reward rises, while a generator is killed and replaced."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import nbformat
import pytest

from tests.notebooks import NOTEBOOKS, Run, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NOTEBOOK = NOTEBOOKS / "04_actors_rl.ipynb"
KILLED, OTHERS = 1, (0, 2, 3)


@dataclass
class Training:
    """The notebook, run once, and what its generators have reported.

    Attributes:
        run: of the notebook.
        reports: (generator, time, step of the trainer, mean reward), in the order in which they came.
        marks: times at which the generator was killed and replaced.
    """

    run: Run
    reports: list[tuple[int, float, int, float]]
    marks: list[float]

    def by(self, generator: int, begin: float = 0.0, end: float = float("inf")) -> list[int]:
        """The steps of the trainer with whose weights a generator has flown between two times."""
        return [step for who, time, step, _ in self.reports if who == generator and begin < time < end]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    notebook = read(NOTEBOOK)
    dump = nbformat.v4.new_code_cell("import json\nprint(json.dumps([events, marks]))")  # type: ignore[no-untyped-call]
    notebook.cells.insert(len(notebook.cells) - 1, dump)
    run = Run(notebook, tmp_path_factory.mktemp("rl"))
    assert run.code == 0, run.stdout + run.stderr
    reports, marks = json.loads(run.shown_by("json.dumps"))
    return Training(run, reports, [time for time, _ in marks])


def test_it_is_committed_without_outputs_for_our_kernel() -> None:
    notebook = read(NOTEBOOK)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "monarch"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell for cell in code if cell.outputs or cell.execution_count]


def test_no_cell_fails(training: Training) -> None:
    code = [cell for cell in training.run.notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not [cell for cell in code if any(output.output_type == "error" for output in cell.outputs)]


def test_the_reward_rises(training: Training) -> None:
    early = [reward for _, _, step, reward in training.reports if step < 5]
    late = [reward for _, _, step, reward in training.reports if step >= 100]
    assert sum(early) / len(early) < 0.25
    assert sum(late) / len(late) > 0.75


def test_the_policy_lands_where_it_crashed_before(training: Training) -> None:
    shown = training.run.shown_by("after = scene")
    before, after = (int(count) for count in re.findall(r"trained: (\d+) of 40 have landed", shown))
    assert before <= 3
    assert after >= 30


def test_a_killed_generator_is_missed_by_nobody(training: Training) -> None:
    killed, replaced = training.marks
    assert training.by(KILLED, end=killed)
    assert not training.by(KILLED, killed + 0.5, replaced)
    for generator in OTHERS:
        assert training.by(generator, killed, replaced)[-1] >= 45  # the trainer was at about 30 when it was killed


def test_its_death_is_shown(training: Training) -> None:
    shown = "".join(training.run.shown_by(cell) for cell in ("os.kill(pid", "watch(until=55)"))
    assert "killed by SIGKILL" in shown


def test_its_successor_flies_with_the_weights_of_the_day(training: Training) -> None:
    steps = training.by(KILLED, training.marks[1])
    assert steps[0] >= 55
    assert steps[-1] >= 105


def test_the_pictures_are_on_the_page(training: Training) -> None:
    assert training.run.html.count('src="data:image/svg+xml;base64,') == 5
