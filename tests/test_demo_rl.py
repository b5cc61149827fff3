"""The notebook on reinforcement learning: the reward rises, while a generator is killed and replaced."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import nbformat
import pytest

from tests.support.notebooks import NOTEBOOKS, Run, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NOTEBOOK = NOTEBOOKS / "04_actors_rl.ipynb"
VICTIM, OTHERS = 1, (0, 2, 3)


@dataclass
class Training:
    """A run of the notebook, and the reports of its generators.

    Attributes:
        run: result of the notebook.
        rounds: (generator, step of the trainer, mean reward), in the order of arrival.
        killed: the step at which a generator was killed.
        replaced: the step at which it was replaced.
    """

    run: Run
    rounds: list[tuple[int, int, float]]
    killed: int
    replaced: int

    def steps_of(self, generator: int) -> list[int]:
        """The trainer's steps with whose weights a generator has flown."""
        return [step for number, step, _ in self.rounds if number == generator]

    def reward(self, begin: int, end: int) -> float:
        """The mean reward between two steps."""
        rewards = [reward for _, step, reward in self.rounds if begin <= step < end]
        return sum(rewards) / len(rewards)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    notebook = read(NOTEBOOK)
    dump = nbformat.v4.new_code_cell("import json\nprint(json.dumps([rounds, marks]))")  # type: ignore[no-untyped-call]
    notebook.cells.insert(len(notebook.cells) - 1, dump)
    run = Run(notebook, tmp_path_factory.mktemp("rl"))
    assert run.code == 0, run.stdout + run.stderr
    rounds, marks = json.loads(run.shown_by("json.dumps"))
    killed, replaced = (step for step, _ in marks)
    return Training(run, rounds, killed, replaced)


def test_no_cell_fails(training: Training) -> None:
    code = [cell for cell in training.run.notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not [cell for cell in code if any(output.output_type == "error" for output in cell.outputs)]


def test_the_reward_rises(training: Training) -> None:
    assert training.reward(0, 5) < 0.25
    assert training.reward(100, 111) > 0.75


def test_the_reward_rises_while_a_generator_is_dead(training: Training) -> None:
    killed, replaced = training.killed, training.replaced
    assert training.reward(replaced - 10, replaced) > training.reward(killed - 10, killed) + 0.1


def test_the_policy_lands_where_it_crashed_before(training: Training) -> None:
    shown = training.run.shown_by("after = scene")
    before, after = (int(count) for count in re.findall(r"(\d+) of 40 have landed", shown))
    assert before <= 3
    assert after >= 30


def test_a_killed_generator_does_not_hold_up_the_others(training: Training) -> None:
    assert training.steps_of(VICTIM)[0] == 0
    # Reports that it had sent before it was killed may arrive later.
    assert not [step for step in training.steps_of(VICTIM) if training.killed + 2 < step < training.replaced]
    for generator in OTHERS:
        during = [step for step in training.steps_of(generator) if training.killed < step < training.replaced]
        assert len(during) > 10


def test_the_death_of_the_generator_is_shown(training: Training) -> None:
    shown = training.run.shown_by("os.kill(pid")
    assert "generators[1] failed" in shown
    assert "RankDied: killed by SIGKILL" in shown


def test_the_new_generator_uses_current_weights(training: Training) -> None:
    later = [step for step in training.steps_of(VICTIM) if step > training.killed + 2]
    assert training.replaced <= later[0] < training.replaced + 20
    assert later[-1] > 100


def test_the_pictures_are_on_the_page(training: Training) -> None:
    assert training.run.html.count('src="data:image/svg+xml;base64,') == 5
