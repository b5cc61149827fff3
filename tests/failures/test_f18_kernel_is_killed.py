"""F18: the kernel is killed while a detached mesh runs a cell; the mesh goes on, and another program attaches to it."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from tests.failures.machines import family
from tests.runtime.detached.test_session import GRACE_S, Program, attach_mesh, program, root
from tests.support.processes import is_alive
from tests.support.waiting import LONG_S, wait_until

__all__ = ["program", "root"]  # fixtures


@pytest.mark.slow  # agents notice the loss after their grace period
def test_ranks_survive_a_killed_program_and_another_attaches(program: Program, root: Path, tmp_path: Path) -> None:
    program.do("cell")
    below = [process for agent in program.agents for process in family(agent)]
    program.kill()
    until = time.monotonic() + 3 * GRACE_S
    while time.monotonic() < until:  # longer than the grace
        assert all(map(is_alive, below))
        time.sleep(0.01)
    manifest = root / "t" / "manifest"
    assert stat.S_IMODE(manifest.stat().st_mode) == 0o600
    session, mesh = attach_mesh(root)
    try:
        ((cell, future),) = session.runtime.attachment.resumed
        assert (cell.number, cell.procs) == (5, mesh.procs)
        assert any("count" in chunk.text for event in session.runtime.listeners.backlog for chunk in event.chunks)
        (tmp_path / "go").touch()
        assert future.wait(LONG_S)
        assert mesh.run("kept").get(LONG_S).values() == (0, 7, 14, 21)
        assert {pid for (pid,) in mesh.run("os.getpid(),").get(LONG_S).values()} <= {process.pid for process in below}
        assert [len(records) > 10 for records in mesh.logs().values()] == [True] * 4
    finally:
        session.close()
    wait_until(lambda: not any(map(is_alive, below)), "all to end with %mesh down")
    assert not root.exists()
