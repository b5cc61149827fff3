"""Tests the line about ranks that have failed while others go on."""

from __future__ import annotations

import pytest

from monarch_kernel.errors import Failure, Frame
from monarch_kernel.notebook.view.early_failures import early_failure_text

HERE = Frame("<remote cell [5]>", 3, "<module>", user=True)
IN_STEP = Frame("/home/me/train.py", 12, "step", user=True)
LIBRARY = Frame("/usr/lib/python3/site-packages/torch/nn.py", 9, "forward")
OF_CHILD = "\n\n-- Process 0 terminated:\nTraceback (most recent call last):\n  work(i)\nValueError: row 7 is corrupt\n"
EARLY = Failure("exception", "ValueError", "early", (HERE,))
KILLED = Failure(
    "lost", "RankDied", "killed by SIGKILL (likely); it held 12 MiB at the last reading; it was running cell [5]"
)


@pytest.mark.parametrize(
    ("failures", "going_on", "text"),
    [
        (
            {1: Failure("lost", "RankDied", "the process ended with exit code 5", exit_code=5)},
            [0],
            "[1] died (exit code 5); [0] goes on; Kernel > Interrupt ends it",
        ),
        (
            {1: EARLY},
            [0, 2, 3],
            "[1] failed with ValueError: early (line 3); [0,2-3] go on; Kernel > Interrupt ends them",
        ),
        (
            {2: KILLED, 1: EARLY, 3: EARLY},
            [0],
            "[1,3] failed with ValueError: early (line 3), [2] died: killed by SIGKILL (likely); [0] goes on; "
            "Kernel > Interrupt ends it",
        ),
        (
            {0: Failure("exception", "KeyError", "'a'\nb", (HERE, IN_STEP, LIBRARY))},
            [1],
            "[0] failed with KeyError: 'a' … (/home/me/train.py, line 12); [1] goes on; Kernel > Interrupt ends it",
        ),
        (
            {1: Failure("exception", "ProcessRaisedException", OF_CHILD, (HERE,))},
            [0],
            "[1] failed with ProcessRaisedException: … ValueError: row 7 is corrupt (line 3); [0] goes on; "
            "Kernel > Interrupt ends it",
        ),
    ],
)
def test_the_line_names_ranks_causes_and_the_way_out(
    failures: dict[int, Failure], going_on: list[int], text: str
) -> None:
    assert early_failure_text(failures, going_on, 5, "Kernel > Interrupt") == text


def test_the_line_is_bounded() -> None:
    failures = {rank: Failure("exception", "ValueError", "x" * 10_000 + str(rank)) for rank in range(1, 9)}
    failures |= {rank: Failure("exception", f"Error{rank}", "") for rank in range(9, 20)}
    text = early_failure_text(failures, [0], 5, "Ctrl-C")
    assert len(text) < 1_000
    assert text.endswith("[12-19] failed in other ways; [0] goes on; Ctrl-C ends it")


def test_a_line_of_another_cell_has_its_number() -> None:
    failure = Failure("exception", "ValueError", "early", (HERE,))
    assert "(cell [5], line 3)" in early_failure_text({1: failure}, [0], 6, "Ctrl-C")
