"""The program waits for ranks that have not taken what it has sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from monarch_kernel.features.tensors.backlog import Backlog
from monarch_kernel.features.tensors.messages import DescribeTensors
from tests.tensor.in_process import InProcess


class Ranks:
    """Answers, and notes which questions the program has waited for."""

    def __init__(self) -> None:
        self.asked = 0
        self.waited: list[int] = []

    def ask(self) -> Any:
        number = self.asked
        self.asked += 1
        return SimpleNamespace(get=lambda: self.waited.append(number))


def test_the_program_waits_for_the_oldest_answer_at_the_limit() -> None:
    backlog, ranks = Backlog(100), Ranks()
    for _ in range(10):
        backlog.add(10, ranks.ask)
    assert (ranks.asked, ranks.waited, backlog.nbytes) == (3, [], 100)
    backlog.add(10, ranks.ask)
    assert (ranks.waited, backlog.nbytes) == ([0], 80)
    for _ in range(10):
        backlog.add(10, ranks.ask)
    assert ranks.waited == [0, 1, 2, 3]
    assert backlog.nbytes <= 100


def test_a_value_that_is_larger_than_the_limit_is_waited_for() -> None:
    backlog, ranks = Backlog(100), Ranks()
    backlog.add(500, ranks.ask)
    assert (ranks.waited, backlog.nbytes) == ([0], 0)


def test_tensors_that_are_put_count() -> None:
    ranks = InProcess(2)
    ranks.device.target.backlog = Backlog(1000)
    for _ in range(4):
        ranks.device.put(torch.zeros(100))
    questions = [message for message in ranks.messages if isinstance(message, DescribeTensors)]
    assert len(questions) == 4 * 2
    assert ranks.device.target.backlog.nbytes < 1000
