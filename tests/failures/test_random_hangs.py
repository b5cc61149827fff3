"""Random hangs and interrupts in a notebook: hangs are named unasked, interrupts free all ranks, and the next cell is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.failures.hang_campaign import UP, HangCampaign, InterruptCampaign
from tests.failures.hang_texts import judge
from tests.failures.hangs import KINDS, draw
from tests.notebook.kernel.conftest import Notebook

SEED = 40
INTERRUPTS = 28


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    """A kernel and a mesh for both campaigns; each starts with a cell that must be right."""
    notebook = Notebook()
    try:
        notebook.ok(UP)
        yield notebook
    finally:
        notebook.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hangs_of_all_kinds_are_named_and_freed(notebook: Notebook) -> None:
    campaign = HangCampaign(notebook, print)
    for number, kind in enumerate(KINDS):
        campaign.step(draw(SEED + number, kind))
    assert campaign.report.right == len(KINDS), campaign.report.text()
    assert campaign.report.is_good, campaign.report.text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interrupts_at_random_moments_leave_a_mesh_that_works(notebook: Notebook) -> None:
    campaign = InterruptCampaign(notebook, print)
    for seed in range(INTERRUPTS):
        campaign.step(seed)
    assert campaign.report.is_good, campaign.report.text()


SEEDS = range(600)


def test_draws_are_repeatable_and_name_each_rank() -> None:
    assert {draw(seed).kind for seed in SEEDS} >= set(KINDS) - {"recv"}
    for seed in SEEDS:
        hang = draw(seed)
        assert hang.code == draw(seed).code
        compile(hang.code.partition("\n")[2] if not hang.is_local else hang.code, "cell", "exec")
        assert set(hang.truth) == set(range(4))
        assert hang.stalls


def test_the_judge_finds_what_is_wrong_and_what_is_missing() -> None:
    hang = next(
        each for seed in SEEDS if (each := draw(seed, "all_reduce")).where == "default" and "loops" in each.reason
    )
    (stall,) = hang.stalls
    waiting, missing = stall.waiting[0], stall.missing[0]
    waits, loops = (hang.truth[rank].line for rank in (waiting, missing))
    ranks = [f"[{','.join(map(str, each))}]" for each in (stall.waiting, stall.missing)]
    right = (
        f"{ranks[0]} wait for 1.0 s in all_reduce #3 (shape 4), cell [5], line {waits}; "
        f"{ranks[1]} have not started it: cell [5], line {loops}, in spin: while True: pass"
    )
    assert not judge(hang, right).wrong + judge(hang, right).lacks
    assert judge(hang, "").lacks
    assert judge(hang, right.partition("; ")[0]).lacks == [f"where {list(stall.missing)} are"]
    for false in (
        right.replace(f"line {waits}", "line 99"),
        right.replace(f"line {loops}", "line 99"),
        right.replace("all_reduce", "barrier"),
        f"{right.partition('; ')[0]}; {ranks[1]} have finished the cell",
        f"{right.partition('; ')[0]}; all ranks of the group have started it",
        right.replace(ranks[0], f"[{missing}]"),
    ):
        assert judge(hang, false).wrong, false
