"""Which cell or message of a comm an interrupt applies to that comes while no code of the user runs. Pure."""

from __future__ import annotations

import signal

import pytest

from monarch_kernel.notebook.kernel.interrupts import KernelInterrupts


@pytest.fixture
def kernel() -> KernelInterrupts:
    return KernelInterrupts(lambda delay_s, function: None)


def is_interrupted(kernel: KernelInterrupts, cell: str) -> bool:
    """Handle a cell as the kernel does."""
    try:
        with kernel.request(None):
            kernel.cell_starts(cell)
            try:
                with kernel.user_code():
                    return False
            except KeyboardInterrupt:
                return True
    finally:
        kernel.cell_ended(cell)


def test_a_cell_that_waits_for_the_main_shell_is_interrupted(kernel: KernelInterrupts) -> None:
    with kernel.request(None):
        kernel.cell_arrived("second", None)
        kernel.cell_arrived("third", None)
        kernel.cell_ended("first")
    kernel.interrupt(signal.SIGINT, None)
    assert [is_interrupted(kernel, cell) for cell in ("second", "third")] == [True, False]


def test_an_interrupt_passes_a_cell_that_had_not_to_wait(kernel: KernelInterrupts) -> None:
    """The main thread is idle when the first one arrives, so the signal may be older than this cell."""
    for cell in ("first", "second", "third"):
        kernel.cell_arrived(cell, None)
    kernel.interrupt(signal.SIGINT, None)
    assert [is_interrupted(kernel, cell) for cell in ("first", "second", "third")] == [False, True, False]


def test_an_interrupt_of_cells_that_never_start_applies_to_no_later_one(kernel: KernelInterrupts) -> None:
    for cell in ("first", "second"):
        kernel.cell_arrived(cell, None)
    kernel.interrupt(signal.SIGINT, None)
    for cell in ("first", "second"):
        kernel.cell_ended(cell)
    kernel.cell_arrived("later", None)
    assert not is_interrupted(kernel, "later")


def test_an_interrupt_of_an_idle_kernel_does_nothing(kernel: KernelInterrupts) -> None:
    kernel.interrupt(signal.SIGINT, None)
    kernel.cell_arrived("first", None)
    assert not is_interrupted(kernel, "first")


def passes(kernel: KernelInterrupts, message: str) -> None:
    """Handle a message of a comm that calls no code of the user."""
    with kernel.request(None):
        kernel.cell_starts(message)
    kernel.cell_ended(message)


def wait_behind_a_message(kernel: KernelInterrupts, messages: str, cells: str = "") -> None:
    """Let messages and cells arrive while the callback of another message runs, which ends."""
    with kernel.request(None):
        for message in messages.split():
            kernel.cell_arrived(message, None, is_message=True)
        for cell in cells.split():
            kernel.cell_arrived(cell, None)


def test_a_message_of_a_comm_that_waits_is_interrupted(kernel: KernelInterrupts) -> None:
    wait_behind_a_message(kernel, "second third")
    kernel.interrupt(signal.SIGINT, None)
    assert [is_interrupted(kernel, message) for message in ("second", "third")] == [True, False]


def test_an_interrupt_passes_messages_without_code_of_the_user(kernel: KernelInterrupts) -> None:
    wait_behind_a_message(kernel, "second third")
    kernel.interrupt(signal.SIGINT, None)
    passes(kernel, "second")
    assert is_interrupted(kernel, "third")


def test_a_message_does_not_use_up_the_interrupt_of_a_run_of_cells(kernel: KernelInterrupts) -> None:
    wait_behind_a_message(kernel, "second", "third fourth")
    kernel.interrupt(signal.SIGINT, None)
    assert is_interrupted(kernel, "second")
    assert [is_interrupted(kernel, cell) for cell in ("third", "fourth")] == [True, False]


def test_an_interrupt_after_the_callback_of_a_message_applies_to_the_next_one(kernel: KernelInterrupts) -> None:
    kernel.cell_arrived("first", None, is_message=True)
    with kernel.request(None):
        kernel.cell_arrived("second", None, is_message=True)
        kernel.cell_starts("first")
        with kernel.user_code():
            pass
        kernel.interrupt(signal.SIGINT, None)
    kernel.cell_ended("first")
    assert is_interrupted(kernel, "second")


def test_an_interrupt_older_than_a_message_does_not_apply_to_it(kernel: KernelInterrupts) -> None:
    kernel.interrupt(signal.SIGINT, None)
    kernel.cell_arrived("first", None, is_message=True)
    assert not is_interrupted(kernel, "first")
