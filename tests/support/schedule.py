"""The distribution of tests over processes, if several processes share them.

Most tests wait most of the time, so two test processes make good use of two cores. A module stays in one process, because its
tests share fixtures; so do the modules that share a Ray cluster, and those that open JupyterLab. What takes longest starts
first, so that the processes end at about the same time. Modules that end the session of the test process run last: its next
agent and zygote would take three seconds of processor time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

__all__ = ["Schedule", "ends_session", "longest_first", "scope_of"]

TOGETHER = {
    "tests/lab": "JupyterLab",  # two browsers at once would leave nothing of two cores to the tests
    "tests/launch/test_kept.py": "Ray",
    "tests/launch/test_ray.py": "Ray",
    "tests/test_demo_many.py": "Ray",  # its Ray cluster starts slowly beside another one
}
"""Modules and folders that share something expensive, or that should not run at the same time -> its name."""

LONGEST = (
    "JupyterLab",
    "Ray",
    "tests/tensor/test_sharded_grid.py",
    "tests/notebook/kernel/test_interrupt_local.py",
    "tests/notebook/kernel/test_detach.py",
    "tests/notebook/kernel/test_recovery.py",
    "tests/notebook/kernel/test_exact_resume.py",
    "tests/notebook/kernel/test_acceptance.py",
    "tests/notebook/kernel/test_kernel.py",
    "tests/failures/test_random_hangs.py",
    "tests/tensor/test_op_db.py",
    "tests/tensor/test_sharded_operations.py",
    "tests/train/process_group/test_group.py",
    "tests/launch/test_slurm.py",
    "tests/launch/test_conformance.py",
    "tests/notebook/view/test_layout.py",
    "tests/failures/test_f30_siege.py",
    "tests/failures/test_soak.py",
    "tests/actor/test_lifetime.py",
    "tests/test_demo.py",
    "tests/test_demo_live.py",
    "tests/train/checkpoint/test_checkpoint.py",
    "tests/failures/test_f52_interrupted_ddp.py",
    "tests/runtime/host/test_agent.py",
)
"""What takes more than half a minute, the longest first: modules, and names in `TOGETHER`. The others run after them.

Modules in `tests/notebook/kernel` stand together, because they share a kernel.
"""

ENDING = frozenset({"cabled", "machines", "own_session", "proxied", "standing"})
"""Fixtures that end the session of the test process."""


def scope_of(nodeid: str) -> str:
    """What one process runs together with a test: its module, or several modules under a name."""
    module = nodeid.partition("::")[0]
    engine = nodeid.endswith("[ray]") and module == "tests/launch/test_conformance.py"
    return "Ray" if engine else TOGETHER.get(module) or TOGETHER.get(module.rpartition("/")[0], module)


def ends_session(item: pytest.Item) -> bool:
    """Whether a test may end the session of the test process, by a fixture or because its module calls `shutdown_context`."""
    module = getattr(item, "module", None)
    return not ENDING.isdisjoint(getattr(item, "fixturenames", ())) or hasattr(module, "shutdown_context")


def longest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Put the tests of what takes longest first, and of the rest those of modules that end the session last.

    Apart from that, they stay in their order.
    """
    items = list(items)
    places = {scope: place for place, scope in enumerate(LONGEST)}
    ending = {scope_of(item.nodeid) for item in items if ends_session(item)}

    def place_of(item: pytest.Item) -> tuple[int, bool]:
        scope = scope_of(item.nodeid)
        return places.get(scope, len(places)), scope in ending

    return sorted(items, key=place_of)


class Schedule(LoadScopeScheduling):
    """One process runs all tests of a module, in their order; modules start in order, too."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process the next module once all but the last test of its modules have ended.

        A process needs that much to start its last test, since it must know the test after it. xdist gives it the module one
        test earlier: at the end of a run a module then waits behind two tests while another process has nothing to do.
        """
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
