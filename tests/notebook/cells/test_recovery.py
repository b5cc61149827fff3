"""What the recovery of a cell says, without processes."""

from __future__ import annotations

from monarch_kernel.notebook.cells.recovery import again_failed_text


def test_an_earlier_cell_that_fails_again_names_the_cell_whose_result_is_lost() -> None:
    assert again_failed_text("t", 5, 2) == (
        "cell [5] has no result: to recover its loop, cell [2] ran again on t, and failed. Correct and run cell [2], then "
        "%mesh rollback t and cell [5]; its loop continues from the last snapshot"
    )
