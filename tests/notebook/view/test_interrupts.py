"""Tests the text of the outcome of an interrupt."""

from __future__ import annotations

from monarch_kernel.notebook.view.interrupts import InterruptOutcome, interrupt_text


def test_all_stopped() -> None:
    assert interrupt_text(InterruptOutcome("t", stopped=[0, 1])) == "interrupted on [0-1]; their state is kept"


def test_all_had_finished() -> None:
    assert interrupt_text(InterruptOutcome("t", finished=[0, 1])) == "interrupted, but all ranks ran to their end"


def test_some_finished_and_some_failed() -> None:
    outcome = InterruptOutcome("t", "cancelled", stopped=[1], finished=[0], failed={"failed: ValueError: x": [2]})
    assert interrupt_text(outcome) == (
        "cancelled on [1]; its state is kept; [0] had finished; [2] failed: ValueError: x"
    )


def test_the_text_says_what_ranks_did_that_were_not_interrupted() -> None:
    outcome = InterruptOutcome("t", stopped=[2], finished=[4], completed=[0], released=[3], failed={"lost: died": [1]})
    assert interrupt_text(outcome) == (
        "interrupted on [2]; its state is kept; [4] had finished; [0] ran to its end; [1] lost: died; "
        "[3] waited for [1] and was released"
    )


def test_stuck_ranks_are_shown_with_their_position_and_remedies() -> None:
    outcome = InterruptOutcome(
        "t", stopped=[0], stuck=[1, 2], waited_s=1.84, doing=["[1-2] cell [5], line 2: spin()", "    called from f()"]
    )
    assert interrupt_text(outcome) == (
        "interrupted on [0]; its state is kept; [1-2] did not stop within 1.8 s\n"
        "  [1-2] cell [5], line 2: spin()\n"
        "      called from f()\n"
        "They stop when they return to Python, unless they catch KeyboardInterrupt; cells on t[1:3] wait until then.\n"
        "%mesh interrupt t[1:3] --abort also aborts their process groups; all other state is kept.\n"
        "%mesh stacks t shows what they do now; "
        "%mesh restart t[1:3] replaces them, and their state is lost; the other ranks keep theirs."
    )


def test_one_stuck_rank_is_it() -> None:
    said = interrupt_text(InterruptOutcome("t", stopped=[0], stuck=[1], n_ranks=2, waited_s=1.8))
    assert said.splitlines()[1:] == [
        "It stops when it returns to Python, unless it catches KeyboardInterrupt; cells on t[1] wait until then.",
        "%mesh interrupt t[1] --abort also aborts its process groups; all other state is kept.",
        "%mesh stacks t shows what it does now; "
        "%mesh restart t[1] replaces it, and its state is lost; the other ranks keep theirs.",
    ]
    alone = interrupt_text(InterruptOutcome("t", stuck=[0], n_ranks=1, asks_abort=True, aborted=[0]))
    assert "\nIts process groups were aborted" in alone
    assert alone.endswith("%mesh stacks t shows what it does now; %mesh restart t replaces it, and its state is lost.")


def test_an_abort_is_not_offered_for_a_process_that_runs_nothing() -> None:
    said = interrupt_text(InterruptOutcome("t", stopped=[0], stuck=[1], halted=[1], n_ranks=2, waited_s=1.8))
    assert said.splitlines()[1:] == [
        "It stops when its process runs again; cells on t[1] wait until then.",
        "%mesh stacks t shows what it does now; "
        "%mesh restart t[1] replaces it, and its state is lost; the other ranks keep theirs.",
    ]
    one_runs = interrupt_text(InterruptOutcome("t", stuck=[1, 2], halted=[1], n_ranks=2, waited_s=1.8))
    assert "They stop when they return to Python" in one_runs
    assert "--abort" in one_runs
    both = interrupt_text(InterruptOutcome("t", stuck=[1, 2], halted=[1, 2], n_ranks=2, waited_s=1.8))
    assert "They stop when their processes run again; cells on t wait until then." in both


def test_waits_that_an_interrupt_ended_are_shown() -> None:
    outcome = InterruptOutcome("t", stopped=[1], finished=[0], waits=["[1] waited for 14 s in all_reduce #3"])
    assert interrupt_text(outcome) == (
        "interrupted on [1]; its state is kept; [0] had finished\n  [1] waited for 14 s in all_reduce #3"
    )


def test_an_abort_is_reported() -> None:
    said = interrupt_text(InterruptOutcome("t", stuck=[0, 1], n_ranks=2, asks_abort=True, aborted=[0, 1], waited_s=1.0))
    assert "cells on t wait" in said  # the whole mesh
    assert "Their process groups were aborted; the mesh forms its group again before the next cell." in said
    assert said.endswith("%mesh restart t replaces them, and their state is lost.")
    assert "--abort" not in said


def test_only_what_ranks_have_reported_counts_as_aborted() -> None:
    outcome = InterruptOutcome("t", stuck=[0, 1, 2], n_ranks=4, asks_abort=True, aborted=[1], silent=[2])
    said = interrupt_text(outcome).splitlines()
    assert said[2:5] == [
        "The process groups of [1] were aborted; the mesh forms its group again before the next cell.",
        "[2] can't say whether its process groups were aborted.",
        "[0] had no process group to abort.",
    ]
    none = interrupt_text(InterruptOutcome("t", stuck=[0], n_ranks=1, asks_abort=True))
    assert "were aborted" not in none
    assert "[0] had no process group to abort." in none


def test_selectors_of_ranks() -> None:
    def selector(stuck: list[int], axes: int = 1) -> str:
        said = interrupt_text(InterruptOutcome("t", finished=[9], stuck=stuck, axes=axes))
        return said.split("cells on ")[1].split(" wait")[0]

    assert selector([3]) == "t[3]"
    assert selector([2, 3, 4]) == "t[2:5]"
    assert selector([0, 2]) == "t[[0, 2]]"
    assert selector([2, 3], axes=2) == "t[[2, 3]]"


def test_ranks_that_had_not_started() -> None:
    said = interrupt_text(InterruptOutcome("t", stopped=[0], dropped=[1], doing=["[1] cell [3], line 2: spin()"]))
    assert said.splitlines()[:2] == [
        "interrupted on [0]; its state is kept; [1] had not started it and still runs earlier work",
        "  [1] cell [3], line 2: spin()",
    ]
