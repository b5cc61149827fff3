"""A thread yields before it sleeps only where that pays."""

from __future__ import annotations

import random

from monarch_kernel.net.transport.patience import Patience

MOST = 60


def waits(patience: Patience, answers: list[float]) -> tuple[int, int]:
    """Wait for answers that come after so many yields; returns the number of yields, and of waits that they have ended."""
    yields = ended = 0
    for after in answers:
        allowed = patience.begin()
        if not allowed:
            continue
        has_come = after < allowed
        yields += int(after) if has_come else allowed
        ended += has_come
        patience.end(int(after) if has_come else allowed, has_come=has_come)
    return yields, ended


def test_answers_that_come_soon_are_waited_for() -> None:
    assert waits(Patience(MOST), [12.0] * 1000) == (12_000, 1000)


def test_late_answers_cost_hardly_any_yields() -> None:
    patience = Patience(MOST)
    waits(patience, [1000.0] * 20)
    yields, ended = waits(patience, [1000.0] * 3200)
    assert ended == 0
    assert yields == 100 * MOST


def test_answers_that_become_fast_again_are_found() -> None:
    patience = Patience(MOST)
    waits(patience, [1000.0] * 100)
    _, ended = waits(patience, [20.0] * 1000)
    assert ended > 960


def test_a_late_answer_now_and_then_changes_nothing() -> None:
    chance = random.Random(1)
    answers = [1000.0 if chance.random() < 0.1 else chance.uniform(5, 25) for _ in range(5000)]
    _, ended = waits(Patience(MOST), answers)
    assert ended > 0.95 * sum(after < 1000 for after in answers)


def test_after_fast_answers_a_late_one_is_not_waited_for_long() -> None:
    patience = Patience(MOST)
    waits(patience, [4.0] * 100)
    assert patience.begin() < 20
