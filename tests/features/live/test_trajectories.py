"""Samples that ranks show: what is kept of them, and their way to the view of the mesh."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monarch_kernel import live
from monarch_kernel.actor import ProcMesh
from monarch_kernel.base.events import TrajectoryView
from monarch_kernel.features.live.trajectories import (
    KEPT,
    MAX_TEXT,
    PER_MESSAGE,
    TrajectoryBook,
    make_trajectory,
    shortened,
)
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Trajectories, Trajectory
from tests.support.waiting import LONG_S, wait_until


@pytest.mark.parametrize("ids", [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), torch.tensor([5, 6, 7])])
def test_token_ids_are_shown_as_numbers(ids: object) -> None:
    assert make_trajectory("What?", ids, None, None) == Trajectory("What?", "5 6 7")


@pytest.mark.parametrize("reward", [0.5, np.float32(0.5), torch.tensor([0.5]), torch.tensor(0.5, requires_grad=True)])
def test_a_reward_is_any_number(reward: object) -> None:
    assert make_trajectory("", "", reward, np.int64(7)) == Trajectory("", "", 0.5, 7)


def test_of_a_long_text_the_beginning_and_the_end_are_kept() -> None:
    text = f"<think>{'x' * 10_000}</think> 42"
    short = shortened(text)
    assert len(short) <= MAX_TEXT
    assert short.startswith("<think>xxx")
    assert short.endswith("xxx</think> 42")
    assert " … 9,058 characters … " in short
    assert len(text) - 9_058 == len(short.replace(" … 9,058 characters … ", ""))
    assert shortened("y" * MAX_TEXT) == "y" * MAX_TEXT


def test_half_of_a_surrogate_pair_can_be_sent() -> None:
    pack(Trajectories(1, (make_trajectory("\ud800", "ok", None, None),)))
    assert shortened("a\ud800b") == "a?b"


def told(*numbers: int, count: int = 0) -> Trajectories:
    return Trajectories(count, tuple(Trajectory("p", str(number)) for number in numbers))


def test_the_book_keeps_the_last_samples_of_a_mesh_and_counts_all() -> None:
    book = TrajectoryBook()
    for number in range(100):
        book.add("t", 10, 0, told(number))
    samples, count = book.of("t", [10])
    assert [each.completion for each in samples] == [str(number) for number in range(100 - KEPT, 100)]
    assert count == 100


def test_a_slice_has_the_samples_of_its_ranks() -> None:
    book = TrajectoryBook()
    book.add("t", 10, 0, told(1, count=5))
    book.add("t", 11, 1, told(2))
    book.add("other", 12, 0, told(3))
    assert book.of("t", [11]) == ((TrajectoryView(1, "p", "2"),), 1)
    assert book.of("t", [10, 11]) == ((TrajectoryView(0, "p", "1"), TrajectoryView(1, "p", "2")), 6)
    assert book.of("t", [12]) == ((), 0)
    assert book.of("none", [10]) == ((), 0)


def test_a_rank_that_sends_more_or_longer_ones_is_cut() -> None:
    book = TrajectoryBook()
    book.add("t", 10, 0, Trajectories(-7, tuple(Trajectory("x" * 10_000, str(number)) for number in range(50))))
    samples, count = book.of("t", [10])
    assert [each.completion for each in samples] == [str(number) for number in range(50 - PER_MESSAGE, 50)]
    assert max(len(each.prompt) for each in samples) <= MAX_TEXT
    assert count == 50


def test_samples_of_meshes_that_were_silent_longest_are_dropped() -> None:
    book = TrajectoryBook()
    for number in range(16):
        book.add(f"t{number}", number, 0, told(number))
    book.add("t0", 0, 0, told(0))
    book.add("new", 99, 0, told(99))
    assert book.of("t1", [1]) == ((), 0)
    assert book.of("t0", [0])[1] == 2
    assert book.of("new", [99])[1] == 1


def test_outside_of_ranks_it_only_checks_its_arguments() -> None:
    live.trajectory("p", "c", reward=1.0)


def test_samples_of_ranks_are_in_the_view_of_their_mesh(procs: ProcMesh) -> None:
    """Rank 0 shows more than it sends at a time; both show some outside of a loop."""
    procs.run(
        "from monarch_kernel import live\n"
        "for i in range(20 if rank == 0 else 1): live.trajectory([1, 2], f'answer {i}', reward=i / 2, version=7)"
    ).get(LONG_S)
    view = wait_until(lambda: (seen := procs.view()).trajectory_count == 21 and seen, "all samples")
    by_rank = {rank: [each for each in view.trajectories if each.rank == rank] for rank in (0, 1)}
    assert by_rank[1] == [TrajectoryView(1, "1 2", "answer 0", 0.0, 7)]
    assert by_rank[0][-1] == TrajectoryView(0, "1 2", "answer 19", 9.5, 7)
