"""Which tests go to which process, where several share them.

The processes of most tests wait most of the time, so two that run tests make use of two cores. A module stays together,
since it shares what its fixtures have made; so do the modules that share a Ray cluster.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

__all__ = ["Schedule"]

TOGETHER = {
    "tests/launch/test_kept.py": "Ray",
    "tests/launch/test_ray.py": "Ray",
    "tests/test_demo_many.py": "Ray",  # it has a cluster of its own: two at a time are slow to start
}
"""Modules that share what is expensive, or that should not run at the same time -> what it is."""


class Schedule(LoadScopeScheduling):
    """The tests of a module are run by one process, in their order; modules begin in theirs."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        engine = nodeid.endswith("[ray]") and module == "tests/launch/test_conformance.py"
        return "Ray" if engine else TOGETHER.get(module, module)
