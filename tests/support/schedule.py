"""The distribution of tests over processes, if several processes share them.

Most tests wait most of the time, so two test processes make good use of two cores. A module stays in one process, because its
tests share fixtures; so do the modules that share a Ray cluster.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

__all__ = ["Schedule"]

TOGETHER = {
    "tests/launch/test_kept.py": "Ray",
    "tests/launch/test_ray.py": "Ray",
    "tests/test_demo_many.py": "Ray",  # its Ray cluster starts slowly beside another one
}
"""Modules that share something expensive, or that should not run at the same time -> its name."""


class Schedule(LoadScopeScheduling):
    """One process runs all tests of a module, in their order; modules start in order, too."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        engine = nodeid.endswith("[ray]") and module == "tests/launch/test_conformance.py"
        return "Ray" if engine else TOGETHER.get(module, module)
