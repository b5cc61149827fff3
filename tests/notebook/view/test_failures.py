"""Failures that no code waited for, as text: of actors, and of ranks that need not have actors."""

from __future__ import annotations

from monarch_kernel.errors import Failure, MeshFailure
from monarch_kernel.notebook.view.failures import failure_block, failure_line

DIED = Failure("lost", "RankDied", "killed by SIGKILL", host="box", pid=7)
RAISED = Failure("exception", "ValueError", "no", host="box", pid=7)


def test_the_death_of_ranks_says_nothing_about_actors() -> None:
    one = failure_block(MeshFailure("t", {1: DIED}), color=False)
    assert one[0] == "MeshFailure: t[1] died"
    assert one[-1] == "Cells and calls that need t[1] fail until it is replaced."
    two = failure_block(MeshFailure("t", {1: DIED, 2: DIED}), color=False)
    assert two[0] == "MeshFailure: t[1-2] died"
    assert two[-1] == "Cells and calls that need t[1-2] fail until they are replaced."
    line = failure_line(MeshFailure("t", {1: DIED}), color=False)
    assert line == "MeshFailure: t[1] died for the same reason: RankDied: killed by SIGKILL"
    assert "actor" not in "\n".join([*one, *two, line])


def test_the_failure_of_an_actor_says_that_no_actor_handled_it() -> None:
    lines = failure_block(MeshFailure("trainer", {0: RAISED}, actor=5), color=False)
    assert lines[0] == "MeshFailure: trainer[0] failed, and no actor handled the failure"
    assert lines[-1] == "Calls that need trainer[0] raise SupervisionError; other actors continue."
